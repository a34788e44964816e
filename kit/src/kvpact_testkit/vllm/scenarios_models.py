"""Real models' KV cache groups on vLLM's real scheduler: what was computed once is served as vLLM's own hit would be.

The scenarios run by name only, such as "restart[jamba]"; `MODEL_SCENARIOS` has them all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvpact_testkit.results import NotObservable, require
from kvpact_testkit.vllm.compat import REAL_MODEL_LEN
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import Harness
from kvpact_testkit.vllm.model_groups import group_of_layers
from kvpact_testkit.vllm.real_models import MODELS, SCALE, RealModel, planned
from kvpact_testkit.vllm.scenarios import Scenario

Situation = Callable[[Harness, RealModel], None]

PLAYED = {name: model.scaled(SCALE) for name, model in MODELS.items()}
"""The models as they are played."""

BUDGET = 2048
"""Tokens of a step."""


def prompt(model: RealModel, seed: int, blocks: int = 0) -> list[int]:
    """Whole blocks and a bit, by default so many that a window or chunk has left the prompt's begin."""
    whole = (blocks or blocks_of(model)) * model.block_size
    return [(seed * 1009 + position * 7) % 29_989 + seed for position in range(whole + 7)]


def blocks_of(model: RealModel) -> int:
    """Return how many blocks a prompt has."""
    return 4 + -(-model.span * 9 // 8 // model.block_size)


def settings(model: RealModel, prompts: float) -> dict[str, Any]:
    """Return settings of an engine with room for so many prompts while they are computed, in each group."""
    groups = 1 + (len(model.layers) // max(1, min(map(model.layers.count, set(model.layers)))))
    blocks = int(groups * prompts * (blocks_of(model) + 4)) + 2
    return {"model": model, "block_size": model.block_size, "num_blocks": blocks, "token_budget": BUDGET}


def promised(engine: VllmEngine, request_id: str) -> int:
    """Tokens of the longest promise."""
    return max((probe.answer or 0 for probe in engine.observed.probes_of(request_id)), default=0)


def require_hit(engine: VllmEngine, request_id: str, wanted: int) -> None:
    """The promise must be exactly so long."""
    said = promised(engine, request_id)
    require(said == wanted, f"{request_id} is promised {said} tokens, and {wanted} are stored", "P9")


def hits(harness: Harness, model: RealModel) -> None:
    """A prompt again is promised what vLLM's own cache would give; a longer and a shorter one their part."""
    with harness.engine(**settings(model, 3), max_num_seqs=4) as engine:
        (stored,) = harness.store(engine, prompt(model, 1))
        harness.load(engine, "same", stored)
        harness.serve(engine, "local", stored)
        local = engine.observed.probes_of("local")[0].computed
        require_hit(engine, "same", local)
        require(local == model.match(len(stored)), f"vLLM's own hit is of {local} tokens", "P9")
        harness.forget(engine)
        harness.load(engine, "longer", [*stored[:-7], *prompt(model, 2, 2)], max_tokens=4)
        require_hit(engine, "longer", local)
        harness.forget(engine)
        harness.serve(engine, "shorter", stored[: 2 * model.block_size + 3])


def both(harness: Harness, model: RealModel) -> None:
    """The engine has the first blocks itself, and the rest is loaded; a load writes nowhere else."""
    with harness.engine(**settings(model, 3), max_num_seqs=4) as engine:
        (stored,) = harness.store(engine, prompt(model, 1))
        harness.serve(engine, "head", stored[: 2 * model.block_size + 1])
        before = engine.ranks[0].memory.copied()
        engine.add("all", stored)
        tables = blocks_while(engine, "all")
        wrong = engine.ranks[0].memory.changed_outside(
            before, {layer: tables[number] for layer, number in group_of_layers(engine.settings).items()}
        )
        require(not wrong, f"a load changed {wrong} bytes of other blocks or of no block", "P2")
        harness.finish_promised(engine, "all")
        harness.require_sound(engine)


def blocks_while(engine: VllmEngine, request_id: str) -> list[set[int]]:
    """Run the request to its end; the blocks that it had, by group."""
    seen: list[set[int]] = []
    manager = engine.scheduler.kv_cache_manager
    while not engine.ended(request_id):
        engine.step()
        for number, table in enumerate(manager.get_block_ids(request_id)):
            seen += [set()] * (number + 1 - len(seen))
            seen[number] = seen[number] | set(table)
    return seen


def pressure(harness: Harness, model: RealModel) -> None:
    """Three loaded requests leave no block for a token more: vLLM preempts, and what it preempted is loaded again."""
    prompts = [prompt(model, seed)[:-12] for seed in (1, 2, 3)]
    wanted = {**settings(model, 4), "token_budget": 2 * REAL_MODEL_LEN}
    with harness.engine(**wanted) as engine:
        names = harness.add(engine, "first", *prompts, max_tokens=4)
        engine.run(lambda: all(len(engine.observed.outputs[name]) > 2 for name in names))
        full = engine.held_blocks
    with harness.engine(**{**wanted, "num_blocks": full + 1}) as engine:
        harness.store(engine, *prompts)
        harness.add(engine, "again", *prompts, max_tokens=12)
        harness.finish_promised(engine, "again0", "again1", "again2")
        require(bool(engine.observed.preemptions), "nothing was preempted", "P1")
        harness.notes.append(f"{engine.observed.preemptions} preemptions")


def small_memory(harness: Harness, model: RealModel) -> None:
    """The connector's memory has room for a prompt and a half: it forgets, and serves nothing wrong."""
    wanted = settings(model, 3)
    plan = planned(model, wanted["num_blocks"], "LBNHC")
    blocks = sum(group.needed(model.match(len(prompt(model, 1)))).count for group in plan.groups)
    memory = blocks * plan.block_bytes * 3 // 2
    with harness.engine(changed(harness, memory=memory, tiers=[]), **wanted) as engine:
        stored = [harness.store(engine, prompt(model, seed))[0] for seed in (1, 2, 3)]
        for number in (2, 1, 0):
            harness.serve(engine, f"again{number}", stored[number])
            harness.forget(engine)
        found = [promised(engine, f"again{number}") for number in range(len(stored))]
        whole = model.match(len(stored[0]))
        require(found[2] == whole and found[0] < whole, f"of three prompts {found} tokens are promised", "P9")


def changed(harness: Harness, **values: Any) -> Mapping[str, Any]:
    """The connector with other values of settings that it has."""
    transfer = harness.subject.transfer(harness.folder)
    config = transfer["kv_connector_extra_config"]
    if missing := values.keys() - config.keys():
        raise NotObservable(f"the connector has no setting {missing}")
    return {**transfer, "kv_connector_extra_config": {**config, **values}}


def failure(harness: Harness, model: RealModel) -> None:
    """The last blocks cannot be copied: the request begins again in other blocks."""
    with harness.engine(**settings(model, 3)) as engine:
        (stored,) = harness.store(engine, prompt(model, 1))
        if not harness.subject.adapter.fail_loads(engine, 2):
            raise NotObservable("the connector's copies cannot be made to fail")
        engine.add("fails", stored)
        harness.finish_promised(engine, "fails")


def restart(harness: Harness, model: RealModel) -> None:
    """The next engine finds what was stored, whether the one before was closed or killed."""
    wanted, tokens = settings(model, 3), prompt(model, 1)
    killed = harness.folder.parent / f"{harness.folder.name}-killed"
    try:
        with harness.engine(**wanted) as engine:
            harness.store(engine, tokens)
            engine.run(lambda: not harness.held(engine))
            shutil.copytree(harness.folder, killed)
        for name, folder in (("closed", harness.folder), ("killed", killed)):
            harness.journal.note(f"the next engine, after one that was {name}")
            with harness.engine(harness.subject.transfer(folder), **wanted) as engine:
                harness.load(engine, name, tokens)
                require_hit(engine, name, model.match(len(tokens)))
    finally:
        shutil.rmtree(killed, ignore_errors=True)


SITUATIONS: Mapping[str, tuple[Situation, tuple[str, ...]]] = {
    "hits": (hits, ("P2", "P9")),
    "both": (both, ("P2", "P8", "P9")),
    "pressure": (pressure, ("P1", "P2", "P9")),
    "small_memory": (small_memory, ("P1", "P2", "P9")),
    "failure": (failure, ("P2", "P7", "P9")),
    "restart": (restart, ("P2", "P9")),
}
"""By name, with what each protects."""


def _scenario(name: str, model: RealModel) -> Scenario:
    situation, protects = SITUATIONS[name]
    meaning = " ".join((situation.__doc__ or "").split())
    return Scenario(f"{name}[{model.name}]", protects, meaning, partial(_run, situation, model))


def _run(situation: Situation, model: RealModel, harness: Harness) -> None:
    situation(harness, model)


MODEL_SCENARIOS = [_scenario(name, model) for model in PLAYED.values() for name in SITUATIONS]
