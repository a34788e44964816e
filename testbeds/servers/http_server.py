"""A real OpenAI-compatible server that a user's command started, asked over HTTP by the `openai` client.

Owns the server's process, its log and what its metrics page says. The command is a user's: `kvpact serve` or
`vllm serve`; `tiny_server` has the options of a small engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import Request, urlopen

import openai
from prometheus_client.parser import text_string_to_metric_families

from kvpact_testkit.demo.engine import CORES, one_core_each, session_members
from servers.redis_server import free_ports

START_SECONDS = 300.0
"""Two idle cores take about 40."""

STOP_SECONDS = 60.0

TINY = (
    "--served-model-name=tiny", "--dtype=float32", "--enforce-eager", "--max-model-len=512",
    "--kv-cache-memory-bytes=67108864", "--enable-prompt-tokens-details",
)  # fmt: skip
"""An engine that starts fast and computes equal bytes each time."""


def users_environment() -> dict[str, str]:
    """Variables of a user whose PATH begins with this environment; each engine has a core of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, CORES: one_core_each(), "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Answer:
    """What one completion gave."""

    text: str
    logprobs: tuple[Mapping[str, float], ...]
    """For each token, its most likely tokens with log-probabilities."""
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int

    def same_as(self, other: Answer) -> bool:
        """Bit-identical tokens and log-probabilities, of a request that was answered to its end."""
        return (self.text, self.logprobs) == (other.text, other.logprobs) and self.finish_reason == "length"


class Server:
    """A server in a session of its own; `command` is what a user types, without the address. The port is by default one
    that is free."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], *, port: int | None = None
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120.0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.kill()

    def wait_ready(self) -> Self:
        """Wait until the server says that it is well."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self._log_tail(f"the server left with code {self.process.returncode}")
            assert time.monotonic() < deadline, self._log_tail(f"no answer within {START_SECONDS:g} s")
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)

    def ask(self, tokens: list[int], *, stream: bool = False, max_tokens: int = 6, engine: int | None = None) -> Answer:
        """Complete `tokens`, greedily, on the data-parallel replica `engine`, by default on one that vLLM chooses."""
        asked: dict[str, Any] = {"model": self.model, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}
        asked |= {"logprobs": 3}
        if engine is not None:
            asked["extra_headers"] = {"X-data-parallel-rank": str(engine)}
        if not stream:
            whole = self.client.completions.create(**asked)
            return _answer([whole])
        options: Any = {"include_usage": True}
        with self.client.completions.create(**asked, stream=True, stream_options=options) as chunks:
            return _answer(list(chunks))

    def post(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Call one of vLLM's own endpoints, which its development mode has more of; it must succeed."""
        url, sent = f"http://127.0.0.1:{self.port}/{path}", json.dumps(body or {}).encode()
        with urlopen(Request(url, sent, {"Content-Type": "application/json"}), timeout=120):
            pass

    @property
    def model(self) -> str:
        """The name under which the server answers."""
        name: str = self.client.models.list().data[0].id
        return name

    def leave_after(self, tokens: list[int], chunks: int) -> None:
        """Ask for a long answer as a stream, and hang up after a few chunks of it."""
        with self.client.completions.create(model=self.model, prompt=tokens, max_tokens=400, stream=True) as stream:
            for _ in zip(range(chunks), stream, strict=False):
                pass

    def metrics(self, engine: int | None = None) -> dict[str, float]:
        """The metrics page: each sample by its name, and with kvpact's labels by `name{value}`; engines are summed, or
        only the replica `engine` counts."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as page:
            families = text_string_to_metric_families(page.read().decode())
        found: dict[str, float] = defaultdict(float)
        for sample in (sample for family in families for sample in family.samples):
            if not sample.name.endswith("_created") and (engine is None or sample.labels.get("engine") == str(engine)):
                value = sample.labels.get("tier") or sample.labels.get("reason")
                found[f"{sample.name}{{{value}}}" if value else sample.name] += sample.value
        return found

    def wait_for(
        self, what: Callable[[dict[str, float]], bool], seconds: float = 30.0, *, engine: int | None = None
    ) -> dict[str, float]:
        """The metrics page once `what` is true of it. vLLM updates it with its steps, so short prompts are asked."""
        deadline = time.monotonic() + seconds
        while not what(seen := self.metrics(engine)):
            assert time.monotonic() < deadline, {name: value for name, value in seen.items() if "kvpact" in name}
            self.ask([1, 2, 3], max_tokens=1, engine=engine)
        return seen

    def stop(self) -> int:
        """SIGTERM, as a service manager sends it; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """SIGKILL to every process of the server at once."""
        while members := session_members(self.process.pid):
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.process.wait()

    def _log_tail(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"{what}; the end of {self.log}:\n" + "\n".join(lines[-40:])


def tiny_server(model: Path, log: Path, *options: str, inside: Sequence[str] = (), **environment: str) -> Server:
    """`kvpact serve` of a tiny model with 16 MiB of memory, in vLLM's development mode, as a server named "tiny".

    `inside` is a command before it, such as `unshare` with its options.
    """
    serve = [str(Path(sys.executable).with_name("kvpact")), "serve", str(model)]
    command = [*inside, *serve, "--memory", "16MiB", *TINY, *options]
    return Server(command, log, {**users_environment(), "VLLM_SERVER_DEV_MODE": "1", **environment})


def _answer(parts: Sequence[Any]) -> Answer:
    """One answer from all the parts in which it came."""
    choices = [choice for part in parts for choice in part.choices]
    usage = parts[-1].usage
    details = usage.prompt_tokens_details
    return Answer(
        text="".join(choice.text for choice in choices),
        logprobs=tuple(top for choice in choices if choice.logprobs for top in choice.logprobs.top_logprobs),
        finish_reason=choices[-1].finish_reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
    )
