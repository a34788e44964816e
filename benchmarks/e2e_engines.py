"""The engines that `e2e.py` compares: how each one and its servers are configured, and whether a peer is there at all.

Owns the servers, which run on the second core and end with the caller's stack. An engine computes on the first core.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cold_costs import FOLDER
from kvpact.config import load_config
from kvpact_testkit.demo.engine import CORES, EngineProcess, EngineSettings
from kvpact_testkit.demo.phases import kvpact_config

ALL_CORES = sorted(os.sched_getaffinity(0))
COMPUTING_CORE, STORING_CORE = ALL_CORES[0], ALL_CORES[1 % len(ALL_CORES)]

GIB = 1 << 30
ENGINE_BYTES = 7 * GIB // 4
"""What the three processes of an engine take besides keys and values."""

SERVER_SECONDS = 90.0
"""Until a server must listen; LMCache's loads torch first."""

FOR_EVER = 3600
"""Seconds for which a server waits for an engine that stands still while others are measured."""


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread, and each process that it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Run:
    """What all engines share. Bytes are those of keys and values: of the longest prompt, and of all prompts."""

    folder: Path
    model: Path
    arguments: Mapping[str, Any]
    python: str
    """The interpreter of peers whose packages are not beside kvpact's."""
    kind: type[EngineProcess]
    longest_bytes: int
    all_bytes: int

    def settings(
        self, transfer: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None, *, peer: bool = False
    ) -> EngineSettings:
        """An engine of this run. The one without a connector keeps all prompts, the others forget."""
        import kvpact

        paths = (Path(kvpact.__file__).parents[1], Path(__file__).parents[1], os.environ.get("PYTHONPATH", ""))
        room = self.longest_bytes + self.longest_bytes // 4 if transfer else self.all_bytes
        return EngineSettings(
            self.model,
            transfer,
            {**self.arguments, "kv_cache_memory_bytes": room + GIB // 16},
            {CORES: str(COMPUTING_CORE), "PYTHONPATH": os.pathsep.join(map(str, paths)), **(environment or {})},
            self.python if peer else sys.executable,
        )


Configure = Callable[[Run, ExitStack, Path], EngineSettings]
"""Starts the servers that an engine needs, which end with the stack, and says how to start the engine."""


def without_cache(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
    return run.settings(None)


def hook_times(folder: Path) -> Path:
    """Where the engine with this folder writes what kvpact's hooks cost."""
    return folder / "hooks"


def _measured(run: Run, folder: Path, transfer: Mapping[str, Any]) -> EngineSettings:
    hook_times(folder).mkdir()
    named = {"kv_connector": "MeasuredPactConnector", "kv_connector_module_path": "benchmarks.measured_hooks"}
    return run.settings({**transfer, **named}, {FOLDER: str(hook_times(folder))})


def disk_folder(run: Run) -> Path:
    """kvpact's, in its first life and in its second."""
    return run.folder / "disk"


def kvpact_first(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
    """Memory for all prompts and a disk."""
    disk_folder(run).mkdir()
    config = kvpact_config(disk_folder(run), folder / "stats.json", _bytes(run.all_bytes + run.longest_bytes // 2))
    return _measured(run, folder, config)


def kvpact_again(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
    """Over the same disk, with memory for one prompt."""
    return run.settings(kvpact_config(disk_folder(run), folder / "stats.json", _memory_of_one(run)))


def _bytes(count: int) -> str:
    return f"{count}B"


def _memory_of_one(run: Run) -> str:
    """The longest prompt's blocks and no more: each prompt drives out the others, to be read again next time."""
    return _bytes(run.longest_bytes)


@dataclass(frozen=True, slots=True)
class WithRedis:
    """kvpact over a Redis server that is there already."""

    address: str
    measured: bool

    def __call__(self, run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        config = load_config(
            {
                "memory": _memory_of_one(run),
                "tiers": [f"redis://{self.address}?timeout=20s"],
                "stats_file": str(folder / "stats.json"),
            },
            {},
        ).kv_transfer_config()
        return _measured(run, folder, config) if self.measured else run.settings(config)


def example(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
    """vLLM's own example: a file for each layer, in the page cache."""
    extra = {"shared_storage_path": str(folder / "files")}
    return run.settings({"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})


def _serve(
    stack: ExitStack, command: Sequence[object], log: Path, port: int, variables: Mapping[str, str] | None = None
) -> None:
    """A server on the storing core, once it listens; ended by its pid with the stack."""
    with log.open("wb") as output, on_core(STORING_CORE):
        environment = {**os.environ, **(variables or {})}
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=output, env=environment)

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{Path(str(command[0])).name} does not listen: {last_line(log.read_text(errors='replace'))}")


def last_line(text: str) -> str:
    """Of what a program has printed."""
    return (text.strip().splitlines() or [""])[-1][:200]


@dataclass(frozen=True, slots=True)
class LMCache:
    """`lmcache server` and an engine that is its client, in one of the two ways of moving the bytes.

    `more` are further arguments of the server, which say more than those before; `waits` are the client's, in seconds.
    """

    mode: str
    more: Sequence[object] = ()
    waits: Mapping[str, object] = field(default_factory=lambda: {"mq_timeout": 30, "heartbeat_interval": FOR_EVER})

    def __call__(self, run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        from servers.redis_server import free_ports

        port, *others = free_ports(3)
        listen = ["--host", "localhost", "--port", port, "--http-port", others[0], "--prometheus-port", others[1]]
        size = ["--l1-size-gb", max(1, -(-2 * run.all_bytes // GIB)), "--eviction-policy", "LRU", "--chunk-size", 256]
        permitted = "engine_driven" if self.mode == "engine_driven" else "auto"
        ways = ["--max-workers", 1, "--supported-transfer-mode", permitted, "--worker-reap-timeout-seconds", FOR_EVER]
        program = Path(run.python).with_name("lmcache")
        _serve(stack, [program, "server", *listen, *size, *ways, *self.more], folder / "server.log", port)
        stack.callback(_remove_segments, set(Path("/dev/shm").glob("lmcache*")))
        extra = {"host": "tcp://localhost", "port": port, **self.waits}
        if self.mode != "engine_driven":
            extra["mp_transfer_mode"] = self.mode
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {f"lmcache.mp.{name}": value for name, value in extra.items()},
        }
        return run.settings(transfer, peer=True)


def _remove_segments(before: set[Path]) -> None:
    """What LMCache leaves in shared memory outlives both of its processes."""
    for segment in set(Path("/dev/shm").glob("lmcache*")) - before:
        segment.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Mooncake:
    """A master, and the memory either in the engine ("embedded") or in a client of its own ("standalone-store").

    That client also keeps what it holds in files of `ssd`, if given, and offers them again after a restart.
    """

    mode: str
    ssd: Path | None = None

    def __call__(self, run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        from servers.redis_server import free_ports

        port, metrics_port, client_port = free_ports(3)
        programs = _mooncake_programs(run.python)
        offload = ["-enable_offload=true"] if self.ssd else []
        master = [f"-rpc_port={port}", f"-metrics_port={metrics_port}", f"-client_ttl={FOR_EVER}", *offload]
        _serve(stack, [programs / "mooncake_master", *master], folder / "master.log", port)
        segment = 2 * run.all_bytes + GIB // 4
        if self.mode != "embedded":
            places = [f"-master_server_address=127.0.0.1:{port}", "-metadata_server=P2PHANDSHAKE", "-protocol=tcp"]
            lends = ["-host=127.0.0.1", f"-port={client_port}", f"-global_segment_size={segment}"]
            command = [programs / "mooncake_client", *places, *lends, "-local_buffer_size=512MB", *offload]
            variables = self._written_at_once() if self.ssd else {}
            _serve(stack, command, folder / "client.log", client_port, variables)
        written = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{port}",
            "protocol": "tcp",
            "device_name": "",
            "mode": self.mode,
            "global_segment_size": segment if self.mode == "embedded" else 0,
            "local_buffer_size": "512mb",
            "enable_offload": self.ssd is not None,
        }
        path = folder / "mooncake.json"
        path.write_text(json.dumps(written))
        transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        return run.settings(transfer, {"MOONCAKE_CONFIG_PATH": str(path)}, peer=True)

    def _written_at_once(self) -> dict[str, str]:
        """Of its client: by default it waits ten seconds, and for a bucket of 256 MiB."""
        return {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.ssd),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
        }


def _mooncake_programs(python: str) -> Path:
    """Where Mooncake's programs are: beside the peers' interpreter, or beside this one."""
    beside = Path(python).parent
    return beside if beside.joinpath("mooncake_master").exists() else Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine that is compared, and the word for it among `--peers`.

    `source` is where a warm prompt comes from in kvpact, a tier or "memory"; "" in others.
    """

    name: str
    peer: str
    configure: Configure
    source: str = ""
    forks: bool = True
    """Whether it starts forked. LMCache loads numba too early then, at which vLLM's CPU worker fails."""

    def kind(self, run: Run) -> type[EngineProcess]:
        """How its process is started in this run."""
        return run.kind if self.forks else EngineProcess


NO_CACHE = Subject("no cache", "", without_cache)
KVPACT = Subject("kvpact", "kvpact", kvpact_first, "memory")
KVPACT_AGAIN = Subject("kvpact, disk, new process", "kvpact", kvpact_again, "disk")
OTHERS = (
    Subject("ExampleConnector", "example", example),
    Subject("LMCache, engine_driven", "lmcache", LMCache("engine_driven"), forks=False),
    Subject("LMCache, lmcache_driven", "lmcache", LMCache("lmcache_driven"), forks=False),
    Subject("Mooncake, embedded", "mooncake", Mooncake("embedded")),
    Subject("Mooncake, standalone", "mooncake", Mooncake("standalone-store")),
)


def kvpact_with_redis(address: str, *, new: bool) -> Subject:
    """kvpact over this server: in the process that computes the prompts, or in a new one."""
    name = "kvpact, Redis, new process" if new else "kvpact with Redis"
    return Subject(name, "kvpact", WithRedis(address, measured=not new), "redis")


def engines_with_room(run: Run) -> int:
    """How many engines there is memory for. With more of them the machine would end processes of others."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return (free - run.all_bytes) // (ENGINE_BYTES + run.longest_bytes + 2 * run.all_bytes)


def groups_with_room(peers: Sequence[str], engines: int) -> list[list[str]]:
    """Peers in order, in groups of which each has at most so many engines with the one without a cache.

    Ends the program with one line if that is too few for one peer and an engine beside it.
    """
    sizes = {peer: max(1, sum(subject.peer == peer for subject in OTHERS)) for peer in peers}
    if engines < 1 + max(sizes.values()):
        raise SystemExit(
            f"{max(sizes, key=sizes.__getitem__)}: memory is free for {max(0, engines)} engines, it takes "
            f"{1 + max(sizes.values())}: compare shorter prompts (--tokens) or others (--peers)"
        )
    groups: list[list[str]] = []
    for peer in peers:
        if groups and 1 + sum(sizes[other] for other in groups[-1]) + sizes[peer] <= engines:
            groups[-1].append(peer)
        else:
            groups.append([peer])
    return groups


WAYS_TO_GET = {
    "lmcache": "python -m venv VENV, vLLM and lmcache==0.5.6 into it, then --peer-python VENV/bin/python",
    "mooncake": "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 and apt-get install libibverbs1",
    "nixl": "as lmcache, and nixl and nixl-cu12 into VENV",
    "redis": "pip install 'kvpact[redis]' and apt-get install redis-server",
}


def is_there(peer: str, python: str) -> bool:
    """Whether the packages and programs of a peer can be used, its own in the environment of `python`."""
    if peer == "redis":
        return shutil.which("redis-server") is not None and _imports(sys.executable, "redis, hiredis")
    if peer == "nixl":
        return is_there("lmcache", python) and _imports(python, "nixl._api")
    if peer == "lmcache":
        return Path(python).with_name("lmcache").exists() and _imports(python, "lmcache")
    if peer == "mooncake":
        return _imports(python, "mooncake.store") and _mooncake_programs(python).joinpath("mooncake_master").exists()
    return True


def _imports(python: str, modules: str) -> bool:
    try:
        return subprocess.run([python, "-c", f"import {modules}"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
