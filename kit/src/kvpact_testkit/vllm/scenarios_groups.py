"""Models with several KV cache groups: each group's layers read what a load brought, as deep as their kind reads."""

from __future__ import annotations

import random
from typing import Any

from kvpact.identity.groups import GroupKind
from kvpact_testkit.results import NotObservable, require
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt
from kvpact_testkit.vllm.model_groups import CHUNKED, GEMMA, STATES, LayerGroup
from kvpact_testkit.vllm.random_ops import act
from kvpact_testkit.vllm.scenarios import Scenarios

scenario = GROUPS = Scenarios()

ATTENTION = (GEMMA, CHUNKED)
MODELS = (*ATTENTION, STATES)
ACTIONS = 150


def _promised(engine: VllmEngine, request_id: str) -> int:
    return max((probe.answer or 0 for probe in engine.observed.probes if probe.request_id == request_id), default=0)


@scenario("P2", "P9")
def groups_are_served_together(harness: Harness) -> None:
    """What is loaded serves the layers of every group: for a prompt again, a longer one, one that leaves it."""
    for groups in MODELS:
        harness.journal.clear()
        # States are at the end of blocks only where a step ends.
        with harness.engine(groups=groups, token_budget=BLOCK, max_num_seqs=4) as engine:
            (stored,) = harness.store(engine, prompt(1, 8))
            harness.load(engine, "same", stored)
            require(_promised(engine, "same") == 8 * BLOCK, "not all that was stored is promised", "P9")
            harness.forget(engine)
            harness.load(engine, "longer", [*stored[: 8 * BLOCK], *prompt(2, 3)], max_tokens=2 * BLOCK)
            harness.forget(engine)  # a cache may have forgotten what only shorter prompts need
            harness.serve(engine, "shorter", stored[: 5 * BLOCK + 3], max_tokens=2 * BLOCK)


@scenario("P2", "P8", "P9")
def a_local_hit_and_a_load_together(harness: Harness) -> None:
    """The engine has the first blocks of every group, and the rest is loaded: a window reaches into both."""
    for groups in MODELS:
        harness.journal.clear()
        with harness.engine(groups=groups, token_budget=BLOCK, max_num_seqs=4) as engine:
            (stored,) = harness.store(engine, prompt(1, 8))
            harness.serve(engine, "head", stored[: 5 * BLOCK + 1])
            harness.load(engine, "all", stored)
            harness.require_sound(engine)


@scenario("P1", "P2", "P9")
def groups_under_pressure(harness: Harness) -> None:
    """Running requests are preempted and come back; blocks that left a window are used by others."""
    for groups in ATTENTION:
        harness.journal.clear()
        with harness.engine(groups=groups, num_blocks=61, chunk=2 * BLOCK) as engine:
            stored = [harness.store(engine, prompt(seed, 6))[0] for seed in (1, 2, 3)]
            for number, tokens in enumerate(stored):
                engine.add(f"again{number}", [*tokens, *prompt(7 + number, 2)], max_tokens=5 * BLOCK)
            harness.finish_promised(engine)


@scenario("P2", "P7", "P9")
def a_load_of_groups_fails(harness: Harness) -> None:
    """The last blocks cannot be copied: the request begins again in other blocks, and reads none of these."""
    for groups in ATTENTION:
        harness.journal.clear()
        with harness.engine(groups=groups) as engine:
            (stored,) = harness.store(engine, prompt(1, 6))
            if not harness.subject.adapter.fail_loads(engine, 2):
                raise NotObservable("the connector's copies cannot be made to fail")
            engine.add("fails", stored)
            harness.finish_promised(engine, "fails")


@scenario("P1", "P2", "P8", "P9")
def groups_and_everything_at_once(harness: Harness) -> None:
    """Arrivals, cancellations, resets, pauses, delays at random, on one and two ranks."""
    for number, groups in enumerate((GEMMA, CHUNKED, (LayerGroup(GroupKind.WINDOW, 2, 40),))):
        harness.journal.clear()
        dice, ranks = random.Random(number), 1 + number % 2
        settings: dict[str, Any] = {
            "num_blocks": 101,
            "chunk": 5 * BLOCK,
            "max_num_seqs": 4,
            "overlap": bool(number % 2),
        }
        with harness.engine(groups=groups, ranks=ranks, **settings) as engine:
            for _ in range(ACTIONS):
                act(engine, dice.randrange(1, 2**32))
            engine.pause(False)
            harness.finish(engine)
