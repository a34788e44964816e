"""An OpenAI-compatible server of a user's command, in a session of its own: started, asked, counted and ended.

Owns the process, its log and what it leaves in /dev/shm. Speaks HTTP with the standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from kvpact.errors import KvpactError
from kvpact_testkit.demo.engine import session_members

MODEL = "compared"
"""Name under which a server answers, unless its command says another one."""

START_SECONDS = 900.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 600.0

SENTENCE = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .+)$")
"""Last part of a traceback, behind what vLLM's logger puts before it."""

MAPPED = re.compile(r"(/dev/shm/.+?)(?: \(deleted\))?$", re.MULTILINE)
"""Files of shared memory in a process's list of mappings."""


class ServerError(KvpactError):
    """A server that did not start, died, or did not answer in time; the message is its last sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: tokens, seconds from the request to each of them, and prompt tokens that were not computed."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def first_token_ms(self) -> float:
        """Milliseconds to the first token."""
        return self.seconds[0] * 1e3


class Server:
    """A server on a free port of loopback; `command` is a user's, without the address. Call `wait_ready` before use."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], model: str = MODEL) -> None:
        self.port = free_ports(1)[0]
        self.log = log
        self._model = model
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Leader of the server's session, which holds all its processes."""
        return self._process.pid

    def wait_ready(self, timeout: float = START_SECONDS) -> Self:
        """Wait until the server is healthy. Raises ServerError."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(last_sentence(self.log))
            with suppress(OSError, HTTPException):
                self._get("/health")
                return self
            time.sleep(0.1)
        raise ServerError(f"no answer within {timeout:g} s of its start; {last_sentence(self.log)}")

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        on_token: Callable[[float], bool] = lambda at: True,
        timeout: float = ANSWER_SECONDS,
        fields: Mapping[str, object] | None = None,
    ) -> Answer:
        """Complete `prompt` (token ids) greedily, to exactly `max_tokens`. Raises ServerError.

        `fields` are further ones of the request. `on_token` is called with `time.monotonic()` at each token; as soon as
        it returns False, the client hangs up.
        """
        asked = {
            "model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
            **(fields or {}),
        }  # fmt: skip
        tokens: list[int] = []
        times: list[float] = []
        usage: Mapping[str, Any] = {}
        began = time.monotonic()
        try:
            for part in self._events("/v1/completions", asked, timeout):
                usage = part.get("usage") or usage
                for choice in part.get("choices", ()):
                    now = time.monotonic()
                    new = choice.get("token_ids") or ()
                    tokens += new
                    times += [now - began] * len(new)
                    if new and not on_token(now):
                        return Answer(tuple(tokens), tuple(times), len(prompt), 0)
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(self._why(error)) from error
        if len(tokens) != max_tokens:
            raise ServerError(f"{len(tokens)} of {max_tokens} tokens came; {last_sentence(self.log)}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(tuple(tokens), tuple(times), usage["prompt_tokens"], details.get("cached_tokens") or 0)

    def tokens_of(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat request, as the model's own template makes them. Raises ServerError."""
        try:
            with closing(self._connection(60.0)) as connection:
                answer = self._post(connection, "/tokenize", {"model": self._model, "messages": list(messages)})
                tokens: list[int] = json.loads(answer.read())["tokens"]
        except (OSError, HTTPException, ValueError, KeyError) as error:
            raise ServerError(self._why(error)) from error
        return tokens

    def metrics(self) -> dict[str, float]:
        """The metrics page: sums of samples by name, and by `name{value}` for the labels source and tier."""
        try:
            page = self._get("/metrics")
        except (OSError, HTTPException) as error:
            raise ServerError(self._why(error)) from error
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                label = sample.labels.get("source") or sample.labels.get("tier")
                found[f"{sample.name}{{{label}}}" if label else sample.name] += sample.value
                if family.name.endswith("cache_config_info"):
                    sizes = ("block_size", "num_gpu_blocks")
                    found |= {name: float(sample.labels[name]) for name in sizes if sample.labels[name].isdecimal()}
        return found

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """SIGTERM, as a service manager sends it, so that a cache can end its writes; then kill what is left."""
        files = mapped_in(session_members(self.pid))
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        end_session(self.pid, files)
        self._process.wait()

    def kill(self) -> None:
        """SIGKILL to every process of the server; what they had mapped of /dev/shm goes with them."""
        end_session(self.pid)
        self._process.wait()

    def _connection(self, timeout: float) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def _get(self, path: str) -> str:
        with closing(self._connection(20.0)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise HTTPException(f"{path} answers {answer.status}")
        return text

    def _post(self, connection: HTTPConnection, path: str, body: Mapping[str, object]) -> Any:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise HTTPException(f"{path} answers {answer.status}: {answer.read().decode(errors='replace')[:300]}")
        return answer

    def _events(self, path: str, body: Mapping[str, object], timeout: float) -> Iterator[Mapping[str, Any]]:
        """Parts of a streamed answer. Raises HTTPException for an error among them, or if it ends without its end."""
        with closing(self._connection(timeout)) as connection:
            for line in self._post(connection, path, body):
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    return
                if text:
                    part = json.loads(text)
                    if "error" in part:
                        raise HTTPException(str(part["error"].get("message", part["error"])))
                    yield part
        raise HTTPException("the answer broke off")

    def _why(self, error: Exception) -> str:
        """Reason of a failed request: a dead server's last sentence, else the error."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        dead = self._process.poll() is not None
        said = last_sentence(self.log) if dead else ""
        return f"died: {said}" if dead else f"{type(error).__name__}: {error}"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def is_listening(port: int) -> bool:
    """True if somebody accepts connections at this port of loopback."""
    try:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=1.0)):
            return True
    except OSError:
        return False


def last_sentence(log: Path) -> str:
    """The last error in a log that names a cause, else its last line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [found[1].strip() for line in lines if (found := SENTENCE.search(line)) and "root cause" not in line]
    last = errors[-1:] or [line.strip() for line in lines if line.strip()][-1:]
    return (last or ["it said nothing"])[0][:300]


def end_session(session: int, files: Iterable[Path] = ()) -> None:
    """SIGKILL to every process of a session; files of /dev/shm that it alone had mapped, and these `files`, go too."""
    left = session_members(session)
    mapped = {*files, *mapped_in(left)}
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = session_members(session)
    for path in mapped - mapped_in(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        path.unlink(missing_ok=True)


def mapped_in(pids: Iterable[int]) -> set[Path]:
    """Files of /dev/shm that these processes have mapped; none of one that is gone, or another user's."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
            found.update(map(Path, MAPPED.findall(maps)))
    return found
