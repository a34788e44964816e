"""A real vLLM engine in a process of its own, driven over a pipe and killable at any moment.

Owns the process and its log; `kvpact_testkit.demo.messages` has the messages on the pipe, and
`kvpact_testkit.demo.host` is the other side. Never imports vLLM itself, so a demonstration or a test holds several
engines and survives the death of each.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from kvpact.errors import KvpactError
from kvpact_testkit.demo.messages import (
    Arrivals,
    Call,
    Command,
    Crowd,
    Generate,
    Output,
    ReadMetrics,
    Reply,
    Reset,
    Settings,
    Stop,
)

START_TIMEOUT = 300.0
"""Seconds until an engine must answer; it takes about 25 on two idle cores, and several may start at once."""

GENERATE_TIMEOUT = 180.0
STOP_TIMEOUT = 60.0


class EngineError(KvpactError):
    """The engine did not start, died, or did not answer in time; the message carries the end of its log."""


CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""Which cores each CPU rank of vLLM computes on, such as "0" or "0|1". A GPU engine ignores it."""

PINNED_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
"""Equal in every engine that is compared with another."""

BASE_ARGUMENTS: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "seed": 0,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to start an engine: `vllm.LLM` arguments over `BASE_ARGUMENTS`, environment over `PINNED_ENVIRONMENT`.

    `python` is the interpreter of its process, which must find vLLM and kvpact; another one has other packages beside.
    """

    model: Path
    kv_transfer_config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def llm_arguments(self) -> dict[str, Any]:
        """The keyword arguments for `vllm.LLM`."""
        arguments = {**BASE_ARGUMENTS, "model": str(self.model), **self.arguments}
        if self.kv_transfer_config is not None:
            arguments["kv_transfer_config"] = dict(self.kv_transfer_config)
        return arguments

    def process_environment(self) -> dict[str, str]:
        """Environment of the engine's processes beside this process's own: each rank computes on a core of its own."""
        ranks = int(self.arguments.get("tensor_parallel_size", 1)) * int(
            self.arguments.get("pipeline_parallel_size", 1)
        )
        return {**PINNED_ENVIRONMENT, CORES: one_core_each(ranks), **self.environment}


def one_core_each(ranks: int = 1) -> str:
    """The binding of vLLM's CPU ranks to cores, such as "0|1"; where cores are too few, ranks share them.

    A binding in this process's environment counts if it is for this many ranks. One is always given: vLLM keeps one
    more core free as soon as a connector is set, which changes the number of threads and with it times and logits.
    """
    chosen = os.environ.get(CORES)
    if chosen and chosen.count("|") == ranks - 1:
        return chosen
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


def counts_in(stats_file: Path) -> dict[str, Any]:
    """The counts of the engine that wrote a `stats_file`, by their series as `kvpact.metrics` names them."""
    (engine,) = msgspec.json.decode(stats_file.read_bytes())["engines"]
    counts = dict[str, Any]()
    for name, found in engine["metrics"].items():
        if isinstance(found, list):
            for one in found:
                value = one.pop("value")
                labels = ",".join(f'{label}="{text}"' for label, text in one.items())
                counts[f"{name}{{{labels}}}"] = value
        else:
            counts[name] = found
    return counts


class EngineProcess:
    """One engine. Call `wait_ready` before use. As a context manager it ends all its processes.

    Starts at once, or with `held` only loads vLLM's modules, which take a third of the start, and waits for `start`.
    """

    HOST: ClassVar[Sequence[str]] = ("-m", "kvpact_testkit.demo.host")
    """What Python runs as the engine's process."""

    def __init__(self, settings: EngineSettings, log: Path, *, held: bool = False) -> None:
        self.settings = settings
        self.log = log
        self.block_size = 0
        self._held, self._loaded = True, False
        self._lines = bytearray()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._replies, replies = os.pipe()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [settings.python, *self.HOST, str(replies)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(replies,),
                    env={**os.environ, **settings.process_environment()},
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._replies)
            raise
        finally:
            os.close(replies)
        if not held:
            self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def pid(self) -> int:
        """The process that holds `vllm.LLM`; its session holds the engine core and the workers too."""
        return self._process.pid

    def start(self) -> Self:
        """Start an engine that is `held`; any other one has started."""
        if self._held:
            self._held = False
            self._write(Settings(self.settings.llm_arguments()))
        return self

    def wait_loaded(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until vLLM's modules are loaded: an engine that is `held` computes nothing from then on."""
        if not self._loaded:
            self._receive(timeout)
            self._loaded = True

    def wait_ready(self, timeout: float = START_TIMEOUT) -> Self:
        """Wait until the engine answers. Raises EngineError if it does not within `timeout` seconds."""
        if not self.block_size:
            self.start()
            self.wait_loaded(timeout)
            self.block_size = self._receive(timeout).block_size
        return self

    def generate(
        self, prompts: Sequence[Sequence[int]], *, timeout: float = GENERATE_TIMEOUT, **options: Any
    ) -> list[Output]:
        """Answer `prompts` (token ids); the outputs are in their order. `options` are those of `Generate`."""
        self.send_prompts(prompts, **options)
        return self.receive_outputs(timeout)

    def send_prompts(self, prompts: Sequence[Sequence[int]], **options: Any) -> None:
        """Start on `prompts` and return at once, for a caller that acts meanwhile, such as by a kill."""
        self.wait_ready()
        self._write(Generate([list(prompt) for prompt in prompts], **options))

    def crowd(
        self, prompts: Sequence[Sequence[int]], *, timeout: float = GENERATE_TIMEOUT, **options: Any
    ) -> list[Output]:
        """Answer `prompts` while users leave at random. `options` are those of `Crowd`."""
        return self._ask(Crowd([list(prompt) for prompt in prompts], **options), timeout).outputs

    def beside_decodes(
        self, clients: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], apart: float, **options: Any
    ) -> list[Output]:
        """Answer `prompts` one by one, `apart` seconds apart, beside clients who decode; see `Arrivals`."""
        command = Arrivals([list(one) for one in clients], [list(one) for one in prompts], apart, **options)
        return self._ask(command, GENERATE_TIMEOUT).outputs

    def metrics(self, timeout: float = 20.0) -> dict[str, float]:
        """vLLM's own counters by name, such as "vllm:prefix_cache_hits", or "vllm:kvpact_read_blocks{disk}"."""
        return self._ask(ReadMetrics(), timeout).metrics

    def receive_outputs(self, timeout: float = GENERATE_TIMEOUT) -> list[Output]:
        """The outputs of the last `send_prompts`. Raises EngineError if the engine died or took too long."""
        return self._receive(timeout).outputs

    def reset_prefix_cache(self, *, reset_connector: bool = False, timeout: float = 20.0) -> None:
        """Drop the engine's own prefix cache; `reset_connector` drops kvpact's as well.

        The engine refuses while a transfer still protects blocks, so this asks again until `timeout` seconds are over.
        """
        self.wait_ready()
        deadline = time.monotonic() + timeout
        while not self._ask(Reset(reset_connector), timeout).done:
            if time.monotonic() > deadline:
                raise EngineError(f"the engine refused to reset its prefix cache for {timeout:g} s{self._log_tail()}")
            time.sleep(0.05)

    def call(self, method: str, *arguments: Any, function: str = "", timeout: float = 60.0) -> None:
        """Call a method of `vllm.LLM`; see `Call`. Raises EngineError if it fails."""
        self._ask(Call(method, list(arguments), function), timeout)

    def stats(self) -> dict[str, Any]:
        """kvpact's own counts, from the `stats_file` of its configuration; empty without one or before the first."""
        extra = (self.settings.kv_transfer_config or {}).get("kv_connector_extra_config", {})
        path = extra.get("stats_file")
        if path is None or not Path(path).exists():
            return {}
        return counts_in(Path(path))

    def processes(self) -> dict[int, str]:
        """The living processes of this engine, by id, with the name each gives itself."""
        return session_members(self.pid)

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Shut down in order, so that the cache can finish its writes; kills what is left after `timeout` seconds."""
        if self._process.poll() is None:
            with suppress(EngineError, subprocess.TimeoutExpired):
                if self._held:
                    self._close()
                else:
                    self._write(Stop())
                self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once; returns when all are gone."""
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            _send_signal(left, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()
        self._close()

    def discard(self) -> None:
        """End an engine whose answers are all in: as `kill`, after Python's resource trackers have tidied /dev/shm.

        Takes a second where `stop` takes seven. What vLLM leaves there after a SIGKILL to all would stay for ever.
        """
        others = [pid for pid, name in self.processes().items() if "resource_tracker" not in name]
        _send_signal(others, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """All processes of the engine stand still (SIGSTOP), while another one is measured.

        An idle engine polls for a second, on the core that all compared engines are pinned to. A guard lets it go on in
        any case, even if this process is killed meanwhile: it waits for the end of a pipe that only we hold open.
        """
        pids = self.processes()
        guard = subprocess.Popen(
            ["sh", "-c", 'read -r end; kill -CONT "$@" 2>/dev/null', "guard", *map(str, pids)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _send_signal(pids, signal.SIGSTOP)
            yield
        finally:
            guard.communicate()

    def _ask(self, command: Command, timeout: float) -> Reply:
        self.wait_ready()
        self._write(command)
        return self._receive(timeout)

    def _write(self, message: Settings | Command) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise EngineError(f"the engine is gone{self._log_tail()}") from error

    def _receive(self, timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._lines:
                if time.monotonic() > deadline:
                    self.kill()
                    raise EngineError(f"the engine did not answer within {timeout:g} s{self._log_tail()}")
                if not selector.select(0.2):
                    continue
                chunk = os.read(self._replies, 1 << 20)
                if not chunk:
                    self.kill()
                    raise EngineError(f"the engine died{self._log_tail()}")
                self._lines += chunk
        line, _, rest = self._lines.partition(b"\n")
        self._lines = rest
        reply = msgspec.json.decode(line, type=Reply)
        if reply.error is not None:
            raise EngineError(f"the engine failed: {reply.error}{self._log_tail()}")
        return reply

    def _log_tail(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"; the end of {self.log}:\n{text[-2000:]}"

    def _close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            os.close(self._replies)


@contextmanager
def loading_on_all_cores(*engines: EngineProcess) -> Iterator[None]:
    """Meanwhile, workers that still load vLLM's modules do so on any core; each goes back to its own to compute.

    vLLM pins a CPU worker as soon as its process begins, so those of engines that start side by side on one core would
    take turns at it for half a minute while another core rests. A worker gives itself a name when it has loaded all.
    """
    homes: dict[int, set[int]] = {}
    over = threading.Event()

    def move(pid: int, cores: set[int]) -> None:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)

    def look() -> None:
        for engine in engines:
            for pid, name in engine.processes().items():
                with suppress(OSError):  # it has just ended
                    if "Worker" in name and pid in homes:
                        move(pid, homes.pop(pid))
                    elif "Worker" not in name and pid not in homes and len(os.sched_getaffinity(pid)) < len(everywhere):
                        homes[pid] = os.sched_getaffinity(pid)
                        move(pid, everywhere)

    def watch() -> None:
        while not over.wait(0.1):
            look()
        for pid, home in homes.items():
            with suppress(OSError):
                move(pid, home)

    everywhere = os.sched_getaffinity(0)
    watcher = threading.Thread(target=watch, name="kvpact-demo-start", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def session_members(session: int) -> dict[int, str]:
    """The living processes of a session, by id, with their command lines. Zombies are not alive."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")  # a name may be any bytes
            command = Path("/proc", entry, "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, its_session = stat[stat.rindex(")") + 2 :].split()[:4]
        if state != "Z" and int(its_session) == session:
            found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
