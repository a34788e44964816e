"""KV cache groups as kvpact takes them in: kinds, names, refusals, block tables, and loads that are lost whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1 import kv_cache_interface as vllm

from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob
from kvpact.errors import ConfigError
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.ranges import BlockRange, RangeSet
from kvpact.vllm.checks import check_settings
from kvpact.vllm.compat.group_tables import StateBlocks
from kvpact.vllm.groups import engine_groups, fit_to_engine
from kvpact.vllm.identity import engine_namespace
from kvpact.wire import UnorderedLoad
from kvpact.worker.rank_jobs import RankJobs
from vllm_played_engine import vllm_config

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 16, "dtype": torch.bfloat16}
FULL = vllm.FullAttentionSpec(**SHAPE)
WINDOW = vllm.SlidingWindowSpec(**SHAPE, sliding_window=40)
CHUNK = vllm.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
STATE = vllm.MambaSpec(block_size=16, shapes=((8, 8),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
MODEL = SimpleNamespace(runner_type="generate", max_model_len=4096)
PLAIN: Any = SimpleNamespace(speculative_config=None, model_config=MODEL)


def draft(*, eagle: bool, stages: int = 1) -> Any:
    """The configuration of an engine with speculative decoding."""
    drafts = SimpleNamespace(use_eagle=lambda: eagle)
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    return SimpleNamespace(speculative_config=drafts, model_config=MODEL, parallel_config=parallel)


def model(*specs: Any, marked: Sequence[int] = (), num_blocks: int = 10, **more: Any) -> Any:
    """vLLM's configuration of groups with two layers each."""
    groups = [
        vllm.KVCacheGroupSpec([f"layer.{number}.{one}" for one in "ab"], spec, is_eagle_group=number in marked)
        for number, spec in enumerate(specs)
    ]
    config = vllm.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return replace(config, **more)


def test_each_kind_of_group_is_taken_in() -> None:
    uniform = vllm.UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"layer.4.a": WINDOW, "layer.4.b": replace(WINDOW, num_kv_heads=2)}
    )
    found = engine_groups(PLAIN, model(FULL, WINDOW, CHUNK, STATE, uniform))
    assert [(group.kind, group.span, group.drops_last) for group in found.groups.groups] == [
        (GroupKind.FULL, 0, False),
        (GroupKind.WINDOW, 40, False),
        (GroupKind.CHUNK, 64, False),
        (GroupKind.STATE, 0, False),
        (GroupKind.WINDOW, 40, False),
    ]
    assert found.several
    assert found.groups.chain == 0
    assert found.layers[1] == ("layer.1.a", "layer.1.b")
    assert found.groups.block_size == found.groups.alignment == 16
    assert len({group.digest for group in found.groups.groups}) == 5


def test_one_group_of_full_attention_is_no_several() -> None:
    """So is a model whose windows vLLM keeps whole, because its hybrid manager is off."""
    for spec in (FULL, replace(FULL, sliding_window=40)):
        assert not engine_groups(PLAIN, model(spec)).several
    assert engine_groups(PLAIN, model(WINDOW)).several


def test_hits_are_aligned_as_the_release_says() -> None:
    large = replace(FULL, block_size=48)
    assert engine_groups(PLAIN, model(FULL, large)).groups.alignment == 48
    if "cache_hit_alignment_tokens" in vllm.KVCacheConfig.__dataclass_fields__:
        aligned = model(FULL, WINDOW, cache_hit_alignment_tokens=64)
        assert engine_groups(PLAIN, aligned).groups.alignment == 64


def test_a_draft_models_last_block_is_volatile() -> None:
    def dropping(config: Any, *specs: Any, marked: Sequence[int] = ()) -> list[int]:
        groups = engine_groups(config, model(*specs, marked=marked)).groups.groups
        return [number for number, group in enumerate(groups) if group.drops_last]

    assert dropping(draft(eagle=True), FULL, WINDOW, marked=[1]) == [1]
    assert dropping(draft(eagle=True), FULL, WINDOW) == [0, 1]
    assert dropping(draft(eagle=True), FULL) == [0]
    assert dropping(draft(eagle=False), FULL, WINDOW, marked=[1]) == []


