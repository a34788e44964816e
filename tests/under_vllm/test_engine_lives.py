"""A real engine on one slab through three lives: filled, killed twice, damaged. Every reused answer is identical.

An engine takes longer to start than all that these tests do with it, so the lives are lived once and the tests read
what was seen.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from references import References
from slab_surgery import SlabSurgery

from engines import BLOCK, BLOCK_BY_BLOCK, IN_ONE_PROCESS, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact.tiers.disk.inspection import VerifyReport, verify_slab
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from leftovers import named_shared_memory, orphaned_shared_memory, shared_memory, slabs_still_locked

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # the lives are lived in the first test's set-up

BLOCKS = 6
ASKED = [prompt(seed, BLOCKS) for seed in range(100, 108)]
KILLS = 2
INTERRUPTED = [[prompt(1000 * number + seed, 4) for seed in range(8)] for number in range(KILLS)]
"""What each killed life was answering."""


@dataclass
class Life:
    """What was seen of one life."""

    asked: list[Output] = field(default_factory=list)
    """To `ASKED`, right after the start."""
    local_hits: list[Output] = field(default_factory=list)
    """To `ASKED` again, from the engine's own prefix cache."""
    memory_hits: list[Output] = field(default_factory=list)
    """To `ASKED` again, from kvpact's memory, the engine's own cache dropped."""
    resumed: list[Output] = field(default_factory=list)
    """To what the life before was answering when it was killed: some of those blocks reached the disk, some did not."""
    stats: dict[str, float] = field(default_factory=dict)
    blocks_found: int = 0
    processes_left: dict[int, str] = field(default_factory=dict)
    memory_left: set[str] = field(default_factory=set)
    locks_left: list[Path] = field(default_factory=list)
    report: VerifyReport | None = None


@dataclass
class Lives:
    """The lives in order, the last one on a damaged slab, and what damage each prompt had left to reuse."""

    lives: list[Life] = field(default_factory=list)
    reusable_blocks: list[int] = field(default_factory=list)
    injuries: int = 0


def live(model: Path, place: Path, number: int, *, killed: bool) -> Life:
    """One life, ended by SIGKILL in the middle of its answers or in order. One that is not killed is in one process."""
    life, before = Life(), shared_memory()
    slabs = place / "slabs"
    transfer = kvpact_transfer_config(
        memory="128MiB", tiers=[f"disk://{slabs}?capacity=256MiB"], stats_file=str(place / f"stats-{number}.json")
    )
    # H25: no life hashes like another.
    environment = {"PYTHONHASHSEED": str(number + 1), **({} if killed else IN_ONE_PROCESS)}
    settings = EngineSettings(model, transfer, BLOCK_BY_BLOCK, environment)
    log = place / f"engine-{number}.log"
    kind = ForkedEngine if number else EngineProcess  # vLLM starts the first one as it starts any on CPUs
    with kind(settings, log).wait_ready() as engine:
        (line,) = [line for line in log.read_text().splitlines() if "disk tier: " in line and " holds " in line]
        life.blocks_found = int(line.split(" holds ")[1].split()[0])
        life.asked = engine.generate(ASKED)
        life.local_hits = engine.generate(ASKED)
        engine.reset_prefix_cache()
        life.memory_hits = engine.generate(ASKED)
        life.resumed = engine.generate(INTERRUPTED[number - 1]) if number else []
        if killed:
            life.stats = rest(engine)
            engine.send_prompts(INTERRUPTED[number], max_tokens=8)
            time.sleep(random.Random(os.urandom(8)).uniform(0.05, 1.0))
            segments = named_shared_memory(engine.processes())
            engine.kill()
            for path in segments:
                path.unlink(missing_ok=True)  # vLLM's own, left with kvpact or without
    if not killed:
        life.stats = engine.stats()
    life.processes_left = engine.processes()
    life.memory_left = orphaned_shared_memory(before)
    life.locks_left = slabs_still_locked(slabs)
    (slab,) = slabs.glob("kvpact/*.slab")
    life.report = verify_slab(slab)
    return life


def rest(engine: EngineProcess, seconds: float = 20.0) -> dict[str, float]:
    """Wait until nothing is left to write; the counts then."""
    until = time.monotonic() + seconds
    before: dict[str, float] = {}
    while time.monotonic() < until:
        stats = engine.stats()
        if stats and stats == before and not stats['queued_write_bytes{tier="disk"}'] and not stats["leases_held"]:
            return stats
        before = stats
        time.sleep(0.25)
    raise AssertionError(f"the cache does not come to rest: {before}")


