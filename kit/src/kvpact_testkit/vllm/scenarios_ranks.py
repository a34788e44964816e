"""Scenarios about several ranks and pipeline stages that fail, report and end separately."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpact_testkit.results import NotObservable
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import Harness, prompt
from kvpact_testkit.vllm.scenarios import Scenarios

scenario = RANKS = Scenarios()

DELAYS = ([0, 0], [0, 4], [3, 0])
"""Steps by which the reports of each of two ranks are late."""


def _fail(
    harness: Harness, engine: VllmEngine, rank: int, *, loads: Collection[int] = (), saves: Collection[int] = ()
) -> None:
    """Make the rank fail to load or save these blocks of any request; without blocks it works again."""
    if not harness.subject.adapter.fail_blocks(engine, rank, loads=loads, saves=saves):
        raise NotObservable("no adapter makes single blocks of this connector fail")
    what = [f"{verb} blocks {sorted(blocks)}" for verb, blocks in (("load", loads), ("save", saves)) if blocks]
    engine.journal(f"rank {rank} cannot {' or '.join(what)}" if what else f"rank {rank} is well again")


def _well(harness: Harness, engine: VllmEngine) -> None:
    for rank in range(engine.settings.workers):
        _fail(harness, engine, rank)


def _require_asynchronous(harness: Harness, engine: VllmEngine, request_id: str) -> None:
    harness.require_promise(engine, request_id)
    if not any(probe.asynchronous for probe in engine.observed.probes_of(request_id)):
        raise NotObservable("the connector loads inside the step, where a block cannot fail alone")


@scenario.on_engine("P9", "P10", "H41", each=DELAYS, ranks=2)
def h41_each_rank_fails_another_block(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """One rank cannot load block 4, the other not block 2: blocks from 2 on are computed, whichever reports first."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    _fail(harness, engine, 0, loads=[4])
    _fail(harness, engine, 1, loads=[2])
    engine.report_delay = delays
    harness.serve(engine, "victim", tokens, max_tokens=4)
    _require_asynchronous(harness, engine, "victim")
    _well(harness, engine)
    harness.forget(engine)
    harness.serve(engine, "again", tokens, max_tokens=4)


@scenario.on_engine("P8", "P10", "H42", each=DELAYS, ranks=2)
def h42_each_rank_saves_with_a_gap(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """One rank cannot save block 6, the other not block 3: no block that only one rank has is loaded later."""
    _fail(harness, engine, 0, saves=[6])
    _fail(harness, engine, 1, saves=[3])
    engine.report_delay = delays
    (tokens,) = harness.store(engine, prompt(1, 10))
    _well(harness, engine)
    harness.serve(engine, "again", tokens, max_tokens=4)
    harness.forget(engine)
    harness.load(engine, "once more", tokens, max_tokens=4)


@scenario.on_engine("P1", "P9", "P10", "H43", each=DELAYS, ranks=2)
def h43_one_rank_loads_all_and_the_other_nothing(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """One rank loads two requests and the other rank neither; one of the requests is cancelled meanwhile."""
    victims, cancelled = harness.store(engine, prompt(1, 10), prompt(2, 10))
    _fail(harness, engine, 1, loads=range(10))
    engine.report_delay = delays
    engine.add("victim", victims, max_tokens=4)
    engine.add("cancelled", cancelled, max_tokens=4)
    engine.step()
    engine.abort("cancelled")
    harness.finish(engine)
    _require_asynchronous(harness, engine, "victim")
    _well(harness, engine)
    harness.serve(engine, "next", cancelled, max_tokens=4)


@scenario.on_engine("P1", "P10", "H44", "H45", each=DELAYS, ranks=2)
def h44_ranks_report_after_their_request_has_ended(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """A request ends with its first token; its ranks report in different, later steps that they saved its blocks."""
    engine.report_delay = delays
    longer, shortest = prompt(1, 10), prompt(2, 10)
    harness.serve(engine, "short", shortest, max_tokens=1)
    engine.add("longer", longer, max_tokens=3)
    engine.abort("longer", during_step=True)
    harness.finish(engine)
    harness.forget(engine)
    engine.add("longer again", longer)
    harness.load(engine, "short again", shortest)


@scenario.on_engine("P2", "P10", "H40", "H45", each=DELAYS, stages=2, layers=3)
def stages_hold_other_layers(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """Two pipeline stages, with two layers and with one: a prompt counts as saved when both stages have saved it."""
    engine.report_delay = delays
    prompts = harness.store(engine, prompt(1, 10), prompt(2, 10))
    harness.load(engine, "again", *prompts, max_tokens=4)


@scenario.on_engine("P9", "P10", "H40", "H41", stages=2, layers=3)
def one_stage_fails_alone(harness: Harness, engine: VllmEngine) -> None:
    """One stage cannot save a block, the other later not load one: blocks of only one stage are not used."""
    _fail(harness, engine, 1, saves=[6])
    (tokens,) = harness.store(engine, prompt(1, 10))
    _well(harness, engine)
    _fail(harness, engine, 0, loads=[2])
    harness.load(engine, "victim", tokens, max_tokens=4)
    _well(harness, engine)
    harness.forget(engine)
    harness.serve(engine, "again", tokens, max_tokens=4)


@scenario.on_engine("P2", "P8", "P10", "H40", each=DELAYS, ranks=2, latent=True)
def ranks_hold_the_same_bytes(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """Each rank has the same latent vectors, as with MLA; of either one a save may fail, then of either one a load."""
    engine.report_delay = delays
    for rank in (0, 1):
        _fail(harness, engine, rank, saves=[6 - 3 * rank])
    (tokens,) = harness.store(engine, prompt(1, 10))
    _well(harness, engine)
    harness.serve(engine, "again", tokens, max_tokens=4)
    for rank in (1, 0):
        harness.forget(engine)
        _fail(harness, engine, rank, loads=[2 + rank])
        harness.load(engine, f"victim of {rank}", tokens, max_tokens=4)
        _well(harness, engine)