def test_digests_name_what_a_block_holds_and_nothing_else() -> None:
    def digest(*specs: Any, **more: Any) -> str:
        return engine_groups(PLAIN, model(*specs, **more)).digest

    assert len({digest(FULL, replace(STATE, num_speculative_blocks=drafts)) for drafts in (0, 1, 2)}) == 3
    base = digest(FULL, WINDOW)
    assert digest(FULL, WINDOW, num_blocks=99) == base
    assert digest(FULL, replace(WINDOW, page_size_padded=1 << 20)) == base
    others = [
        digest(WINDOW, FULL),
        digest(FULL, replace(WINDOW, sliding_window=41)),
        digest(FULL, replace(WINDOW, num_kv_heads=2)),
        digest(FULL, replace(WINDOW, dtype=torch.float16)),
        digest(replace(FULL, block_size=32), replace(WINDOW, block_size=32)),
        digest(FULL, WINDOW, WINDOW),
        digest(FULL, FULL),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_groups_are_in_the_namespace_and_one_of_full_attention_changes_nothing(tmp_path: Path) -> None:
    config = vllm_config(tmp_path / "model", {}, 4096, {})
    before = engine_namespace(config, {"layers": "same"}).digest
    hybrid_off, hybrid_on, other = (
        engine_namespace(config, {"layers": "same"}, groups=engine_groups(PLAIN, model(*specs))).digest
        for specs in ([FULL], [FULL, WINDOW], [WINDOW, FULL])
    )
    assert hybrid_off == before
    assert len({before, hybrid_on, other}) == 3


def subclass(name: str, base: Any) -> Any:
    """A specification of a class of this name."""
    made = type(name, (type(base),), {})
    fields = {name: getattr(base, name) for name in type(base).__dataclass_fields__ if hasattr(base, name)}
    return made(**fields)


@pytest.mark.parametrize(
    ("specs", "config", "message"),
    [
        (
            [subclass("CrossAttentionSpec", FULL)],
            PLAIN,
            "CrossAttentionSpec is not supported: its keys and values",
        ),
        ([subclass("EncoderOnlyAttentionSpec", FULL)], PLAIN, "EncoderOnlyAttentionSpec is not supported: an encoder"),
        ([FULL, subclass("SinkFullAttentionSpec", FULL)], PLAIN, "SinkFullAttentionSpec is not supported: its sink"),
        ([FULL, subclass("SomebodysSpec", FULL)], PLAIN, "SomebodysSpec is not supported; kvpact serves FullAtt"),
        ([FULL, replace(STATE, mamba_cache_mode="none")], PLAIN, "add --enable-prefix-caching and, before vLLM 0.33"),
        ([FULL, STATE], draft(eagle=False, stages=2), "leave --pipeline-parallel-size or --speculative-config out"),
        ([], PLAIN, "keeps no KV cache, so there is nothing to store: leave --kv-transfer-config out"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(specs: Sequence[Any], config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_groups(config, model(*specs))


def test_the_step_hook_is_refused_for_several_groups(tmp_path: Path) -> None:
    config, settings = vllm_config(tmp_path / "model", {}, 4096, {}), load_config({"match_at": "step"}, {})
    check_settings(settings, config, engine_groups(PLAIN, model(FULL)))
    with pytest.raises(ConfigError, match='set "match_at": "schedule"'):
        check_settings(settings, config, engine_groups(PLAIN, model(FULL, WINDOW)))


def test_loads_of_groups_are_such_as_can_fail() -> None:
    config = load_config({}, {})
    engine = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    assert fit_to_engine(config, engine_groups(PLAIN, model(FULL)), engine) is config
    assert fit_to_engine(config, engine_groups(PLAIN, model(FULL, WINDOW)), engine).sync_load_budget == 0


# Block tables

STATES = GroupSet((KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.STATE, 16)))


TABLES = ([1, 2, 3], [4, 0, 5])
"""The tables of one request."""


def test_states_are_saved_from_the_blocks_that_vllm_offers() -> None:
    """The table may name another block by then, one with the state of a token inside a block is none to save, and one
    that has lost its name may be another request's."""
    offers = {"r": [(1, 9, 32), (1, 5, 40), (1, 7, 16)], "other": [(1, 4, 16)]}
    offered = SimpleNamespace(boundary_state_offloads=offers)
    blocks = StateBlocks(STATES, 0, lambda request_id, block, tokens: (request_id, block, tokens) != ("r", 7, 16))
    step = SimpleNamespace(kv_connector_block_state=offered)
    for this, shown, states, requests in (
        (step, (0, 9, 0), [(1, 1, 9)], {"r", "other"}),
        (None, (0, 0, 0), [], set()),
    ):
        with blocks.saving(this):
            assert blocks.shown("r", TABLES) == ((1, 2, 3), shown)
            assert [*blocks.offered("r")] == states
            assert {*blocks.requests} == requests
    assert blocks.shown("r", TABLES) == ((1, 2, 3), (4, 0, 5)), "a load goes into the blocks of the table"
    assert not blocks.offered("r")


# Loads that are lost whole


def part(number: int, group: int, *, synchronous: bool = False) -> LoadJob:
    return LoadJob(number, "r", 0, (number, number + 10), (number * 2, number * 2 + 1), synchronous, group)


def outcome(done: int) -> JobOutcome:
    return JobOutcome(RangeSet.of(BlockRange(0, done)), RangeSet.of(BlockRange(done, 2 - done)))


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_h08_a_load_of_groups_arrives_once_and_as_a_whole(failing: int | None) -> None:
    jobs = RankJobs(stores=True, whole_requests=True)
    jobs.order([part(1, 0), part(2, 1)])
    jobs.end(1, outcome(1 if failing == 0 else 2))
    assert not jobs.ended_loads().arrived
    jobs.end(2, outcome(1 if failing == 1 else 2))
    ended = jobs.ended_loads()
    assert ended.arrived == {"r"}
    assert ended.lost == (set() if failing is None else {"r"})
    assert not ended.invalid_blocks
    assert not jobs.ended_loads().arrived


def test_h08_an_overdue_part_of_a_load_ends_the_wait_for_all_parts() -> None:
    jobs = RankJobs(stores=True, whole_requests=True)
    jobs.order([part(1, 0), part(2, 1)])
    jobs.leave_overdue(1)
    ended = jobs.ended_loads()
    assert ended.arrived == ended.lost == {"r"}
    for number in (2, 1):
        jobs.end(number, outcome(2))
    assert not jobs.ended_loads().arrived
    assert all(len(one.failed) == 2 for one in jobs.report().values())


def test_a_load_of_groups_that_was_never_ordered_is_lost() -> None:
    jobs = RankJobs(stores=True, whole_requests=True)
    jobs.report_broken([UnorderedLoad("r", (), synchronous=False)])
    ended = jobs.ended_loads()
    assert ended.arrived == ended.lost == {"r"}
