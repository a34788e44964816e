"""vLLM's scheduler over ranks whose KV memory is on a hostile CUDA device, in the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.index.classed_slots import ClassedSlots
from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.played import PlayedDevice
from kvpact.testkit.results import ConformanceReport, Verdict, as_text
from kvpact.testkit.vllm.driver import VllmDriver
from kvpact.testkit.vllm.harness import Harness, prompt
from kvpact.testkit.vllm.model_groups import GEMMA
from kvpact.testkit.vllm.scenarios import Scenario
from model_shapes import LAYOUTS, MODELS, Model, entries_per_block

PACT = "kvpact.vllm:PactConnector"
SYNCHRONOUS = {"memory": "128MiB", "model_id": "testkit", "gpu": "auto"}
ASYNCHRONOUS = {**SYNCHRONOUS, "sync_load_budget": 0}


class Devices:
    """A device for each rank, opened where the connector would open a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> None:
        self._seed = seed
        self._devices: list[PlayedDevice] = []
        self.segments: list[ArenaSegment] = []
        """Opened so far."""
        monkeypatch.setattr("kvpact.vllm.device.open_device", self._open)

    def _open(self, config: Any, paged: Any, segment: Any, rank: int) -> Any:
        self.segments.append(segment)
        return self._devices[rank].open(config, paged, segment, rank)

    def of_rank(self, rank: int) -> PlayedDevice:
        """A new one; ranks are made in order, again for each engine."""
        del self._devices[rank:]
        self._devices.append(PlayedDevice(self._seed + rank))
        return self._devices[rank]

    @property
    def entries(self) -> list[int]:
        """Copies so far, rank by rank."""
        return [device.driver.num_entries for device in self._devices]

    @property
    def violations(self) -> list[str]:
        return [violation for device in self._devices for violation in device.driver.violations]


def settings_of(model: Model, layout: str, ranks: int, devices: Devices, **others: object) -> dict[str, object]:
    return {
        "layers": model.layers,
        "heads": max(model.heads, 1),
        "head_size": model.numbers if not model.heads else model.numbers // 2,
        "latent": not model.heads,
        "block_size": model.block_tokens,
        "kv_layout": layout,
        "ranks": ranks,
        "device": devices.of_rank,
        **others,
    }


def check(config: dict[str, object], situation: Callable[[Harness], None]) -> None:
    one = VllmDriver(PACT, config).check(Scenario("device", ("P2", "P9"), "", situation))
    assert one.verdict is Verdict.KEPT, as_text(ConformanceReport(PACT, "", (one,)))


def tokens_of(blocks: int, block_tokens: int) -> list[int]:
    return [(7 * position) % 29_989 for position in range(blocks * block_tokens + 5)]


CASES = [
    (name, layout, (1, 2, 8)[(number + place) % 3])
    for number, (name, model) in enumerate(MODELS.items())
    for place, layout in enumerate(LAYOUTS)
    if model.heads or layout in ("LBNHC", "BLNHC")
]
"""Each model in each layout, and each layout with each number of ranks. A latent has no heads to be ordered, and its
layouts differ only in where layers are."""


@pytest.mark.parametrize(("name", "layout", "ranks"), CASES)
def test_what_a_model_loads_through_the_connector_was_saved_in_as_few_copies_as_its_layout_allows(
    name: str, layout: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, blocks = MODELS[name], 2
    devices = Devices(monkeypatch, seed=len(name) + ranks)

    def situation(harness: Harness) -> None:
        with harness.engine(**settings_of(model, layout, ranks, devices, num_blocks=12)) as engine:
            (tokens,) = harness.store(engine, tokens_of(blocks, model.block_tokens), max_tokens=1)
            before = devices.entries
            harness.load(engine, "again", tokens, max_tokens=1)
            assert engine.observed.committed_tokens("again") == blocks * model.block_tokens
            loaded = [after - one for after, one in zip(devices.entries, before, strict=True)]
            each = entries_per_block(model, layout, ranks, 1)
            # whole blocks that are neighbours are one copy
            assert all(one == blocks * each or (each == 1 and one <= blocks) for one in loaded)

    check(SYNCHRONOUS, situation)
    assert devices.violations == []


LLAMA = Model(32, 8, 4)
"""Llama-3-8B with a head of 2 numbers instead of 128: as many copies, of fewer bytes."""


@pytest.mark.parametrize(
    ("layout", "config", "num_blocks", "copies"),
    [
        ("LBNHC", SYNCHRONOUS, 600, 8192),
        ("BLHNC", SYNCHRONOUS, 258, 256),
        ("BLHNC", ASYNCHRONOUS, 258, 256),
        ("BLHNC", ASYNCHRONOUS, 600, 1),
    ],
    ids=["layers apart", "layers together", "whole blocks", "whole blocks that are neighbours"],
)
def test_4096_tokens_of_llama_3_8b_are_loaded_in_as_many_copies_as_is_written(
    layout: str, config: dict[str, object], num_blocks: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives blocks that were used before in falling order, so that none of those has its neighbour beside it."""
    devices = Devices(monkeypatch)

    def situation(harness: Harness) -> None:
        with harness.engine(**settings_of(LLAMA, layout, 1, devices, num_blocks=num_blocks)) as engine:
            (tokens,) = harness.store(engine, tokens_of(256, 16), max_tokens=1)
            (before,) = devices.entries
            harness.load(engine, "again", tokens, max_tokens=1)
            assert engine.observed.committed_tokens("again") == 4096
            assert devices.entries == [before + copies]

    check(config, situation)
    assert devices.violations == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_two_sizes_divide_a_devices_memory_among_them(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the blocks of about four prompts, so that extents move between the classes meanwhile."""
    devices = Devices(monkeypatch, seed=ranks)
    moved: list[int] = []
    obtain = ClassedSlots.obtain

    def counted(space: ClassedSlots, *arguments: Any) -> int:
        moved.append(obtain(space, *arguments))
        return moved[-1]

    monkeypatch.setattr(ClassedSlots, "obtain", counted)

    def situation(harness: Harness) -> None:
        settings = {"groups": GEMMA, "heads": 4, "head_size": 64, "ranks": ranks, "device": devices.of_rank}
        with harness.engine(**settings, num_blocks=101) as engine:
            for seed in range(8):
                (stored,) = harness.store(engine, prompt(seed, 3 + seed % 4 * 3))
                harness.load(engine, f"again{seed}", stored)
                harness.serve(engine, f"longer{seed}", [*stored, *prompt(9, 2)])

    check({**SYNCHRONOUS, "memory": "2MiB"}, situation)
    assert {segment.unit for segment in devices.segments} == {"extent"}
    assert any(moved)
    assert devices.violations == []
