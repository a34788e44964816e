"""Sizes of a comparison: how long it takes on this machine, and the largest that fits into a time.

Arithmetic alone; the speeds were measured by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvpact_testkit.compare.load import QUESTION_TOKENS, Load, documents
from kvpact_testkit.compare.visit import Step

QUICK_SECONDS = 600.0
"""Time of `--quick`, from the command to its table."""

SPARE = 0.75
"""Share of the time that a plan may take: other work, and prompts that wait for each other, take the rest."""

END_SECONDS = 4.0
"""A server's end, with what its store still writes."""

KEEPS = ("fs", "disk", "tier", "lmcache")
"""Subjects whose cache outlives their server."""

DAMAGED = ("fs", "disk", "lmcache")
"""Subjects with a store on this disk."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a server's start, prompt tokens computed in a second, seconds of one more token of an answer."""

    start_s: float
    tokens_per_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """The load of documents that come back."""

    prompts: int = 16
    tokens: int = 2048
    turns: int = 3
    clients: int = 4
    answer_tokens: int = 8
    damages: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.tokens + self.turns * (QUESTION_TOKENS + self.answer_tokens)

    def load(self) -> Load:
        """The requests."""
        made = documents(self.prompts, self.tokens, self.turns, self.clients, self.answer_tokens)
        return replace(made, damages=self.damages)

    def __str__(self) -> str:
        damaged = "" if self.damages else ", no damaged stores"
        return (
            f"{self.prompts} prompts of {self.tokens:,} tokens, {self.turns} turns, {self.clients} clients, answers of "
            f"{self.answer_tokens} tokens{damaged}"
        )


def steps(keys: Sequence[str], rounds: int, alone: int, asked: int, answers: int, requests: int, speed: Speed, *,
          damages: bool) -> list[tuple[str, Step, float]]:  # fmt: skip
    """Each step of each subject with its seconds, at most, in order.

    `alone` and `asked` are tokens of the prompts asked alone and of the load's; `answers` and `requests` tokens of
    their answers. An external cache is taken to spare two thirds of the load.
    """
    loads = asked / speed.tokens_per_s + requests * speed.token_s
    computed = alone / speed.tokens_per_s + answers * speed.token_s
    spared = computed / 4
    found: list[tuple[str, Step, float]] = []
    for key in [key for _ in range(rounds) for key in keys]:
        cached = key not in ("none", "prefix", "offloading")
        found += [(key, Step.START, speed.start_s), (key, Step.NEW, computed)]
        found.append((key, Step.LOAD, loads / 3 if cached else loads))
        if key == "none":
            found.append((key, Step.LOAD_AGAIN, loads))
        found.append((key, Step.AGAIN, (2 * spared if cached else computed) + END_SECONDS))
        if key in KEEPS:
            found += [(key, Step.START_AGAIN, speed.start_s), (key, Step.RESTARTED, spared + END_SECONDS)]
        if key in DAMAGED and damages:
            found += [(key, Step.START_DAMAGED, speed.start_s), (key, Step.DAMAGED, computed + END_SECONDS)]
    return found


def steps_of(load: Load, keys: Sequence[str], rounds: int, speed: Speed) -> list[tuple[str, Step, float]]:
    """The steps of this load."""
    return steps(
        keys,
        rounds,
        sum(map(len, load.alone)),
        sum(len(one.prompt) for one in load.requests),
        len(load.alone) * load.answer_tokens,
        sum(one.max_tokens for one in load.requests),
        speed,
        damages=load.damages,
    )


def seconds_of(sizes: Sizes, keys: Sequence[str], speed: Speed) -> float:
    """Seconds of one round of these subjects, at most."""
    asked = sizes.prompts * sizes.turns * sizes.longest
    answers = sizes.prompts * sizes.answer_tokens
    tokens = sizes.prompts * sizes.tokens
    found = steps(keys, 1, tokens, asked, answers, answers * sizes.turns, speed, damages=sizes.damages)
    return sum(seconds for _, _, seconds in found)


def fit(seconds: float, keys: Sequence[str], speed: Speed, most_tokens: int) -> Sizes:
    """The load with most tokens, of the longest prompts, that fits into the time; the smallest where none does.

    Prompts and turns fit into `most_tokens`. Damaged stores are left out only where nothing fits with them.
    """
    choices = [
        sizes
        for prompts, tokens in product((24, 16, 12, 8, 6, 4), (3072, 2048, 1536, 1024, 768, 512, 256))
        if (sizes := Sizes(prompts, tokens, turns=2)).longest <= most_tokens
    ] or [Sizes(4, max(32, most_tokens // 2), turns=1)]
    choices.sort(key=lambda sizes: (sizes.prompts * sizes.tokens, sizes.tokens), reverse=True)
    for damages in (True, False):
        for sizes in choices:
            chosen = replace(sizes, damages=damages)
            if seconds_of(chosen, keys, speed) <= SPARE * seconds:
                return chosen
    return replace(choices[-1], damages=False)
