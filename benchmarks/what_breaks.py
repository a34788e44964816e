"""What breaks in whom: models with states beside full attention, without and with drafts, over kvpact and its peers.

vLLM's own scheduler, a simulated worker, an oracle of every slot, no device. A row is a scenario on a model; a cell is
what one connector made of it: figures where every rule was kept, else "P2 ...", the properties broken
(docs/internals/hazards.md) and what was seen first, or why it could not run. Scenarios: "states", offered boundaries
that a later prompt gets; "again", "turn", "parts", tokens that prompts found, of all tokens asked, for a prompt that
comes again, a user's next turn, and prompts that part halfway, beside vLLM's own prefix cache; "joined", a deeper tail
behind a local prefix whose state the engine has lost; "walk", arrivals, aborts, resets, delays and preemptions at
random, in both runners; "reset", new weights after a reset of the connector; "left", blocks held after aborts and
preemptions. Mooncake and LMCache run by name; LMCache needs an interpreter that has
lmcache==0.5.6 beside vLLM.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.needs import find_testbeds, require_known, require_vllm

if TYPE_CHECKING:
    from kvpact_testkit.vllm.engine import VllmEngine
    from kvpact_testkit.vllm.harness import Harness

find_testbeds()

OWN = "vLLM alone"
"""Its own prefix cache, never emptied, with PactConnector saving nothing."""
NAMES = (OWN, "kvpact", "PactTier", "offloading", "simple")
ALONE = ("mooncake", "lmcache")
"""Their clients block one another in one process."""
MODELS = ("states", "states and windows", "windows")
DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "mtp": {"draft_tokens": 2, "accepted_drafts": 60, "draft_method": "mtp"},
    "ngram": {"draft_tokens": 2, "accepted_drafts": 60, "draft_method": "ngram"},
}
PROTECTS = ("P1", "P2", "P8", "P9", "P11")
SEEDS = range(1, 7)
PROMPT = 6 * 16 + 3
"""Tokens of the shortest prompt; none of the others ends behind another boundary."""
SECONDS = 120.0
"""After which a request that still waits counts as hanging."""


def settings_of(model: str, drafts: str) -> dict[str, Any]:
    """The engine's: steps of 48 tokens, each of which leaves one state, at its end."""
    from kvpact_testkit.vllm.harness import BLOCK
    from kvpact_testkit.vllm.model_groups import GEMMA, STATES
    from kvpact_testkit.vllm.scenarios_states import THREE_KINDS

    groups = dict(zip(MODELS, (STATES, THREE_KINDS, GEMMA), strict=True))[model]
    return {"groups": groups, "num_blocks": 201, "token_budget": 3 * BLOCK, "max_num_seqs": 4, **DRAFTS[drafts]}


def promised(engine: VllmEngine, name: str) -> int:
    """Tokens of a prompt that were not computed: the engine's own, and what the connector promised behind them."""
    return max(probe.computed + (probe.answer or 0) for probe in engine.observed.probes_of(name))


def stored(harness: Harness, engine: VllmEngine) -> set[tuple[str, int]]:
    """Compute prompts of six blocks and answers of three; the boundaries at which vLLM offered a state."""
    from kvpact_testkit.vllm.harness import BLOCK, prompt

    offered = set()
    for seed in SEEDS:
        engine.add(f"r{seed}", prompt(seed, 6, tail=3 + seed), max_tokens=3 * BLOCK)
        while engine.scheduler.has_requests():
            engine.step()
            offered |= {(request, tokens) for request, _, _, tokens in engine.observed.offered}
    return offered


def states(settings: dict[str, Any], forget: bool, harness: Harness) -> None:
    """Each offered boundary is asked for: what was computed up to there, its next token, and then other tokens."""
    from kvpact_testkit.results import observable_if
    from kvpact_testkit.vllm.harness import prompt

    with harness.engine(**settings) as engine:
        offered = sorted(stored(harness, engine), key=lambda one: one[1])
        observable_if(offered, "no layer has states")
        found = {True: 0, False: 0}
        for request, tokens in offered:
            if forget:
                harness.forget(engine)
            name = f"{request} at {tokens}"
            harness.serve(engine, name, [*engine.said(request)[: tokens + 1], *prompt(90 + tokens, 0, 11)])
            found[tokens <= PROMPT] += promised(engine, name) >= tokens
        prompts = sum(tokens <= PROMPT for _, tokens in offered)
        harness.notes.append(f"prompts {found[True]} of {prompts}, answers {found[False]} of {len(offered) - prompts}")


