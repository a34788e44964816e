"""A real engine whose model has states and drafts: what its own cache and kvpact's say at the boundaries of states.

vLLM's CPU build lacks two of the kernels that copy states; `kvpact_testkit.vllm.state_copies` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from drafted import WITHOUT_DROP, Ask, DraftedEngine, Text, ask_all, grow
from model_drafts import UNIT, qwen3_next_with_drafts
from spread import answers_apart

from engines import kvpact_transfer_config, prompt
from kvpact_testkit.demo.messages import Output
from polling import until
from servers.redis_server import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(900)]

PROMPTS = [prompt(6_400 + seed, 0, 3 * UNIT + 5 * seed) for seed in range(8)]
MAX_TOKENS = 720

ACCEPTED = 0.3
"""The share of drafts that must be right."""

INSIDE = 50
"""Boundaries that must lie inside a step's accepted tokens."""

ROUNDING = 0.05
"""Most that log-probabilities may differ for the shapes in which a prompt was computed, in bfloat16."""

SOME = 16
CLIENTS = 4
TURN_TOKENS = 64
"""Of an answer to a second turn."""

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
    """The answers to one ask in `SOME`."""
    wrong: dict[tuple[int, int], list[Output]]
    """The answers over wrong states, of one layer and kind."""
    alone: list[Output]
    crowd: list[Output]
    """The answers to second turns, one after the other over states of this engine, and of four clients at once."""


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_next_with_drafts(tmp_path_factory.mktemp("drafted") / "model", tiny_model)


