"""Models with states, and drafts of which all, some or none are accepted: every read finds the right state.

The scenarios run by name only, such as "states[mtp-3-overlapping-runner 2]"; `STATES_WITH_DRAFTS` has them all, and
`LONG_WALKS` the pieces of a long run, such as "walks[overlapping-0]".
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from kvpact.identity.groups import GroupKind
from kvpact_testkit.results import observable_if, require
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt
from kvpact_testkit.vllm.model_groups import STATES, LayerGroup
from kvpact_testkit.vllm.random_ops import act
from kvpact_testkit.vllm.real_models import DRAFTING, SCALE, RealModel
from kvpact_testkit.vllm.scenarios import Scenario

THREE_KINDS = (LayerGroup(), LayerGroup(GroupKind.WINDOW, 2, 40), LayerGroup(GroupKind.STATE, 2))
ACTIONS = 150
WAYS = ("one by one", "overlapping")
"""Steps one after the other, or each planned before the last one's output is known."""
PIECES = 20
"""Pieces of a long run of each of `WAYS`."""
PIECE_STEPS = 2500
"""Steps of a piece, at least."""
LONG_ACTIONS = 400
"""Actions of each of its walks."""
LONG_TIMEOUT = 600.0
"""Seconds for them, on a machine that does other things too."""
PROTECTS = ("P1", "P2", "P8", "P9", "P11")


def engines() -> dict[str, dict[str, Any]]:
    """The engines by name: who drafts, how much, whether steps overlap, whose order of calls."""
    found = {}
    for method, drafts, overlap, runner in product(("mtp", "ngram"), (1, 3), (False, True), (1, 2)):
        name = f"{method}-{drafts}-{WAYS[overlap]}-runner {runner}"
        found[name] = {
            "draft_method": method,
            "draft_tokens": drafts,
            "accepted_drafts": 60,
            "overlap": overlap,
            "runner": runner,
            "groups": THREE_KINDS if drafts == 1 else STATES,
            "num_blocks": 201,
            "chunk": 5 * BLOCK,
            "max_num_seqs": 4,
        }
    return found


def walk(settings: dict[str, Any], actions: int, seed: int, harness: Harness) -> int:
    """Arrivals, next turns, cancellations, resets, pauses, delays, preemptions at random, with drafts that are right at
    times; returns the number of steps."""
    with harness.engine(**settings) as engine:
        dice = random.Random(seed)
        for _ in range(actions):
            choice = dice.random()
            if choice < 0.15:
                next_turn(engine, dice)
            elif choice < 0.2:
                engine.evict_computed(dice.choice((None, None, 0, 1)))
            else:
                act(engine, dice.randrange(1, 2**32))
        engine.pause(False)
        harness.finish(engine)
        harness.rest(engine)
        observed = engine.observed
        harness.notes.append(
            f"{observed.steps} steps, {observed.accepted} of {observed.drafted} drafts accepted, "
            f"{observed.offers} states offered, {observed.preemptions} preemptions, "
            f"{sum(bool(probe.answer) for probe in observed.probes)} promises"
        )
        require(0 < observed.accepted < observed.drafted, f"{harness.notes[-1]}: not some of them", "P9")
        require(observed.offers > 0, "vLLM offers no state", "P9")
    return observed.steps


def next_turn(engine: VllmEngine, dice: random.Random) -> None:
    """A user goes on after an answer: only there is a state asked for that a step with drafts left."""
    ended = [name for name in engine.requests if engine.ended(name)]
    if ended:
        said = engine.said(dice.choice(ended))
        tail = prompt(dice.randrange(5, 2**20), 0, dice.randrange(1, 2 * BLOCK))
        engine.add(f"r{len(engine.requests)}", [*said, *tail], max_tokens=dice.randrange(1, 5 * BLOCK))


def turns(settings: dict[str, Any], harness: Harness) -> None:
    """Conversations whose next turn goes on from states that steps with drafts left, which only a load brings back."""
    with harness.engine(**settings) as engine:
        promised = 0
        for seed in range(1, 9):
            harness.serve(engine, f"first {seed}", prompt(seed, 2, tail=3 * seed), max_tokens=4 * BLOCK)
            said = engine.said(f"first {seed}")
            for cut in (0, 1, 2):
                harness.forget(engine)
                name = f"turn {cut} of {seed}"
                harness.serve(engine, name, [*said[: len(said) - cut * BLOCK], *prompt(90 + seed, 0, tail=9)])
                promised += any(probe.answer for probe in engine.observed.probes_of(name))
        harness.notes.append(f"{promised} promises")
        observable_if(promised, "the connector promises nothing of what was computed")


def long_walk(way: str, piece: int, harness: Harness) -> None:
    """Walks of other seeds through all engines of one way, until so many steps are done."""
    harness.subject = replace(harness.subject, timeout=LONG_TIMEOUT)
    chosen = {name: settings for name, settings in engines().items() if f"-{way}-" in name}
    seed, steps = 1000 * (piece + 1), 0
    while steps < PIECE_STEPS:
        name = [*chosen][seed % len(chosen)]
        harness.journal.clear()
        harness.journal.note(f"a walk of seed {seed} on {name}")
        steps += walk(chosen[name], LONG_ACTIONS, seed, harness)
        seed += 1


