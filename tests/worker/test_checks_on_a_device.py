"""Checks that cannot be made, and saves that a reset gives up, with the proof on: on a simulated device, or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from device_beds import BLOCKS, LAYERS, SLOTS, Bed, CudaBed, bed_named
from device_plays import page
from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import Arena, Standing
from kvpact.metrics import UnmadeCheck
from kvpact.worker.device.proof import Proof

FIRST = 3
"""Jobs of each kind that prove the rank."""


class Proving:
    """A rank whose copies prove themselves, one job after another."""

    def __init__(self, bed: Bed | CudaBed) -> None:
        self.bed = bed
        self.arena = Arena([bed.segment])
        self.device: Any = bed.device if isinstance(bed, Bed) else self._of_vllm(bed)
        if bed.engine.proof is not None:
            bed.engine.proof.close()
        assert self.device is not None
        bed.engine.proof = Proof(bed.paged, bed.segment, self.device, stores=True, first=FIRST)
        self.jobs = 0

    @staticmethod
    def _of_vllm(bed: CudaBed) -> Any:
        from kvpact.vllm.device import VllmDevice

        return VllmDevice(bed.paged.tensors[0].device, max(layer.chunk_bytes for layer in bed.paged.layers))

    @property
    def standing(self) -> Standing:
        found: Standing = self.bed.segment.standing
        return found

    def write(self, blocks: tuple[int, ...]) -> None:
        """As a forward pass would."""
        for block in blocks:
            for layer in range(LAYERS):
                content = page(layer, 100 * self.jobs + block, self.bed.paged.layers[layer].page_bytes)
                self.bed.write(layer, block, content)

    def order(self, kind: str) -> Any:
        """A job of two blocks, and what was written there."""
        self.jobs += 1
        blocks, slots = (self.jobs % BLOCKS, (self.jobs + 5) % BLOCKS), (self.jobs % SLOTS, (self.jobs + 3) % SLOTS)
        if kind == "load":
            (transfer,) = self.bed.engine.load([LoadJob(self.jobs, "r", 0, slots, blocks, synchronous=False)])
        else:
            self.write(blocks)
            (transfer,) = self.bed.engine.save([SaveJob(self.jobs, "r", 0, slots, blocks)])
        self.bed.engine.submit_all()
        return transfer

    def run(self, kind: str) -> bool:
        """A job to its end; returns whether it may be used."""
        transfer = self.order(kind)
        assert transfer.wait(len(self.bed.engine.groups), 30)
        return not transfer.failed

    def prove(self) -> None:
        """Run as many jobs as a rank must have right; what was saved comes back."""
        for _ in range(FIRST):
            assert self.run("save")
            assert self.run("load")
        assert self.standing is Standing.PROVEN
        self.order("save").wait(len(self.bed.engine.groups), 30)
        saved, slots = (self.jobs % BLOCKS, (self.jobs + 5) % BLOCKS), (self.jobs % SLOTS, (self.jobs + 3) % SLOTS)
        held = [self.bed.read(0, block) for block in saved]
        self.bed.finish()
        before = [one() for one in held]
        self.jobs += 1
        self.write(saved)
        (load,) = self.bed.engine.load([LoadJob(self.jobs, "r", 0, slots, saved, synchronous=False)])
        assert load.wait(len(self.bed.engine.groups), 30)
        again = [self.bed.read(0, block) for block in saved]
        self.bed.finish()
        assert all(np.array_equal(one, other()) for one, other in zip(before, again, strict=True))


@pytest.fixture(params=["fake-cuda", "cuda"])
def proving(request: pytest.FixtureRequest) -> Iterator[Proving]:
    bed = bed_named(request.param, "inside blocks")
    yield Proving(bed)
    bed.close()


@pytest.mark.parametrize("kind", ["save", "load"])
def test_h117_memory_that_is_full_during_a_check_refutes_nothing(
    proving: Proving, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise MemoryError("CUDA out of memory. Tried to allocate 4.00 MiB")

    with monkeypatch.context() as full:
        full.setattr(proving.device, "run", refused)
        assert not proving.run(kind), "nothing that was not checked is used before the rank is proven"
    assert (proving.standing, proving.bed.engine.error) == (Standing.OPEN, None)
    assert proving.arena.unmade_checks[UnmadeCheck.FAILED] == 1
    proving.prove()


def test_h116_saves_that_a_reset_gives_up_are_not_judged(proving: Proving) -> None:
    """Their blocks are computed anew while they are copied and compared."""
    for _ in range(2 * FIRST):
        transfer = proving.order("save")
        proving.arena.judge_from(proving.jobs + 1)
        proving.jobs += 7
        proving.write(tuple(range(BLOCKS)))
        assert transfer.wait(len(proving.bed.engine.groups), 30)
    assert proving.standing is Standing.OPEN
    assert proving.arena.unmade_checks[UnmadeCheck.GIVEN_UP] > 0
    proving.prove()
