"""A real engine whose model has states and drafts: what its own cache and kvpact's say at the boundaries of states.

vLLM's CPU build lacks two of the kernels that copy states; `kvpact_testkit.vllm.state_copies` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from drafted import Ask, DraftedEngine, Text, ask_all, grow
from model_drafts import UNIT, qwen3_next_with_drafts
from spread import answers_apart

from engines import prompt
from kvpact_testkit.demo.messages import Output

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(900)]

PROMPTS = [prompt(6_400 + seed, 0, 3 * UNIT + 5 * seed) for seed in range(8)]
MAX_TOKENS = 720

ACCEPTED = 0.3
"""The share of drafts that must be right."""

INSIDE = 50
"""Boundaries that must lie inside a step's accepted tokens."""

ROUNDING = 0.05
"""Most that log-probabilities may differ for the shapes in which a prompt was computed, in bfloat16."""

STATES = [(layer, kind) for layer in (0, 1) for kind in (0, 1)]
"""Of each layer with states: its convolution's, and the recurrent one."""


@dataclass(frozen=True)
class Plain:
    """What an engine without a cache says: long answers side by side, and again at the boundaries of their states."""

    texts: list[Text]
    accepted: float
    asks: list[Ask]
    """Where vLLM keeps the state: at each boundary of the first text, inside accepted tokens of the others."""
    local: list[Output]
    again: list[Output]
    cold: list[Output]
    """The answers to every eighth ask."""
    wrong: dict[tuple[int, int], list[Output]]
    """The answers over wrong states, of one layer and kind."""


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_next_with_drafts(tmp_path_factory.mktemp("drafted") / "model", tiny_model)


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    engine = DraftedEngine(model, tmp_path_factory.mktemp("plain") / "log")
    try:
        engine.wait_ready()
        texts = grow(engine, PROMPTS, MAX_TOKENS)
        accepted = engine.accepted_share
        asks = texts[0].asks(range(0, len(texts[0].tokens), UNIT))
        asks += [ask for text in texts[1:] for ask in text.asks(text.inside_runs)]
        local = ask_all(engine, asks)
        kept = [ask for ask, output in zip(asks, local, strict=True) if output.cached_tokens == ask.cached]
        local = [output for ask, output in zip(asks, local, strict=True) if ask in kept]
        again = ask_all(engine, kept)
        wrong: dict[tuple[int, int], list[Output]] = {}
        for layer, kind in STATES:
            few = kept[len(wrong) :: len(STATES)]
            engine.negate_states(layer, kind)
            wrong[layer, kind] = ask_all(engine, few)
            engine.negate_states(layer, kind)
        cold = []
        for ask in kept[::8]:
            engine.reset_prefix_cache()
            cold += ask_all(engine, [ask])
        yield Plain(texts, accepted, kept, local, again, cold, wrong)
    finally:
        engine.discard()


def test_drafts_are_accepted_across_the_boundaries_of_states(plain: Plain) -> None:
    """By vLLM's counts, and by the tokens that each step of its scheduler returned."""
    assert plain.accepted >= ACCEPTED
    assert sum(len(text.inside_runs) for text in plain.texts) >= INSIDE
    assert sum(len(text.rejected) for text in plain.texts) >= INSIDE / 2, "nor was all accepted"
    inside = {(text.prompt, place) for text in plain.texts for place in text.inside_runs}
    assert sum((ask.text, ask.cached) in inside for ask in plain.asks) >= INSIDE, "vLLM keeps so many of their states"


def test_local_hits_at_boundaries_inside_accepted_drafts(plain: Plain) -> None:
    """The same each time, as a cold run but for roundings; each wrong state of one layer shows in each answer."""
    assert [output.cached_tokens for output in plain.local] == [ask.cached for ask in plain.asks]
    assert all(one.same_answer(other) for one, other in zip(plain.again, plain.local, strict=True))
    assert {output.cached_tokens for output in plain.cold} == {0}
    assert max(map(answers_apart, plain.cold, plain.local[::8])) < ROUNDING
    for number, state in enumerate(STATES):
        assert min(map(answers_apart, plain.wrong[state], plain.local[number :: len(STATES)])) > 0, state
