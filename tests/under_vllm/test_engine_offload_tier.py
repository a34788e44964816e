"""`PactTier` below the host memory of vLLM's own OffloadingConnector, in real engines over a device that is played.

What an engine answers is compared with what one without it answers from as much of its own prefix cache.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from offloading_engines import Offloading, all_of, ask, asked, failed_promotions, metric, wait_until
from references import References
from slab_surgery import SlabSurgery

from engines import prompt
from kvpact.tiers.disk.inspection import verify_slab
from kvpact_testkit.demo.engine import EngineProcess
from polling import until
from servers.redis_server import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SPEC = "PlayedPactTieringSpec"
BLOCKS = 3
ALL = all_of(BLOCKS)
PROMPTS = range(8100, 8104)
STORED = BLOCKS * len(PROMPTS)

ROW = 1 << 19
"""Bytes of a block."""

FLIPPED = 64
"""Bytes of each block that are damaged."""

DEADLINE = 1.0
"""Seconds for which a request waits for a tier."""

SLACK = 5.0
"""Seconds that a busy machine may take besides what it took before."""

TICK_SECONDS = 0.2
"""An engine that begins sooner after its model's files have changed cannot trust them."""

AGAIN_SECONDS = 30.0
"""Seconds within which a store that answers again is used again."""