def hits(kind: str, settings: dict[str, Any], forget: bool, harness: Harness) -> None:
    """Prompts that share tokens with those before: how many of these are found."""
    from kvpact_testkit.vllm.harness import prompt

    with harness.engine(**settings) as engine:
        stored(harness, engine)
        found = asked = 0
        for seed in SEEDS:
            before = engine.said(f"r{seed}")
            own = prompt(seed, 6, tail=3 + seed)
            asks = {
                "again": [own],
                "turn": [[*before, *prompt(50 + seed, 1)]],
                "parts": [[*own[:75], *prompt(60 + 10 * turn + seed, 1)] for turn in range(3)],
            }[kind]
            for number, tokens in enumerate(asks):
                if forget:
                    harness.forget(engine)
                harness.serve(engine, f"{kind} {number} of {seed}", tokens)
                found += promised(engine, f"{kind} {number} of {seed}")
                asked += len(tokens)
        harness.notes.append(f"{found:,} of {asked:,}")


def joined(settings: dict[str, Any], forget: bool, harness: Harness) -> None:
    """The engine has a prompt's first blocks, in all groups, or without those of one; the connector has more."""
    from kvpact_testkit.vllm.harness import BLOCK, prompt

    behind = []
    for lost in (None, *range(len(settings["groups"]))):
        with harness.engine(**settings) as engine:
            (tokens,) = harness.store(engine, prompt(1 if lost is None else 2 + lost, 8))
            harness.serve(engine, "head", tokens[: 5 * BLOCK + 1])
            harness.rest(engine)
            if lost is not None:
                engine.evict_computed(lost)
            harness.serve(engine, "all", tokens, max_tokens=2 * BLOCK)
            last = engine.observed.probes_of("all")[-1]
            behind.append(f"{last.computed}+{last.answer}")
            harness.require_sound(engine)
    harness.notes.append(", ".join(behind))


def walk(settings: dict[str, Any], forget: bool, harness: Harness) -> None:
    """150 actions at random, with the first runner and steps one by one, and with the second and overlapping steps."""
    from kvpact_testkit.vllm.harness import BLOCK
    from kvpact_testkit.vllm.random_ops import act
    from kvpact_testkit.vllm.scenarios_states import next_turn

    for seed, (overlap, runner) in enumerate(((False, 1), (True, 2))):
        more: dict[str, Any] = {"token_budget": 2048, "chunk": 5 * BLOCK, "overlap": overlap, "runner": runner}
        with harness.engine(**{**settings, **more}) as engine:
            dice = random.Random(seed)
            for _ in range(150):
                if dice.random() < 0.15:
                    next_turn(engine, dice)
                else:
                    act(engine, dice.randrange(1, 2**32))
            engine.pause(False)
            harness.finish(engine)
            harness.rest(engine)
            wrong = len(engine.observed.wrong_slots)
            gave = sum(bool(probe.answer) for probe in engine.observed.probes)
            harness.notes.append(f"{gave} promises{f', {wrong} wrong reads' * bool(wrong)}")


def reset(settings: dict[str, Any], forget: bool, harness: Harness) -> None:
    """Other weights, and vLLM's reset of its cache and of the connector's: nothing older may be found."""
    from kvpact_testkit.vllm.harness import prompt

    with harness.engine(**settings) as engine:
        prompts = [prompt(seed, 6) for seed in SEEDS]
        harness.store(engine, *prompts)
        engine.new_weights()
        done = engine.reset(running=False, connector=True)
        names = harness.serve(engine, "new", *prompts)
        found = sum(promised(engine, name) for name in names)
        harness.notes.append(f"the reset {'succeeds' if done else 'fails'}, {found} tokens found")


