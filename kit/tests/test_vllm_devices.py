"""vLLM's scheduler over ranks whose KV memory is on a hostile CUDA device, in the shapes of real models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.contract import LoadJob
from kvpact.identity.keys import BlockKey
from kvpact.index.classed_slots import ClassedSlots
from kvpact.memory.arena import Standing
from kvpact.metrics import Metrics
from kvpact.tiers.client import TierClient
from kvpact.tiers.disk.inspection import scan_directory
from kvpact.worker.device import proof
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact_testkit.device.played import PlayedDevice
from kvpact_testkit.results import ConformanceReport, Verdict, as_text
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.harness import Harness, prompt
from kvpact_testkit.vllm.model_groups import GEMMA
from kvpact_testkit.vllm.scenarios import Scenario
from model_shapes import LAYOUTS, MODELS, Model, entries_per_block
from rank_devices import Devices

PACT = "kvpact.vllm:PactConnector"
SYNCHRONOUS = {"memory": "128MiB", "model_id": "testkit"}
ASYNCHRONOUS = {**SYNCHRONOUS, "sync_load_budget": 0}


def settings_of(model: Model, layout: str, ranks: int, devices: Devices, **others: object) -> dict[str, Any]:
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


def check(config: Mapping[str, Any], situation: Callable[[Harness], None]) -> None:
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
            each = entries_per_block(model, layout, ranks)
            # whole blocks that are neighbours are one copy
            assert all(one == blocks * each or (each == 1 and one <= blocks) for one in loaded)

    check(SYNCHRONOUS, situation)
    assert devices.violations == []


LLAMA = Model(32, 8, 4)
"""Llama-3-8B with a head of 2 numbers instead of 128: as many copies, of fewer bytes."""


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
        settings: dict[str, Any] = {
            "groups": GEMMA,
            "heads": 4,
            "head_size": 64,
            "ranks": ranks,
            "device": devices.of_rank,
        }
        with harness.engine(**settings, num_blocks=101) as engine:
            for seed in range(8):
                (stored,) = harness.store(engine, prompt(seed, 3 + seed % 4 * 3))
                harness.load(engine, f"again{seed}", stored)
                harness.serve(engine, f"longer{seed}", [*stored, *prompt(9, 2)])

    check({**SYNCHRONOUS, "memory": "2MiB"}, situation)
    assert {segment.unit for segment in devices.segments} == {"extent"}
    assert any(moved)
    assert devices.violations == []


def loads_by(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each load that a rank is ordered from now on, whether the step waits for it."""
    seen: list[bool] = []
    load = DeviceTransferEngine.load

    def noted(engine: DeviceTransferEngine, jobs: Sequence[LoadJob]) -> Any:
        seen.extend(job.synchronous for job in jobs)
        return load(engine, jobs)

    monkeypatch.setattr(DeviceTransferEngine, "load", noted)
    return seen


