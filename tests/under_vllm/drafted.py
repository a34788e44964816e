"""Engines of a model with states and drafts, what their steps accepted, and what is asked at each boundary."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from model_drafts import DRAFTS, UNIT

from engines import IN_ONE_PROCESS
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings
from kvpact_testkit.demo.messages import Output

HERE = Path(__file__).parent

TAIL = 5
"""Tokens of a prompt behind the boundary at which it is asked."""

CHUNK = 24
"""Tokens of a step at most, which do not divide a unit; and all that eight requests compute with their drafts."""

ARGUMENTS: Mapping[str, Any] = {
    "block_size": UNIT,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": CHUNK // (1 + DRAFTS),
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 1 << 27,
    "prefix_cache_retention_interval": UNIT,
    "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
    "worker_extension_cls": "wrong_states.WrongStates",
}
WITHOUT_DROP = {**ARGUMENTS["speculative_config"], "disable_eagle_block_drop": True}
"""With this vLLM's own cache, too, matches all full blocks of a prompt where there are drafts; by default it leaves out
the last, and kvpact does not."""

ENVIRONMENT = {**IN_ONE_PROCESS, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


class DraftedEngine(ForkedEngine):
    """A real engine whose model has states and drafts."""

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None = None,
        *,
        held: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(EngineSettings(model, transfer, {**ARGUMENTS, **arguments}, ENVIRONMENT), log, held=held)

    @property
    def accepted_share(self) -> float:
        """The share of all drafts that were right, by vLLM's own counts."""
        counts = self.metrics()
        return counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_draft_tokens"]

    def negate_states(self, layer: int, kind: int) -> None:
        """See `WrongStates.negate_states`."""
        self.call("collective_rpc", "negate_states", None, [layer, kind])


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of which the first `cached` tokens have been computed before, with a state at their end."""

    text: tuple[int, ...]
    """The prompt of the text that this is the beginning of."""
    prompt: tuple[int, ...]
    cached: int


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer, and the steps in which the answer's tokens came."""

    prompt: tuple[int, ...]
    answer: Output

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.prompt, *self.answer.tokens)

    def _steps(self) -> Iterator[tuple[int, int]]:
        """Of each step with drafts: how many tokens had been computed before, and how many of it were right."""
        runs = [len(list(run)) for _, run in groupby(self.answer.token_seconds)]
        computed = len(self.prompt)
        for right in runs[1:]:
            yield computed, right
            computed += right

    @property
    def inside_runs(self) -> set[int]:
        """The boundaries before the end of a step's accepted tokens: whose state is not the one at the step's end."""
        return {one for start, right in self._steps() for one in boundaries(start + 1, start + right)}

    @property
    def rejected(self) -> set[int]:
        """The boundaries that a step passed with rejected drafts alone."""
        return {one for start, right in self._steps() for one in boundaries(start + right + 1, start + DRAFTS + 2)}

    def asks(self, places: Collection[int]) -> list[Ask]:
        """A prompt for each of these boundaries that has so many tokens behind it; the shortest first.

        So no prompt leaves a state behind that a later one is asked at.
        """
        found = [Ask(self.prompt, self.tokens[: place + TAIL], place) for place in sorted(places) if place]
        return [ask for ask in found if len(ask.prompt) == ask.cached + TAIL]


def boundaries(first: int, end: int) -> Iterator[int]:
    """The multiples of a unit from `first` to before `end`."""
    return (one for one in range(first, end) if not one % UNIT)


def grow(engine: DraftedEngine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Text]:
    """The prompts with their answers, computed side by side."""
    answers = engine.crowd(prompts, max_tokens=max_tokens)
    return [Text(tuple(one), answer) for one, answer in zip(prompts, answers, strict=True)]


def ask_all(engine: DraftedEngine, asks: Sequence[Ask]) -> list[Output]:
    """The answers to these prompts, one after the other."""
    return engine.generate([one.prompt for one in asks], max_tokens=3)