def second_turns(texts: Sequence[Text]) -> list[list[int]]:
    """The beginnings of texts, well into their answers, with another question behind each."""
    return [[*text.tokens[: 8 * UNIT + 3], *prompt(6_500 + number, 0, 11)] for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    engine = DraftedEngine(model, tmp_path_factory.mktemp("plain") / "log", speculative_config=WITHOUT_DROP)
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
            few = kept[len(wrong) :: 2 * len(STATES)]
            engine.negate_states(layer, kind)
            wrong[layer, kind] = ask_all(engine, few)
            engine.negate_states(layer, kind)
        turns = second_turns(texts)
        alone = engine.generate(turns, max_tokens=TURN_TOKENS)
        engine.reset_prefix_cache()
        crowd = engine.crowd(turns, max_tokens=TURN_TOKENS, at_once=CLIENTS)
        cold = []
        for ask in kept[::SOME]:
            engine.reset_prefix_cache()
            cold += ask_all(engine, [ask])
        yield Plain(texts, accepted, kept, local, again, cold, wrong, alone, crowd)
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
    assert max(map(answers_apart, plain.cold, plain.local[::SOME])) < ROUNDING
    for number, state in enumerate(STATES):
        assert min(map(answers_apart, plain.wrong[state], plain.local[number :: 2 * len(STATES)])) > 0, state


# With kvpact


WRITTEN_S = 60.0
"""Seconds in which what was saved reaches the tiers, on a machine with much else to do."""

TIGHT_BLOCKS = 52
"""Of the engine's KV memory: too few for the answers of four clients side by side."""

AS_RIGHT = 4.0
"""How much further apart right answers may be than those of an engine without a cache in other batches: a sample."""

CROWDS = 5
"""How often the four clients ask. vLLM's CPU build is wrong by itself where a step computes one token of a prompt
beside drafts, as after some preemptions: without a cache, too, log-probabilities are then 0.19 apart, 0.03 otherwise.
A wrong state would be loaded each time."""


@dataclass(frozen=True)
class Served:
    """What engines with kvpact say from memory, from disk after a kill, and from Redis; `loaded` is in tokens."""

    texts: list[Text]
    answers: dict[str, list[Output]]
    loaded: dict[str, float]
    stats: dict[str, dict[str, float]]
    """kvpact's own, of the engines that ended in order."""
    crowds: list[list[Output]]
    """Of four clients at once, from Redis, in an engine without room for them."""
    preemptions: float


def start(model: Path, folder: Path, *tiers: str, prepare_deadline: str = "2s", **arguments: Any) -> DraftedEngine:
    """An engine with kvpact in memory and these tiers."""
    folder.mkdir()
    stats = str(folder / "stats.json")
    options: dict[str, Any] = {"memory": "256MiB", "tiers": list(tiers), "stats_file": stats}
    transfer = kvpact_transfer_config(**options, prepare_deadline=prepare_deadline)
    return DraftedEngine(model, folder / "log", transfer, **arguments)


def ask_kvpact(engine: DraftedEngine, asks: Sequence[Ask], *, shortest_first: bool) -> tuple[list[Output], float]:
    """The answers without the engine's own prefix cache, and how many tokens were loaded for them.

    With the longest first nothing that a later one needs is there; with the shortest first it is but for the end.
    """
    engine.reset_prefix_cache()
    before = engine.metrics()["vllm:external_prefix_cache_hits"]
    step = 1 if shortest_first else -1
    answers = ask_all(engine, asks[::step])[::step]
    return answers, engine.metrics()["vllm:external_prefix_cache_hits"] - before


def wait_until_written(client: Any) -> None:
    """Until the store has got nothing new for a second."""
    counts = [0]

    def rests() -> bool:
        counts.append(int(client.dbsize()))
        return counts[-1] == counts[-2] > 0

    until(rests, WRITTEN_S, every=1.0)


@pytest.fixture(scope="module")
def served(model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    answers, loaded, stats = {}, {}, {}
    with ExitStack() as started:
        server = started.enter_context(redis_server(folder / "redis"))
        disk, redis = f"disk://{folder}/slabs?capacity=256MiB", f"redis://{server.address}/0?timeout=20s"
        # a prompt whose answer from Redis comes first would be computed first: other batches, other last bits
        first = start(model, folder / "first", disk, redis, prepare_deadline="0s")
        started.callback(first.discard)
        first.wait_ready()
        texts = grow(first, PROMPTS, MAX_TOKENS)
        answers["memory"], loaded["memory"] = ask_kvpact(first, plain.asks, shortest_first=False)
        answers["joined"], loaded["joined"] = ask_kvpact(first, plain.asks, shortest_first=True)
        with server.client() as client:
            wait_until_written(client)
        first.kill()
        second = start(model, folder / "second", disk)
        started.callback(second.discard)
        answers["disk"], loaded["disk"] = ask_kvpact(second, plain.asks, shortest_first=False)
        second.stop()
        stats["disk"] = second.stats()
        third = start(model, folder / "third", redis, num_gpu_blocks_override=TIGHT_BLOCKS)
        started.callback(third.discard)
        answers["redis"], loaded["redis"] = ask_kvpact(third, plain.asks, shortest_first=False)
        crowds = []
        for _ in range(CROWDS):
            third.reset_prefix_cache()
            crowds.append(third.crowd(second_turns(texts), max_tokens=TURN_TOKENS, at_once=CLIENTS))
        preemptions = third.metrics()["vllm:num_preemptions"]
        third.stop()
        stats["redis"] = third.stats()
    return Served(texts, answers, loaded, stats, crowds, preemptions)


def test_an_engine_with_kvpact_answers_as_one_without(served: Served, plain: Plain) -> None:
    assert [text.tokens for text in served.texts] == [text.tokens for text in plain.texts]
    assert all(one.answer.same_answer(other.answer) for one, other in zip(served.texts, plain.texts, strict=True))


@pytest.mark.parametrize("source", ["disk", "redis"])
def test_what_was_loaded_was_read_from_there_and_nothing_is_held(source: str, served: Served) -> None:
    """Each ask needs a state of its own."""
    stats = served.stats[source]
    assert stats[f'read_blocks{{tier="{source}"}}'] >= len(served.answers[source])
    assert stats["leases_held"] == stats["hook_errors"] == 0


@pytest.mark.parametrize("source", ["memory", "disk", "redis"])
def test_states_at_boundaries_inside_accepted_drafts_come_back(source: str, served: Served, plain: Plain) -> None:
    """Bit for bit what a local hit at the same boundary says: all of them, and all loaded.

    vLLM's own cache hits as deep with an experimental option only.
    """
    answers = served.answers[source]
    assert [output.cached_tokens for output in answers] == [ask.cached for ask in plain.asks]
    assert served.loaded[source] == sum(ask.cached for ask in plain.asks)
    assert all(one.same_answer(other) for one, other in zip(answers, plain.local, strict=True))


def test_a_local_hit_with_the_rest_from_kvpact(served: Served, plain: Plain) -> None:
    """The state at the end is kvpact's, whatever the engine has of the prefix and of its states."""
    answers = served.answers["joined"]
    assert [output.cached_tokens for output in answers] == [ask.cached for ask in plain.asks]
    assert 0 < served.loaded["joined"] < served.loaded["memory"] / 2
    assert all(one.same_answer(other) for one, other in zip(answers, plain.local, strict=True))


def test_four_clients_at_once_with_preemptions_are_as_right_as_without_a_cache(served: Served, plain: Plain) -> None:
    spread = max(map(answers_apart, plain.alone, plain.crowd))
    assert served.preemptions > 0
    assert all(output.cached_tokens for crowd in served.crowds for output in crowd)
    apart = [max(map(answers_apart, plain.alone, crowd)) for crowd in served.crowds]
    assert sum(one <= AS_RIGHT * spread for one in apart) > CROWDS / 2, apart
