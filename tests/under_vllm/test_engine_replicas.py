"""Two real engines with one configuration, and so one directory: what each stores both find, also after a restart.

The engines live twice: one comes while the other has all of the directory, both answer; one is killed and one is
stopped; then they start in the other order. The tests read what was seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, IN_ONE_PROCESS, kvpact_transfer_config, prompt
from kvpact.tiers.disk.inspection import SlabSummary, scan_directory, verify_slab
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from slab_scenes import files_in

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]

CAPACITY = 64 << 20
"""Less than one step of growth: the first engine takes all of it with its first block."""

BLOCKS = 6
MINE, YOURS = ([prompt(seed, BLOCKS) for seed in range(first, first + 4)] for first in (3000, 3100))
SEEN_S = 2.5
"""Seconds in which engines see what others have stored, and make room for them: they look every second."""


@dataclass
class Story:
    """What was seen."""

    computed: dict[str, list[Output]] = field(default_factory=dict)
    """The answers of the engine that computed a prompt first, to `MINE` and `YOURS`, from its own prefix cache."""
    from_neighbour: dict[str, list[Output]] = field(default_factory=dict)
    after_restart: list[dict[str, list[Output]]] = field(default_factory=list)
    """Of the engine that was started first, and of the other."""
    slabs: list[list[SlabSummary]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of all files in the directory, every few milliseconds."""
    logs: str = ""


@contextmanager
def watched(directory: Path, sizes: list[int]) -> Iterator[None]:
    """Meanwhile `sizes` gets the bytes of all files in the directory."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            sizes.append(files_in(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def ask(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """With nothing in the engine's own prefix cache."""
    engine.reset_prefix_cache()
    return engine.generate(prompts)


def store(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """Compute these prompts; the answers from the engine's own prefix cache."""
    engine.reset_prefix_cache()
    assert [output.cached_tokens for output in engine.generate(prompts)] == [0] * len(prompts)
    return engine.generate(prompts)


@pytest.fixture(scope="module")
def story(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    place = tmp_path_factory.mktemp("replicas")
    directory = place / "slabs"
    transfer = kvpact_transfer_config(memory="64MiB", tiers=[f"disk://{directory}?capacity={CAPACITY}"])
    settings = EngineSettings(tiny_model, transfer, BLOCK_BY_BLOCK, IN_ONE_PROCESS)
    seen = Story()
    with ExitStack() as left, watched(directory, seen.sizes):

        def held(name: str) -> EngineProcess:
            """An engine that is to be started later, and loads vLLM's modules meanwhile."""
            engine = EngineProcess(settings, place / f"{name}.log", held=True)
            left.callback(engine.discard)
            return engine

        time.sleep(0.2)  # an engine that begins within a tick of the clock after its files changed cannot trust them
        first, second = held("first"), held("second")
        first.wait_ready()
        seen.computed["mine"] = store(first, MINE)
        time.sleep(SEEN_S)
        seen.slabs.append(scan_directory(directory))
        later = [held("second-again"), held("first-again")]
        second.wait_ready()
        time.sleep(SEEN_S)
        seen.computed["yours"] = store(second, YOURS)
        time.sleep(SEEN_S)
        seen.slabs.append(scan_directory(directory))
        seen.from_neighbour["mine"] = ask(second, MINE)
        seen.from_neighbour["yours"] = ask(first, YOURS)
        first.kill()
        second.stop()
        for engine in later:
            engine.wait_ready()
            time.sleep(SEEN_S)
            seen.after_restart.append({"mine": ask(engine, MINE), "yours": ask(engine, YOURS)})
        seen.slabs.append(scan_directory(directory))
    seen.logs = "\n".join(log.read_text() for log in place.glob("*.log"))
    yield seen
    assert [path for path in directory.glob("kvpact/*.slab") if verify_slab(path).damaged] == []


def reused(outputs: Sequence[Output], computed: Sequence[Output]) -> list[int]:
    """Blocks that each answer reused; each must be bit for bit the one from the engine's own prefix cache."""
    assert all(output.same_answer(other) for output, other in zip(outputs, computed, strict=True))
    return [output.cached_tokens // BLOCK for output in outputs]


def test_each_stores_and_finds_what_the_other_has_stored(story: Story) -> None:
    for whose, outputs in story.from_neighbour.items():
        assert reused(outputs, story.computed[whose]) == [BLOCKS] * 4
    assert [len(slabs) for slabs in story.slabs] == [1, 2, 2]
    assert all(slab.in_use_by and slab.blocks for slab in story.slabs[1])


def test_h59_both_find_what_both_had_after_a_restart_in_the_other_order(story: Story) -> None:
    for outputs in story.after_restart:
        for whose in ("mine", "yours"):
            assert reused(outputs[whose], story.computed[whose]) == [BLOCKS] * 4
    assert "failed and is paused" not in story.logs, "no breaker opened"


def test_h50_the_directory_keeps_to_its_capacity_and_is_shared_out(story: Story) -> None:
    assert max(story.sizes) <= CAPACITY
    alone, shared, again = ([slab.file_bytes for slab in slabs] for slabs in story.slabs)
    assert alone[0] > CAPACITY // 2, "one engine has all"
    assert max(shared) <= CAPACITY // 2
    assert max(again) <= CAPACITY // 2
    assert "serving without the tier" not in story.logs