def writes_by(monkeypatch: pytest.MonkeyPatch, tell: Callable[[], object] = str) -> list[tuple[BlockKey, ...]]:
    """The blocks of each write to a tier, from now on; `tell` is called with each."""
    seen: list[tuple[BlockKey, ...]] = []
    put = TierClient.submit_put

    def noted(client: TierClient, op_id: Any, keys: Sequence[BlockKey], *others: Any, **named: Any) -> bool:
        seen.append(tuple(keys))
        tell()
        return put(client, op_id, keys, *others, **named)

    monkeypatch.setattr(TierClient, "submit_put", noted)
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_until_all_ranks_are_proven_no_step_waits_for_a_load_and_no_tier_gets_a_block(
    ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices, seen = Devices(monkeypatch, ranks, first=3), loads_by(monkeypatch)

    def situation(harness: Harness) -> None:
        with harness.engine(num_blocks=101, ranks=ranks, device=devices.of_rank) as engine:
            for number in range(3):
                (stored,) = harness.store(engine, prompt(number, 4))
                assert {segment.standing for segment in devices.segments} == {Standing.OPEN}
                harness.load(engine, f"again{number}", stored)
            assert seen == [False] * 3 * ranks, "requests wait for the checks, and no step does"
            assert {segment.standing for segment in devices.segments} == {Standing.PROVEN}
            harness.forget(engine)
            harness.load(engine, "after", stored)
            assert seen[3 * ranks :] == [True] * ranks
            assert len(set(writes)) == 3, "what memory held is written"
            assert min(after) == 3 * ranks, "before, one of the copies might have turned out to be wrong"

    after: list[int] = []
    writes = writes_by(monkeypatch, lambda: after.append(len(seen)))
    check({**SYNCHRONOUS, "tiers": [f"disk://{tmp_path}?capacity=8MiB"]}, situation)
    assert devices.violations == []


def test_what_memory_held_of_all_groups_before_copies_were_proven_is_found_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices = Devices(monkeypatch, first=3)
    settings: dict[str, Any] = {
        "groups": GEMMA,
        "heads": 4,
        "head_size": 64,
        "num_blocks": 101,
        "device": devices.of_rank,
    }

    def situation(harness: Harness) -> None:
        with harness.engine(**settings) as engine:
            stored = [harness.store(engine, prompt(number, 6))[0] for number in range(3)]
            assert [segment.standing for segment in devices.segments] == [Standing.OPEN]
            harness.load(engine, "again", *stored)
            assert [segment.standing for segment in devices.segments] == [Standing.PROVEN]
        with harness.engine(**settings) as engine:
            for number, tokens in enumerate(stored):
                harness.load(engine, f"restarted{number}", tokens)

    check({**SYNCHRONOUS, "tiers": [f"disk://{tmp_path}?capacity=64MiB"]}, situation)
    assert devices.violations == []


class WrongLater(PlayedDevice):
    """A device one of whose loads, or saves, leaves out its last run of bytes; all later ones are right."""

    wrong = "load", 5

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.calls = {"load": 0, "save": 0}

    def _without_last(self, kind: str, arrays: Sequence[Any]) -> Sequence[Any]:
        self.calls[kind] += 1
        return [one[:-1] for one in arrays] if (kind, self.calls[kind]) == self.wrong else arrays

    def load(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        targets, sources, sizes = self._without_last("load", (targets, sources, sizes))
        super().load(targets, sources, sizes, stream)

    def save(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        targets, sources, sizes = self._without_last("save", (targets, sources, sizes))
        super().save(targets, sources, sizes, stream)


@pytest.mark.parametrize("first", [3, 9])
@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_wrong_copy_costs_no_token_and_the_engine_goes_on_without_a_cache(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before and after the rank is proven: then all of the play's copies are among those that are checked."""
    monkeypatch.setattr(proof, "ONE_IN", 1)
    monkeypatch.setattr(WrongLater, "wrong", (kind, 5))
    devices, writes = Devices(monkeypatch, kind=WrongLater, first=first), writes_by(monkeypatch)

    counted: list[str] = []
    add = Metrics.add

    def noted(metrics: Metrics, name: str, *others: Any) -> None:
        counted.append(name)
        add(metrics, name, *others)

    monkeypatch.setattr(Metrics, "add", noted)

    def situation(harness: Harness) -> None:
        with harness.engine(num_blocks=101, device=devices.of_rank) as engine:
            for number in range(8):
                (stored,) = harness.store(engine, prompt(number, 4))
                harness.serve(engine, f"again{number}", stored)
            (segment,) = devices.segments
            assert segment.standing is Standing.REFUTED
            copies = devices.entries
            harness.serve(engine, "after", stored, prompt(9, 4))
            assert devices.entries == copies, "nothing is copied any more"

    check({**ASYNCHRONOUS, "tiers": [f"disk://{tmp_path}?capacity=8MiB"]}, situation)
    assert bool(writes) is (first == 3)
    assert counted.count("refuted_copies") == 1
    held = sum(one.blocks for one in scan_directory(tmp_path))
    assert held == 0, "what this engine had written is dropped"


class WrongFrom(PlayedDevice):
    """A device whose saves leave out their last run of bytes, from some save on."""

    begins, saves = 0, 0

    def save(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        type(self).saves += 1
        kept = slice(None, -1 if self.saves >= self.begins else None)
        super().save(targets[kept], sources[kept], sizes[kept], stream)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("begins", "one_in"), [(30, 10), pytest.param(5000, 1000, marks=pytest.mark.soak)])
def test_after_wrong_saves_a_running_engine_and_the_next_one_are_given_none_of_them(
    begins: int, one_in: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wrong blocks are on disk and in a shared tier before a check finds one. What is read is judged block by block."""
    random.seed(5)  # of the sampling: not the first wrong save is checked
    monkeypatch.setattr(proof, "ONE_IN", one_in)
    monkeypatch.setattr(WrongFrom, "begins", begins)
    monkeypatch.setattr(WrongFrom, "saves", 0)
    devices = Devices(monkeypatch, kind=WrongFrom, first=3)
    tiers = [f"disk://{tmp_path}/slabs?capacity=64MiB", f"dir://{tmp_path}/shared?capacity=64MiB"]

    def situation(harness: Harness) -> None:
        with harness.engine(num_blocks=101) as other, harness.engine(num_blocks=101, device=devices.of_rank) as engine:
            (segment,) = devices.segments
            for number in range(3):  # the loads that a proof needs
                harness.load(engine, f"again{number}", *harness.store(engine, prompt(number, 2)))
            stored = 3
            while segment.standing is not Standing.REFUTED:
                assert stored < begins + 3 * one_in
                harness.serve(engine, f"prompt{stored}", prompt(stored, 2))
                stored += 1
            unchecked = WrongFrom.saves - begins
            assert written(tmp_path) > 2 * unchecked > 0, "wrong blocks are in the tiers"
            harness.rest(engine)
            wrong = range(stored - unchecked - 1, stored)
            harness.serve(other, "other", *(prompt(number, 2) for number in wrong))
        with harness.engine(num_blocks=101) as restarted:
            harness.serve(restarted, "next", *(prompt(number, 2) for number in wrong))
            for name in [f"next{place}" for place in range(len(wrong))]:
                assert restarted.observed.committed_tokens(name) in (0, 32), "all, from what the other one stored"

    check({**ASYNCHRONOUS, "tiers": tiers}, situation)


def written(directory: Path) -> int:
    """Records on disk and in the shared tier, but for those that are being written."""
    kept = [path for path in (directory / "shared").rglob("*") if "new" not in path.parts and path.is_file()]
    files = sum(path.stat().st_size > 256 for path in kept)
    return files + sum(one.blocks for one in scan_directory(directory / "slabs"))


@pytest.mark.parametrize(("layout", "blocks"), [("LBNHC", 16), ("BLHNC", 128)])
def test_beside_a_decode_a_step_waits_for_as_many_copies_as_its_thread_gives_a_device_in_a_third_of_a_millisecond(
    layout: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512: of Llama-3-8B 16 blocks layer by layer. What is larger is loaded beside others' steps; alone, nothing is.

    So it is until a step of decodes was timed; here none ever is, as their times are this machine's.
    """
    monkeypatch.setattr("kvpact.cache.load_budget.TIMED_STEPS", 0)
    devices, seen = Devices(monkeypatch), loads_by(monkeypatch)

    def situation(harness: Harness) -> None:
        with harness.engine(**settings_of(LLAMA, layout, 1, devices, num_blocks=400)) as engine:
            prompts = harness.store(engine, *(prompt(count, count) for count in (blocks, blocks + 1)))
            for number, tokens in enumerate(prompts):
                harness.load(engine, f"alone{number}", tokens, max_tokens=1)
            harness.forget(engine)
            for number, tokens in enumerate(prompts):
                engine.add(f"decoding{number}", prompt(number + 1, 1), max_tokens=20)
                engine.step(2)
                harness.load(engine, f"beside{number}", tokens, max_tokens=1)

    check(SYNCHRONOUS, situation)
    assert seen == [True, True, True, layout != "LBNHC"]