def left(settings: dict[str, Any], forget: bool, harness: Harness) -> None:
    """Requests that load or wait are aborted, others preempted; reports come three steps late."""
    from kvpact_testkit.vllm.harness import BLOCK, prompt

    with harness.engine(**{**settings, "num_blocks": 41}) as engine:
        harness.store(engine, *(prompt(seed, 6) for seed in SEEDS))
        engine.report_delay = [3]
        aborted = 0
        for number in range(24):
            tokens = [*prompt(1 + number % 6, 6), *prompt(40 + number, 1)]
            engine.add(f"r{number}", tokens, max_tokens=3 * BLOCK)
            engine.step(number % 4)
            if number % 3 == 0:
                engine.abort(f"r{number}", during_step=number % 2 == 0)
                aborted += 1
        harness.finish(engine)
        harness.rest(engine)
        harness.notes.append(
            f"{aborted} aborts, {engine.observed.preemptions} preemptions, {engine.held_blocks} blocks held"
        )


@dataclass(frozen=True, slots=True)
class Play:
    """A scenario, and whether vLLM's own cache without a connector is beside it."""

    run: Callable[[dict[str, Any], bool, Harness], None]
    beside_vllm: bool = False


PLAYS = {
    "states": Play(states, beside_vllm=True),
    **{kind: Play(partial(hits, kind), beside_vllm=True) for kind in ("again", "turn", "parts")},
    "joined": Play(joined),
    "walk": Play(walk),
    "reset": Play(reset),
    "left": Play(left),
}


def cell(name: str, play: Play, settings: dict[str, Any]) -> str:
    """What one connector makes of a scenario."""
    from hybrid_peers import configured
    from kvpact_testkit.vllm.driver import VllmDriver
    from kvpact_testkit.vllm.scenarios import Scenario

    subject = "kvpact" if name == OWN else name
    with tempfile.TemporaryDirectory() as folder, configured(subject, Path(folder)) as (connector, config):
        named = {**config, "save": "off"} if name == OWN else config
        scenario = Scenario("play", PROTECTS, "", partial(play.run, settings, name != OWN))
        check = VllmDriver(connector, named, timeout=SECONDS).check(scenario)
    figures = "; ".join(part for part in check.note.split("; ") if part)
    if not check.violations:
        return figures
    broken = ", ".join(one.broken for one in check.violations)
    seen = check.violations[0].what.partition("\n")[0].replace("model.layers.", "layer ").replace(".self_attn.attn", "")
    return f"{broken}: {seen}{f' ({figures})' * bool(figures)}"[:300]


def rows(
    scenarios: tuple[str, ...] = tuple(PLAYS),
    models: tuple[str, ...] = MODELS,
    drafts: tuple[str, ...] = tuple(DRAFTS),
    connectors: tuple[str, ...] = NAMES,
) -> Iterator[dict[str, Any]]:
    """One row of each scenario, model and kind of drafts."""
    require_vllm()
    from hybrid_peers import CONNECTORS, end_servers
    from kvpact.vllm import plugin

    for option, words, known in (
        ("--scenarios", scenarios, PLAYS),
        ("--models", models, MODELS),
        ("--drafts", drafts, DRAFTS),
        ("--connectors", connectors, (OWN, *CONNECTORS)),
    ):
        require_known(option, words, known)
    if len({name.partition(",")[0] for name in connectors} & {*ALONE}) > 1:
        raise SystemExit(f"--connectors: {' and '.join(ALONE)} need a run each")
    logging.disable(logging.CRITICAL)
    plugin.register()
    try:
        for model in models:
            for drafted in drafts:
                for scenario in scenarios:
                    play = PLAYS[scenario]
                    row = {"scenario": scenario, "model": model, "drafts": drafted}
                    for name in connectors:
                        if name != OWN or play.beside_vllm:
                            row[name] = cell(name, play, settings_of(model, drafted))
                        print(row, file=sys.stderr, flush=True)
                    yield row
    finally:
        end_servers()
