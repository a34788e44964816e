"""For how many steps a postponed promise should be kept: what is read again from disk, on the embedded engine.

120 requests of 192 tokens, 160 of which are on disk, arrive faster than the engine has KV blocks for them; 60 % of them
share six documents. Four sizes of KV memory and arena, three draws each. Prints sums as a table in Markdown.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.identity.groups import one_group
from kvpact.identity.keys import Namespace
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.tiers.disk.tier import DiskTier
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, Request, SimulatedWorker
from kvpact_testkit.engine.engine import StepClock
from kvpact_testkit.tier.stepped_executor import SteppedExecutor

REQUESTS, STORED_TOKENS, TAIL_TOKENS = 120, 160, 32
SHARED_DOCUMENTS, SHARE = 6, 0.6
SLOT_BYTES = 4096
DISK_BYTES = 16 << 20
SIZES = ((60, 60, 3), (60, 120, 3), (80, 40, 2), (120, 80, 1))
"""The engine's blocks, the arena's slots, and mean steps between two arrivals, each."""
FOREVER = 1 << 30
STEPS = (1, 2, 4, 8, 16, 32, 48, 64, FOREVER)
NAMESPACE = Namespace({"model": "benchmark"})
COLUMNS = ("steps kept", "engine steps", "plans", "blocks read", "tokens loaded", "tokens computed", "blocks not saved")


def prompt(length: int, seed: int) -> list[int]:
    """Prompts of different seeds share no block."""
    return [(seed + 1) * 10_007 + position for position in range(length)]


def run(directory: Path, kept: int, seed: int, blocks: int, slots: int, arrival_steps: int) -> Counter[str]:
    """One draw of requests, from an engine that has served all documents once."""
    random = Random(seed)
    segment, clock = ArenaSegment.create(slots, SLOT_BYTES), StepClock()
    disk = SteppedExecutor(DiskTier.open(directory, NAMESPACE, SLOT_BYTES, DISK_BYTES), 1 << 30)
    config = EngineConfig(num_blocks=blocks, max_running=16, max_tokens_per_step=2048)
    cache = PactCache(
        load_config({"recompute_if_faster": False, "prepare_deadline": "5s"}, {}),
        EngineKV(NAMESPACE.digest, one_group(config.block_size)),
        arena=Arena([segment]),
        tiers=[disk],
        clock=clock,
    )
    cache.ledger.postponed_steps = kept
    engine = Engine(config, EngineQuirks.native(), cache, [SimulatedWorker(0, segment.slot_view)], clock)

    def step_until_idle() -> None:
        while engine.has_work:
            engine.step()
            disk.advance()

    shared = [number for number in range(REQUESTS) if random.random() < SHARE]
    document = {number: number for number in range(REQUESTS)} | {
        number: random.randrange(SHARED_DOCUMENTS) for number in shared
    }
    for seed_of in sorted(set(document.values())):
        engine.add_request(Request("first", prompt(STORED_TOKENS + 1, seed_of)))
        step_until_idle()
    engine.scheduler.kv.pool.unpublish_all()
    before, read_before, arrival = engine.counts.steps, cache.observe()['read_blocks{tier="disk"}'], engine.counts.steps
    computed, dropped = engine.counts.computed, cache.observe()["dropped_blocks"]
    plans = cache.ledger.totals.plans_opened
    for number in range(REQUESTS):
        arrival += random.randrange(2 * arrival_steps)
        tokens = prompt(STORED_TOKENS, document[number]) + prompt(TAIL_TOKENS, REQUESTS + number)
        engine.add_request(Request(f"r{number}", tokens, random.randrange(8, 96), arrival_step=arrival))
    step_until_idle()
    shot = cache.observe()
    engine.check_nothing_held()
    figures = (
        engine.counts.steps - before,
        cache.ledger.totals.plans_opened - plans,
        int(shot['read_blocks{tier="disk"}'] - read_before),
        engine.counts.external_hits,
        engine.counts.computed - computed,
        int(shot["dropped_blocks"] - dropped),
    )
    engine.shutdown()
    segment.close()
    return Counter(dict(zip(COLUMNS[1:], figures, strict=True)))


def main() -> None:
    """Keep postponed promises for so many steps, and add up what it costs."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for steps in STEPS:
        total: Counter[str] = Counter()
        for sizes in SIZES:
            for seed in range(3):
                with TemporaryDirectory() as directory:
                    total += run(Path(directory), steps, seed, *sizes)
        kept = "for ever" if steps == FOREVER else str(steps)
        print(f"| {kept} | {' | '.join(f'{total[name]:,}' for name in COLUMNS[1:])} |")


if __name__ == "__main__":
    main()
