"""Scenarios about several ranks and pipeline stages that fail, speak and end apart from each other."""

from __future__ import annotations

from collections.abc import Collection

from kvpact.testkit.vllm.engine import VllmEngine
from kvpact.testkit.vllm.harness import Harness, NotObservableError, prompt
from kvpact.testkit.vllm.scenarios import Scenarios

scenario = RANKS = Scenarios()

DELAYS = ([0, 0], [0, 4], [3, 0])
"""Steps by which each of two ranks speaks late."""


def _fail(
    harness: Harness, engine: VllmEngine, rank: int, *, loads: Collection[int] = (), saves: Collection[int] = ()
) -> None:
    """From now on the rank fails to load or save these blocks of any request; none: it is well again."""
    if not harness.subject.adapter.fail_blocks(engine, rank, loads=loads, saves=saves):
        raise NotObservableError("no adapter makes single blocks of this connector fail")
    what = [f"{verb} blocks {sorted(blocks)}" for verb, blocks in (("load", loads), ("save", saves)) if blocks]
    engine.journal(f"rank {rank} cannot {' or '.join(what)}" if what else f"rank {rank} is well again")


def _well(harness: Harness, engine: VllmEngine) -> None:
    for rank in range(engine.settings.workers):
        _fail(harness, engine, rank)


def _require_asynchronous(engine: VllmEngine, request_id: str) -> None:
    if not any(probe.asynchronous for probe in engine.observed.probes_of(request_id)):
        raise NotObservableError("the connector loads inside the step, where a block cannot fail alone")


@scenario("P9", "P10", "H41")
def h41_each_rank_fails_another_block(harness: Harness) -> None:
    """One rank cannot load block 4, the other not block 2: from block 2 on all is computed, whoever speaks first."""
    for delays in DELAYS:
        harness.start_over()
        with harness.engine(ranks=2) as engine:
            tokens = prompt(1, 10)
            harness.store(engine, tokens)
            _fail(harness, engine, 0, loads=[4])
            _fail(harness, engine, 1, loads=[2])
            engine.report_delay = delays
            engine.journal(f"the ranks' reports come {delays} steps late")
            engine.add("victim", tokens, max_tokens=4)
            harness.finish(engine)
            harness.require_promise(engine, "victim")
            _require_asynchronous(engine, "victim")
            _well(harness, engine)
            harness.forget(engine)
            engine.add("again", tokens, max_tokens=4)
            harness.finish(engine)


@scenario("P8", "P10", "H42")
def h42_each_rank_saves_with_a_gap(harness: Harness) -> None:
    """One rank cannot save block 6, the other not block 3: nothing of what only one rank has is loaded later."""
    for delays in DELAYS:
        harness.start_over()
        with harness.engine(ranks=2) as engine:
            tokens = prompt(1, 10)
            _fail(harness, engine, 0, saves=[6])
            _fail(harness, engine, 1, saves=[3])
            engine.report_delay = delays
            engine.journal(f"the ranks' reports come {delays} steps late")
            harness.store(engine, tokens)
            _well(harness, engine)
            engine.add("again", tokens, max_tokens=4)
            harness.finish(engine, "again")
            harness.forget(engine)
            engine.add("once more", tokens, max_tokens=4)
            harness.finish(engine)
            harness.require_promise(engine, "once more")


@scenario("P1", "P9", "P10", "H43")
def h43_one_rank_loads_all_and_the_other_nothing(harness: Harness) -> None:
    """Two requests are loaded by one rank and by the other not at all; one of them is cancelled meanwhile."""
    for delays in DELAYS:
        harness.start_over()
        with harness.engine(ranks=2) as engine:
            prompts = [prompt(seed, 10) for seed in (1, 2)]
            harness.store(engine, *prompts)
            _fail(harness, engine, 1, loads=range(10))
            engine.report_delay = delays
            engine.journal(f"the ranks' reports come {delays} steps late")
            for name, tokens in zip(("victim", "cancelled"), prompts, strict=True):
                engine.add(name, tokens, max_tokens=4)
            engine.step()
            engine.abort("cancelled")
            harness.finish(engine)
            harness.require_promise(engine, "victim")
            _require_asynchronous(engine, "victim")
            _well(harness, engine)
            engine.add("next", prompts[1], max_tokens=4)
            harness.finish(engine)


@scenario("P1", "P10", "H44", "H45")
def h44_ranks_report_after_their_request_has_ended(harness: Harness) -> None:
    """A request ends with its first token; its ranks say in other steps, and later, that they saved its blocks."""
    for delays in DELAYS:
        harness.start_over()
        with harness.engine(ranks=2) as engine:
            engine.report_delay = delays
            engine.journal(f"the ranks' reports come {delays} steps late")
            longer, shortest = prompt(1, 10), prompt(2, 10)
            engine.add("short", shortest, max_tokens=1)
            harness.finish(engine, "short")
            engine.add("longer", longer, max_tokens=3)
            engine.abort("longer", during_step=True)
            harness.finish(engine)
            harness.forget(engine)
            engine.add("short again", shortest)
            engine.add("longer again", longer)
            harness.finish(engine)
            harness.require_promise(engine, "short again")


@scenario("P2", "P10", "H40", "H45")
def stages_hold_other_layers(harness: Harness) -> None:
    """Two pipeline stages, with two layers and with one: a prompt counts as saved when both stages have saved it."""
    for delays in DELAYS:
        harness.start_over()
        with harness.engine(stages=2, layers=3) as engine:
            engine.report_delay = delays
            engine.journal(f"the stages' reports come {delays} steps late")
            prompts = [prompt(seed, 10) for seed in (1, 2)]
            harness.store(engine, *prompts)
            for number, tokens in enumerate(prompts):
                engine.add(f"again{number}", tokens, max_tokens=4)
            harness.finish(engine)
            harness.require_promise(engine)


@scenario("P9", "P10", "H40", "H41")
def one_stage_fails_alone(harness: Harness) -> None:
    """One stage cannot save a block, and later not load another: what only the other one has is worth nothing."""
    with harness.engine(stages=2, layers=3) as engine:
        tokens = prompt(1, 10)
        _fail(harness, engine, 1, saves=[6])
        harness.store(engine, tokens)
        _well(harness, engine)
        _fail(harness, engine, 0, loads=[2])
        engine.add("victim", tokens, max_tokens=4)
        harness.finish(engine, "victim")
        harness.require_promise(engine, "victim")
        _well(harness, engine)
        harness.forget(engine)
        engine.add("again", tokens, max_tokens=4)
        harness.finish(engine)
