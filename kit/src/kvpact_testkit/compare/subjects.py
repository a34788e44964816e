"""Servers that are compared: how a user starts each, where its store lies, and what that may take.

Owns the command lines and the helpers that some engines need. A subject that is not installed says what to install.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from kvpact_testkit.compare.server import MODEL, ServerError, end_session, free_ports, is_listening, last_sentence
from kvpact_testkit.demo.engine import CORES, one_core_each

VLLM = (sys.executable, "-P", "-m", "kvpact.cli.vllm_command", "serve")
"""vLLM's own command line, whichever distribution brings vLLM."""

KVPACT = (sys.executable, "-P", "-m", "kvpact", "serve")

LISTEN_SECONDS = 90.0
"""Until a helper must listen; LMCache's loads torch first."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """Model, options and bytes that all servers of a run share.

    `folder` holds the stores. `kv_bytes` is the engine's own KV memory, 0 for vLLM's choice; `memory` the bytes of host
    memory that a cache may take above a store, `all_bytes` those of all keys and values of the load.
    """

    model: str
    arguments: Sequence[str]
    folder: Path
    kv_bytes: int
    memory: int
    all_bytes: int
    tier: str = ""

    @property
    def all_memory(self) -> int:
        """Memory with room for all."""
        return self.all_bytes * 5 // 4

    @property
    def disk_bound(self) -> int:
        """Capacity of kvpact's disk."""
        return 2 * self.all_bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """A server's command; `store` is the folder of what outlives it here, `bound` the bytes that it may take.

    `files` are added to the environment. `outlives`: its store may lie elsewhere, too.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    store: Path | None = None
    bound: int | None = None
    outlives: bool = False


Configure = Callable[[Room, ExitStack], Launch]
"""Starts the helpers that a server needs, which end with the stack, and says how to start the server."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is compared: the word for it among `--subjects`, its name in rows, its modules beside vLLM."""

    key: str
    name: str
    configure: Configure
    needs: str = ""
    install: str = ""

    @property
    def is_installed(self) -> bool:
        """True if its package is beside vLLM."""
        return not self.needs or find_spec(self.needs) is not None


def serve(room: Room, begin: Sequence[str], *options: object) -> list[str]:
    """Command of a server of this run, without the address."""
    words = [*begin, room.model, "--served-model-name", MODEL, "--enable-prompt-tokens-details"]
    if room.kv_bytes:
        words += ["--kv-cache-memory-bytes", str(room.kv_bytes)]
    return [*words, *map(str, options), *room.arguments]


def environment(cpu: bool) -> dict[str, str]:
    """Variables of all servers; on a CPU each computes on one core, and the client has the others."""
    said = {"TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    return {**said, **({CORES: one_core_each()} if cpu else {})}


def without_cache(room: Room, stack: ExitStack) -> Launch:
    return Launch(serve(room, VLLM, "--no-enable-prefix-caching"))


def prefix_cache(room: Room, stack: ExitStack) -> Launch:
    return Launch(serve(room, VLLM))


def offloading(room: Room, stack: ExitStack) -> Launch:
    return Launch(serve(room, VLLM, "--kv-offloading-size", room.all_bytes / GIB))


def offloading_files(room: Room, stack: ExitStack) -> Launch:
    """vLLM's tiers: host memory above a folder of files."""
    store = room.folder / "fs"
    store.mkdir(exist_ok=True)
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": room.memory,
        "secondary_tiers": [{"type": "fs", "root_dir": str(store)}],
    }
    return Launch(serve(room, VLLM, *connector("OffloadingConnector", extra)), store=store)


def connector(name: str, extra: Mapping[str, object], module: str = "") -> list[str]:
    """The option that names a connector of vLLM's or of `module`."""
    named = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(named | ({"kv_connector_module_path": module} if module else {}))]


def kvpact_memory(room: Room, stack: ExitStack) -> Launch:
    return Launch(serve(room, KVPACT, "--memory", f"{room.all_memory}B"))


def kvpact_disk(room: Room, stack: ExitStack) -> Launch:
    store = room.folder / "kvpact"
    url = f"disk://{quote(str(store))}?capacity={room.disk_bound}B"
    return Launch(serve(room, KVPACT, "--memory", f"{room.memory}B", "--tier", url), {}, store, room.disk_bound)


def kvpact_tier(room: Room, stack: ExitStack) -> Launch:
    """The URL may hold a secret, so it is in no command line."""
    return Launch(serve(room, KVPACT, "--memory", f"{room.memory}B"), {"KVPACT_TIERS": room.tier}, outlives=True)


def lmcache(room: Room, stack: ExitStack) -> Launch:
    """`lmcache server` with memory above a folder of files, and the server that is its client."""
    store = room.folder / "lmcache"
    store.mkdir(exist_ok=True)
    ports = free_ports(3)
    program = [Path(sys.executable).with_name("lmcache"), "server", "--host", "localhost"]
    program += ["--port", ports[0], "--http-port", ports[1], "--prometheus-port", ports[2]]
    program += ["--l1-size-gb", max(1, -(-room.memory // GIB)), "--eviction-policy", "LRU", "--chunk-size", 256]
    program += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(store)})]
    helper(stack, program, room.folder / "lmcache.log", ports[0])
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": ports[0]}
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    return Launch(serve(room, VLLM, *connector("LMCacheMPConnector", extra, module)), store=store)


def mooncake(room: Room, stack: ExitStack) -> Launch:
    """Mooncake's master, with the memory in the server."""
    port, metrics_port = free_ports(2)
    program = [Path(sys.executable).with_name("mooncake_master"), f"-rpc_port={port}", f"-metrics_port={metrics_port}"]
    helper(stack, program, room.folder / "mooncake.log", port)
    written = {
        "metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp",
        "device_name": "", "mode": "embedded", "global_segment_size": room.all_memory + GIB // 4,
        "local_buffer_size": "512mb",
    }  # fmt: skip
    path = room.folder / "mooncake.json"
    path.write_text(json.dumps(written))
    return Launch(serve(room, VLLM, *connector("MooncakeStoreConnector", {})), {"MOONCAKE_CONFIG_PATH": str(path)})


NONE = Subject("none", "no cache", without_cache)
SUBJECTS = (
    NONE,
    Subject("prefix", "vLLM's prefix cache", prefix_cache),
    Subject("offloading", "vLLM's offloading", offloading),
    Subject("fs", "vLLM's offloading, fs", offloading_files),
    Subject("memory", "kvpact, memory", kvpact_memory),
    Subject("disk", "kvpact, memory and disk", kvpact_disk),
    Subject("tier", "kvpact, --tier", kvpact_tier),
    Subject("lmcache", "LMCache, fs", lmcache, "lmcache", "pip install lmcache"),
    Subject(
        "mooncake", "Mooncake, memory", mooncake, "mooncake", "pip install mooncake-transfer-engine (-non-cuda: a CPU)"
    ),
)
QUICK = ("none", "prefix", "disk")
"""The engine without a cache, which judges, and two others."""


def helper(stack: ExitStack, command: Sequence[object], log: Path, port: int) -> None:
    """A process beside a server, once it listens; it ends with the stack. Raises ServerError."""
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command], stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        raise ServerError(f"{command[0]}: {error.strerror}") from None
    stack.callback(process.wait)
    stack.callback(end_session, process.pid)
    deadline = time.monotonic() + LISTEN_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if is_listening(port):
            return
        time.sleep(0.05)
    raise ServerError(f"{Path(str(command[0])).name} does not listen: {last_sentence(log)}")
