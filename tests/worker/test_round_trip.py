"""A device's copies are tried before anything is served: wrong bytes, failures and silence are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from device_beds import LAYERS, LAYOUTS, SLOTS, Bed
from kvpact.errors import ConfigError
from kvpact.testkit.vllm.faulty_copies import FaultyEngine
from kvpact.worker import round_trip
from kvpact.worker.round_trip import require_round_trip

pytest.importorskip("torch")


@pytest.fixture(params=[None, 5], ids=["cpu", "hostile cuda"])
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    made = Bed("inside blocks", request.param)
    yield made
    made.close()


def test_blocks_go_out_and_back_and_are_left_as_they_were(bed: Bed) -> None:
    for layer in range(LAYERS):
        bed.views[layer][:] = layer + 1
    require_round_trip(bed.engine, bed.paged, bed.segment, SLOTS)
    for layer in range(LAYERS):
        assert (bed.views[layer] == layer + 1).all()
    assert not any(bed.segment.slot_view(slot)[0] for slot in range(SLOTS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_bytes_are_found(layout: str) -> None:
    bed = Bed(layout, None)
    gather = bed.engine.copier.gather

    def spoilt(group: int, plan: object) -> None:
        gather(group, plan)
        bed.segment.slot_view(2 * (SLOTS // 3) + 1)[5] ^= group == 0

    bed.engine.copier.gather = spoilt
    with pytest.raises(ConfigError, match=r"1 of 5 blocks came back with other bytes"):
        require_round_trip(bed.engine, bed.paged, bed.segment, SLOTS)
    bed.close()


def test_a_copy_that_fails_is_named(bed: Bed) -> None:
    engine = FaultyEngine(bed.engine, lambda job, block: block == 2)
    with pytest.raises(ConfigError, match="out of the KV memory failed: injected"):
        require_round_trip(engine, bed.paged, bed.segment, SLOTS)


def test_a_copy_that_never_ends_is_named(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "DEADLINE_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="did not end within 0 s"):
        require_round_trip(bed.engine, bed.paged, bed.segment, SLOTS)


def test_too_few_usable_slots_are_refused(bed: Bed) -> None:
    with pytest.raises(ConfigError, match="2 usable blocks are too few"):
        require_round_trip(bed.engine, bed.paged, bed.segment, 2)
