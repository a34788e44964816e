"""One process that has loaded vLLM and runs functions in forks of itself: an engine then starts in a second.

A function may hold a whole `vllm.LLM`, ask it whatever its interface offers and look into it; what it returns is
pickled. Started by `SceneHost` as `python scene_host.py DESCRIPTOR MODULE...`; it finds modules where its caller does.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from kvpact_testkit.demo.engine import CORES, PINNED_ENVIRONMENT, START_TIMEOUT, one_core_each

ENVIRONMENT: Mapping[str, str] = {
    **PINNED_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Of the host: the scheduler and the worker of an engine live in the process that asks, and compile nothing."""

PRELOADED = (
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle",
    "vllm.model_executor.models.idefics3",
)


class SceneFailed(Exception):
    """The function raised, died or took too long; the message has its traceback or the end of the log."""


class SceneHost:
    """The process, seen from outside. A context manager that ends it with all that it started.

    It loads `modules` as well: else every function that needs them would.
    """

    def __init__(self, log: Path, modules: Sequence[str] = ()) -> None:
        self._log = log
        self._orders, theirs = Pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **ENVIRONMENT, CORES: one_core_each(), "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._orders.close()

    def run(self, function: str, *arguments: Any, timeout: float = START_TIMEOUT) -> Any:
        """What `function` ("module:name") returns in a process of its own. Raises SceneFailed."""
        try:
            self._orders.send((function, arguments))
            if not self._orders.poll(timeout):
                raise SceneFailed(f"{function} took more than {timeout:g} s{self._tail()}")
            failure, result = self._orders.recv()
        except (EOFError, OSError) as error:
            raise SceneFailed(f"the host is gone{self._tail()}") from error
        if failure:
            raise SceneFailed(f"{function}: {failure}{self._tail()}")
        return result

    def _tail(self) -> str:
        return f"\nthe end of {self._log}:\n{self._log.read_text(errors='replace')[-3000:]}"


def main() -> None:
    """Load all, then run what is ordered until the caller is gone."""
    gc.disable()
    for module in (*PRELOADED, *sys.argv[2:]):
        import_module(module)
    gc.freeze()
    gc.enable()
    orders: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(orders.fileno(), False)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            _run(orders, *order)
        _, status = os.waitpid(child, 0)
        if status:
            orders.send((f"its process ended with {os.waitstatus_to_exitcode(status)}", None))


def _run(orders: Connection[Any, Any], function: str, arguments: tuple[Any, ...]) -> None:
    """In the fork; does not return, and takes nothing apart: the process's end does."""
    module, _, name = function.partition(":")
    try:
        reply = ("", getattr(import_module(module), name)(*arguments))
    except BaseException:
        reply = (traceback.format_exc(), None)
    sys.stdout.flush()
    sys.stderr.flush()
    orders.send(reply)
    os._exit(0)


if __name__ == "__main__":
    main()
