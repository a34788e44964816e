"""The messages on the pipe between an `EngineProcess` and the process that holds vLLM, one line of JSON each."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

TokenLogprob: TypeAlias = tuple[int, float]


class Settings(msgspec.Struct, frozen=True):
    """First line to the host: the arguments for `vllm.LLM`."""

    arguments: dict[str, Any]


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Answer these prompts (token ids), greedily: one after the other, or all `together` in one batch."""

    prompts: list[list[int]]
    max_tokens: int = 4
    logprobs: int = 5
    together: bool = False
    cache_salt: str | None = None


class Crowd(msgspec.Struct, frozen=True, tag=True):
    """Answer these prompts, `at_once` (0: all) in the engine at a time; a share `leaving` (0 to 1) of users gives up.

    Such a user leaves after a number of engine steps drawn from `seed`, at most 10 times `at_once`, if there is no
    answer yet; the output then has the finish reason "abort" and no token.
    """

    prompts: list[list[int]]
    max_tokens: int = 4
    logprobs: int = 5
    at_once: int = 0
    leaving: float = 0.0
    seed: int = 0


class Arrivals(msgspec.Struct, frozen=True, tag=True):
    """Have `clients` decode; when each has `lead` tokens, answer `prompts` with one token each, one by one.

    A prompt comes `apart` seconds after the one before it, or when that is answered, if later. The clients leave after
    the last answer. The outputs are those of the prompts, then of the clients.
    """

    clients: list[list[int]]
    prompts: list[list[int]]
    apart: float
    lead: int = 10
    max_tokens: int = 4096


class ReadMetrics(msgspec.Struct, frozen=True, tag=True):
    """vLLM's own counters, as its metrics endpoint shows them."""


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Drop the engine's own prefix cache, and with `connector` the external one as well."""

    connector: bool


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call a method of `vllm.LLM`, such as `collective_rpc` or `sleep`; its result is not returned.

    Where `function` is given, "module:name", that function is the first argument.
    """

    method: str
    arguments: list[Any] = []
    function: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Shut the engine down in order and leave."""


Command: TypeAlias = Generate | Crowd | Arrivals | ReadMetrics | Reset | Call | Stop


class Output(msgspec.Struct, frozen=True):
    """The result of one request: sampled tokens, the most likely tokens with log-probabilities for each, and times."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finish_reason: str | None
    cached_tokens: int
    """Prompt tokens that the engine did not compute, from its own cache or from outside."""
    first_token_seconds: float
    seconds: float = 0.0
    """From the request's arrival to its end; of a `Crowd` or `Arrivals`, else 0."""
    token_seconds: tuple[float, ...] = ()
    """From the request's arrival to each of its tokens; of a `Crowd` or `Arrivals`."""

    def same_answer(self, other: Output) -> bool:
        """Bit-identical tokens and log-probabilities, and an answer at all (a failed request can look like a hit)."""
        answered = self.finish_reason == other.finish_reason and self.finish_reason in ("length", "stop")
        return answered and self.tokens == other.tokens and self.logprobs == other.logprobs


class Reply(msgspec.Struct, frozen=True):
    """A line from the host: when vLLM is loaded, with the `block_size` when the engine is ready, then each answer.

    `error` is set when the command failed; the engine may be dead then.
    """

    outputs: list[Output] = []
    metrics: dict[str, float] = {}
    done: bool = True
    block_size: int = 0
    error: str | None = None
