"""Real models' KV memory in every layout that vLLM 0.26 to 0.33 has: what is loaded was saved, in few entries."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.played import PlayedDevice
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.paged import PagedKV
from model_shapes import LAYOUTS, MODELS, entries_per_block

torch = pytest.importorskip("torch")

BLOCKS = 6
LOADED = (4, 1, 2)
"""Block ids of a load; 1 and 2 are neighbours, and so are their slots."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name, model in MODELS.items() for ranks in (1, 2, 8) if model.heads or ranks == 1],
)
def test_what_is_loaded_is_what_was_saved_in_as_few_entries_as_the_layout_allows(
    name: str, layout: str, ranks: int
) -> None:
    model = MODELS[name]
    tensors = model.tensors(layout, ranks, BLOCKS)
    first = tensors["layer.0"]
    numbers = (torch.arange(first.numel()).reshape(first.shape) % 251).to(torch.bfloat16)
    for number, tensor in enumerate(tensors.values()):
        torch.add(numbers, number, out=tensor)
    before = {layer: tensor.clone() for layer, tensor in tensors.items()}
    paged = PagedKV.from_tensors(tensors, BLOCKS)
    segment = ArenaSegment.create(4, paged.layout.rank_slot_bytes)
    device = PlayedDevice(len(layout) + ranks)
    device.map(tensors["layer.0"])
    device.register(segment.mapped_at, 4 * segment.rank_slot_bytes)
    engine, driver = DeviceTransferEngine(paged, segment, device, len(segment.memory)), device.driver

    def end(transfers: Any) -> int:
        """Entries that it took, by then."""
        deadline = time.monotonic() + 20
        while not all(transfer.ended for transfer in transfers):
            engine.submit_all()
            driver.finish()
            assert time.monotonic() < deadline
        assert not any(transfer.failed for transfer in transfers)
        entries, driver.num_entries = driver.num_entries, 0
        return entries

    whole_slots = paged.layout.rank_slot_bytes == sum(paged.layout.layer_page_bytes)
    together = entries_per_block(model, layout, ranks, 1)
    neighbours_join = together == 1 and whole_slots
    saved = end(engine.save([SaveJob(1, "r", 0, (0, 2, 3), LOADED)]))
    assert saved == (2 if neighbours_join else 3 * together)
    for tensor in tensors.values():
        tensor[list(LOADED)] = -1
    transfers = engine.load([LoadJob(2, "r", 0, (0, 2, 3), LOADED, synchronous=True)])
    assert transfers[0].wait(1, 20)
    assert end(transfers) == saved
    assert engine.close(10)
    driver.finish()
    assert driver.violations == []
    for layer, tensor in tensors.items():
        assert torch.equal(tensor, before[layer]), layer
    segment.close()