def disk(folder: Path, capacity: str = "64MiB") -> dict[str, Any]:
    """A disk of kvpact's."""
    return {"type": "PactTier", "url": f"disk://{folder}?capacity={capacity}"}


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvpact/*.slab"))


def in_memory(prompts: int) -> int:
    """Bytes of host memory in which so many prompts have room."""
    return prompts * BLOCKS * ROW


def flip_bytes_of_files(folder: Path) -> int:
    """In the middle of each file of vLLM's own tier; returns how many there are."""
    paths = [*folder.rglob("*.bin")]
    for path in paths:
        raw = bytearray(path.read_bytes())
        start = len(raw) // 2
        raw[start : start + FLIPPED] = bytes(byte ^ 0xFF for byte in raw[start : start + FLIPPED])
        path.write_bytes(raw)
    return len(paths)


@pytest.mark.proof
def test_blocks_on_a_disk_outlive_a_kill(offloading: Offloading, references: References, tmp_path: Path) -> None:
    engine = offloading.engine(SPEC, [disk(tmp_path / "kv")])
    ask(engine, references, PROMPTS, BLOCKS, 0)
    wait_until(engine, "written_blocks", STORED)
    engine.kill()
    assert offloading.blocks("load") == 0
    engine = offloading.engine(SPEC, [disk(tmp_path / "kv")])
    ask(engine, references, PROMPTS, BLOCKS, ALL)
    assert offloading.blocks("load") == STORED
    assert offloading.lines("mistakes") == []


@pytest.mark.proof
def test_h22_damaged_blocks_are_read_once_computed_and_stored_again(
    offloading: Offloading, references: References, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, blocks = [*PROMPTS][:2], 2 * BLOCKS  # a third broken word, and the tier would be left alone for a while
    all_blocks = all_of(blocks)
    ours, theirs = disk(tmp_path / "kv"), {"type": "fs", "root_dir": str(tmp_path / "files")}
    engine = offloading.engine(SPEC, [ours, theirs])
    ask(engine, references, numbers, blocks, 0)
    wait_until(engine, "written_blocks", STORED)
    engine.stop()
    (slab,) = slabs(tmp_path / "kv")
    surgery = SlabSurgery(slab)
    assert surgery.flip_bytes_of_all(FLIPPED) == flip_bytes_of_files(tmp_path / "files") == STORED
    surgery.write()

    engine = offloading.engine(SPEC, [ours])
    ask(engine, references, numbers, blocks, 0)
    assert offloading.blocks("load") == 0
    wait_until(engine, "written_blocks", STORED)
    ask(engine, references, numbers, blocks, all_blocks)
    wait_until(engine, "damaged_records", STORED)
    assert failed_promotions(engine) == len(numbers), "none is read twice"
    assert metric(engine, "read_blocks") == 0, "the answers come from host memory"
    engine.stop()

    engine = offloading.engine(SPEC, [ours])
    ask(engine, references, numbers, blocks, all_blocks)
    wait_until(engine, "read_blocks", STORED)
    engine.stop()
    assert not verify_slab(slab).damaged
    assert offloading.lines("mistakes") == []

    engine = offloading.engine(SPEC, [theirs])
    outputs = {number: asked(engine, number, blocks) for number in numbers}
    served = sum(output.cached_tokens for output in outputs.values()) // all_of(1)
    wrong = [number for number, output in outputs.items() if not references.agree(prompt(number, blocks), output)]
    with capsys.disabled():
        print(f"\nvLLM's fs: {served} of {STORED} damaged blocks served, {len(wrong)} of {len(outputs)} answers wrong")


def overwrite_weights(model: Path) -> None:
    """Other values, so other keys and values of each token, under the same names."""
    from safetensors.torch import load_file, save_file

    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    save_file(
        {name: -tensor if "v_proj" in name else tensor for name, tensor in tensors.items()}, path, {"format": "pt"}
    )


@pytest.mark.proof
def test_h32_nothing_of_other_weights_or_from_before_a_reset_is_served(
    offloading: Offloading, references: References, tiny_model: Path, tmp_path: Path
) -> None:
    model, tiers = tmp_path / "model", [disk(tmp_path / "kv")]
    shutil.copytree(tiny_model, model)
    time.sleep(TICK_SECONDS)
    engine = offloading.engine(SPEC, tiers, model=model)
    ask(engine, references, PROMPTS, BLOCKS, 0)
    wait_until(engine, "written_blocks", STORED)
    engine.reset_prefix_cache(reset_connector=True)
    ask(engine, references, PROMPTS, BLOCKS, 0)
    assert offloading.blocks("load") == 0
    ask(engine, references, PROMPTS, BLOCKS, ALL)
    engine.stop()

    engine = offloading.engine(SPEC, tiers, model=model)
    ask(engine, references, PROMPTS, BLOCKS, ALL)
    wait_until(engine, "read_blocks", STORED)
    engine.stop()

    loads = offloading.blocks("load")
    overwrite_weights(model)
    time.sleep(TICK_SECONDS)
    engine = offloading.engine(SPEC, tiers, model=model)
    computed = [asked(engine, number, BLOCKS) for number in PROMPTS]
    assert [output.cached_tokens for output in computed] == [0] * len(PROMPTS)
    assert not any(references.agree(prompt(*each), output) for each, output in zip(ASKED, computed, strict=True))
    assert offloading.blocks("load") == loads
    assert offloading.lines("mistakes") == []


ASKED = [(number, BLOCKS) for number in PROMPTS]


def seconds_of(engine: EngineProcess, references: References, number: int) -> float:
    """What a request takes of which nothing comes from outside."""
    began = time.monotonic()
    output = asked(engine, number, BLOCKS)
    took = time.monotonic() - began
    assert output.cached_tokens == 0
    assert references.agree(prompt(number, BLOCKS), output)
    return took


def until_loaded(engine: EngineProcess, references: References, numbers: list[int]) -> None:
    """A store that is there again is used again: ask prompts until one comes from it."""
    left = iter(numbers)
    until(lambda: ask(engine, references, [next(left)], BLOCKS) == [ALL], AGAIN_SECONDS, "used again", 1.0)


@pytest.mark.soak
def test_h58_a_redis_that_hangs_costs_the_deadline_and_no_more(
    offloading: Offloading, references: References, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        tiers = [{"type": "PactTier", "url": f"redis://{server.address}/0", "prepare_deadline": DEADLINE}]
        first, looked_up, again = [*PROMPTS], 8110, [*range(8111, 8115)]
        engine = offloading.engine(SPEC, tiers)
        cold = max(seconds_of(engine, references, number) for number in [*first, looked_up, *again])
        wait_until(engine, "written_blocks", BLOCKS * len([*first, looked_up, *again]))
        engine.stop()

        engine = offloading.engine(SPEC, tiers, memory=in_memory(2))
        ask(engine, references, first, BLOCKS, ALL)
        wait_until(engine, "read_blocks", STORED)

        server.pause()
        assert DEADLINE <= seconds_of(engine, references, first[0]) < DEADLINE + cold + SLACK
        server.go_on()
        until(lambda: engine.generate([prompt(8199, 0)], max_tokens=1) and failed_promotions(engine) == 1)
        until_loaded(engine, references, first[1:])

        server.pause()
        assert DEADLINE <= seconds_of(engine, references, looked_up) < DEADLINE + cold + SLACK
        assert failed_promotions(engine) == 1, "it was the lookup that hung"
        server.go_on()
        until_loaded(engine, references, again)

        assert offloading.lines("mistakes") == []