def _scenarios(name: str, settings: dict[str, Any]) -> list[Scenario]:
    words = [" ".join((one.__doc__ or "").split()) for one in (walk, turns)]
    return [
        Scenario(f"states[{name}]", PROTECTS, words[0], partial(walk, settings, ACTIONS, 1)),
        Scenario(f"turns[{name}]", PROTECTS, words[1], partial(turns, settings)),
    ]


def turns_of_model(model: RealModel, harness: Harness) -> None:
    """A real model's next turn goes on from a boundary inside an answer that was made with drafts, if it is offered."""
    unit, served = model.block_size, 0
    sizes: dict[str, Any] = {"model": model, "block_size": unit, "num_blocks": 40 * (len(model.layers) // 4 + 1)}
    drafts: dict[str, Any] = {"draft_tokens": model.drafts, "accepted_drafts": 60, "draft_method": "mtp"}
    with harness.engine(**sizes, **drafts, max_num_seqs=4) as engine:
        for seed in range(1, 5):
            before = engine.observed.offers
            tokens = [position * 7 % 29_989 + seed for position in range(2 * unit - 20 - seed)]
            harness.serve(engine, f"first {seed}", tokens, max_tokens=40)
            offered, name = engine.observed.offers > before, f"turn {seed}"
            harness.forget(engine)
            harness.serve(engine, name, [*engine.said(f"first {seed}"), *prompt(7, 1)], max_tokens=8)
            longest = max((probe.answer or 0 for probe in engine.observed.probes_of(name)), default=0)
            wanted = 2 * unit if offered else 0
            require(longest == wanted, f"{name} is promised {longest} tokens, and {wanted} were offered", "P9")
            served += offered
        harness.notes.append(f"{served} promises of 4, {engine.observed.accepted} drafts accepted")
        observable_if(served and engine.observed.accepted, "vLLM offers no state inside of an answer")


def kept_by_default(harness: Harness) -> None:
    """By default vLLM keeps, and offers, a prompt's last state and those where prompts part: the next turn hits what is
    kept, and nothing else."""
    for retention, kept in ((0, 6), (BLOCK, 10)):
        harness.journal.clear()
        with harness.engine(groups=STATES, retention=retention, max_num_seqs=4) as engine:
            harness.serve(engine, "first", prompt(1, 6), max_tokens=4 * BLOCK)
            offers = engine.observed.offers
            require(offers == kept - 5, f"{offers} states are offered at an interval of {retention}", "P9")
            harness.forget(engine)
            harness.serve(engine, "turn", [*engine.said("first"), *prompt(7, 1)])
            longest = max(probe.answer or 0 for probe in engine.observed.probes_of("turn"))
            require(
                longest == kept * BLOCK, f"the next turn is promised {longest} tokens, {kept} blocks are kept", "P9"
            )
            parts = [[*prompt(2, 3, tail=0), *prompt(seed, 3)] for seed in range(3, 7)]
            for number, tokens in enumerate(parts):
                harness.forget(engine)
                harness.serve(engine, f"part {number}", tokens)
            answers = [probe.answer or 0 for probe in engine.observed.probes_of("part 3")]
            require(max(answers) == 3 * BLOCK, f"where prompts part {max(answers)} tokens are promised", "P9")


def partial_tails(harness: Harness) -> None:
    """vLLM's own hits end inside blocks, which it copies: no part of a block is promised or saved."""
    with harness.engine(groups=STATES, match_unit=BLOCK // 4, retention=BLOCK, max_num_seqs=4) as engine:
        for number in range(1, 6):
            first = prompt(number, 3, tail=2 * number)
            harness.serve(engine, f"first {number}", first, max_tokens=number)
            for again in range(2):
                tail = prompt(90 + again, 2)
                harness.serve(engine, f"again {again} of {number}", [*first, *tail], max_tokens=BLOCK)
                engine.evict_computed(again)
            harness.require_sound(engine)
            harness.forget(engine)
            harness.load(engine, f"later {number}", [*first, *prompt(95, 2)])
        answers = [probe.answer or 0 for probe in engine.observed.probes]
        require(not any(answer % BLOCK for answer in answers), "a part of a block is promised", "P2")
        harness.notes.append(f"{engine.observed.copies} blocks copied for hits inside them")
        observable_if(engine.observed.copies, "vLLM has no hit inside a block")


def _of_model(model: RealModel) -> Scenario:
    meaning = " ".join((turns_of_model.__doc__ or "").split())
    return Scenario(f"turns[{model.name}]", PROTECTS, meaning, partial(turns_of_model, model))


STATES_WITH_DRAFTS = [one for name, settings in engines().items() for one in _scenarios(name, settings)]
LONG_WALKS = [
    Scenario(
        f"walks[{way}-{piece}]", PROTECTS, " ".join((long_walk.__doc__ or "").split()), partial(long_walk, way, piece)
    )
    for way, piece in product(WAYS, range(PIECES))
]
KEPT_STATES = [
    Scenario(name, PROTECTS, " ".join((run.__doc__ or "").split()), run)
    for name, run in (("states kept by default", kept_by_default), ("partial tails", partial_tails))
]
MODELS_WITH_DRAFTS = [_of_model(model.scaled(SCALE)) for model in DRAFTING.values()]