@pytest.fixture(scope="module")
def lives(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Two lives that are killed, one that is left with a damaged slab."""
    place = tmp_path_factory.mktemp("lives")
    story = Lives()
    for number in range(KILLS):
        story.lives.append(live(tiny_model, place, number, killed=True))
    (slab,) = (place / "slabs").glob("kvpact/*.slab")
    surgery = SlabSurgery(slab)
    surgery.flip_payload_bit(ASKED[1], 3)
    surgery.flip_header_bit(ASKED[2], 2)
    surgery.fill_with_garbage(ASKED[3], 4)
    surgery.swap_payloads((ASKED[4], 1), (ASKED[5], 5))
    last = max(((asked, block) for asked in ASKED for block in range(BLOCKS)), key=lambda it: surgery.slot(*it))
    lost = surgery.cut_before(*last)
    injured = {(1, 3), (2, 2), (3, 4), (4, 1), (5, 5)}
    lost |= {surgery.key(ASKED[number], block) for number, block in injured}
    story.injuries = len(injured)
    story.reusable_blocks = [surgery.prefix_without(asked, lost) for asked in ASKED]
    surgery.write()
    story.lives.append(live(tiny_model, place, KILLS, killed=False))
    return story


def test_what_was_computed_once_is_loaded_from_memory_bit_for_bit_as_the_engines_own_hit(lives: Lives) -> None:
    for life in lives.lives:
        assert [output.cached_tokens for output in life.memory_hits] == [BLOCKS * BLOCK] * len(ASKED)
        pairs = zip(life.memory_hits, life.local_hits, strict=True)
        assert all(warm.same_answer(local) for warm, local in pairs)


def test_h25_h59_after_a_kill_every_prompt_is_loaded_from_disk_bit_for_bit(lives: Lives) -> None:
    computed = lives.lives[0]
    assert [output.cached_tokens for output in computed.asked] == [0] * len(ASKED)
    for life in lives.lives[1:KILLS]:
        assert life.blocks_found >= BLOCKS * len(ASKED)
        assert [output.cached_tokens for output in life.asked] == [BLOCKS * BLOCK] * len(ASKED)
        pairs = zip(life.asked, computed.local_hits, strict=True)
        assert all(warm.same_answer(local) for warm, local in pairs)
        on_disk = sum(output.cached_tokens for output in (*life.asked, *life.resumed)) // BLOCK
        assert life.stats['read_blocks{tier="disk"}'] == on_disk  # no payload is read at the start


def test_what_a_killed_engine_was_answering_is_answered_right(lives: Lives, references: References) -> None:
    for life, interrupted in zip(lives.lives[1:], INTERRUPTED, strict=True):
        assert len(life.resumed) == len(interrupted)
        for asked, output in zip(interrupted, life.resumed, strict=True):
            assert references.agree(asked, output)


def test_after_kill_9_nothing_is_left_and_no_record_would_have_been_served_damaged(lives: Lives) -> None:
    for life in lives.lives[:KILLS]:
        assert life.processes_left == {}
        assert life.memory_left == set()
        assert life.locks_left == []
        assert life.report is not None
        assert life.report.damaged == []
        assert life.report.sound >= BLOCKS * len(ASKED)


def test_the_accounts_agree_and_nothing_is_held(lives: Lives) -> None:
    for life in lives.lives:
        stats = life.stats
        assert stats["leases_held"] == stats["hook_errors"] == stats["refused_counts"] == 0
        counts = [stats[f"{name}_tokens"] for name in ("promised", "committed", "loaded", "used")]
        assert counts == sorted(counts, reverse=True)
        loaded_from_outside = sum(output.cached_tokens for output in (*life.asked, *life.memory_hits, *life.resumed))
        assert stats["used_tokens"] == loaded_from_outside


def test_h22_damaged_blocks_are_misses_and_the_answers_stay_right(lives: Lives, references: References) -> None:
    life = lives.lives[KILLS]
    assert [output.cached_tokens // BLOCK for output in life.asked] == lives.reusable_blocks
    assert lives.reusable_blocks[1:6] <= [3, 2, 4, 1, 5]
    for asked, output in zip(ASKED, life.asked, strict=True):
        assert references.agree(asked, output)


def test_h22_damage_is_counted_and_quarantined(lives: Lives) -> None:
    life = lives.lives[KILLS]
    # The cut end loses records, too; a block behind another injured one of its prompt is dropped without being read.
    assert life.stats['damaged_records{tier="disk"}'] >= lives.injuries
    assert life.report is not None
    assert life.report.damaged == []  # what was damaged is gone, and stored anew
    assert life.report.sound >= BLOCKS * len(ASKED)
