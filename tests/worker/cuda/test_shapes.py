"""Real models' KV memory in every layout that vLLM 0.26 to 0.33 has: what is loaded was saved, in few entries."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.engine import CudaTransferEngine
from kvpact.worker.paged import GROUPS, PagedKV

torch = pytest.importorskip("torch")

BLOCKS = 6
LOADED = (4, 1, 2)
"""Block ids of a load; 1 and 2 are neighbours, and so are their slots."""


@dataclass(frozen=True)
class Model:
    """One rank's KV cache of a model, at 2 bytes a number."""

    layers: int
    heads: int
    """Of keys and values; 0 for a latent, which every rank has whole."""
    numbers: int
    """A token's in one head, keys and values together."""
    block_tokens: int = 16

    def tensors(self, layout: str, ranks: int) -> dict[str, Any]:
        """A tensor [blocks, heads, tokens, numbers] for each layer, whose memory runs in the order of `layout`."""
        heads = max(1, self.heads // ranks)
        sizes = {"L": self.layers, "B": BLOCKS, "H": heads, "N": self.block_tokens, "C": self.numbers}
        memory = torch.empty([sizes[axis] for axis in layout], dtype=torch.bfloat16)
        whole = memory.permute([layout.index(axis) for axis in "LBHNC"])
        return {f"layer.{number}": whole[number] for number in range(self.layers)}


MODELS = {
    "Llama-3-8B": Model(32, 8, 256),
    "Qwen3-8B": Model(36, 8, 256),
    "GPT-OSS-20B, hybrid manager off": Model(24, 8, 128),
    "DeepSeek-V3": Model(61, 0, 576, block_tokens=64),
}

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def entries_per_block(model: Model, layout: str, ranks: int, groups: int) -> int:
    """What a block's copy must cost: a run for all adjacent layers of a group, or for each layer, or each head."""
    heads = max(1, model.heads // ranks)
    if layout.startswith("BL"):
        return groups
    apart = layout in ("LHBNC", "BHLNC") and heads > 1
    if layout == "BHLNC" and heads == 1:
        return groups
    return model.layers * (heads if apart else 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name, model in MODELS.items() for ranks in (1, 2, 8) if model.heads or ranks == 1],
)
def test_what_is_loaded_is_what_was_saved_in_as_few_entries_as_the_layout_allows(
    name: str, layout: str, ranks: int
) -> None:
    model = MODELS[name]
    tensors = model.tensors(layout, ranks)
    first = tensors["layer.0"]
    numbers = (torch.arange(first.numel()).reshape(first.shape) % 251).to(torch.bfloat16)
    for number, tensor in enumerate(tensors.values()):
        torch.add(numbers, number, out=tensor)
    before = {layer: tensor.clone() for layer, tensor in tensors.items()}
    paged = PagedKV.from_tensors(tensors, BLOCKS)
    segment = ArenaSegment.create(4, paged.layout.rank_slot_bytes)
    driver = HostileDriver(len(layout) + ranks)
    storage = tensors["layer.0"].untyped_storage()
    driver.add_device_memory(storage.data_ptr(), storage.nbytes())
    driver.register(segment.mapped_at, 4 * segment.rank_slot_bytes)
    engine = CudaTransferEngine(DeviceCopies(paged, segment, driver, lambda: COMPUTING_STREAM, 4, None), 0, None)

    def end(transfers: Any) -> int:
        """Entries that it took, by then."""
        deadline = time.monotonic() + 20
        while not all(transfer.ended for transfer in transfers):
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
    for number in range(1, len(engine.groups) + 1):
        assert transfers[0].wait(number, 20)
    assert len(engine.groups) == min(GROUPS, model.layers)
    assert end(transfers) == 3 * entries_per_block(model, layout, ranks, GROUPS)
    assert engine.close(10)
    driver.finish()
    assert driver.violations == []
    for layer, tensor in tensors.items():
        assert torch.equal(tensor, before[layer]), layer
    segment.close()
