"""Too many requests for too few KV blocks and too slow a disk, on real engines: all end, all plans add up, none stays.

The short forms run on the shared engine, whose 24 KV blocks are tight; `make soak` runs the long ones and prints what
stands in benchmarks/RESULTS.md. The same with two ranks is in `test_tensor_parallel.py`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from faulty_engine import TIGHT_KV_BLOCKS, EndedPlan, FaultyEngine
from references import References

from engines import BLOCK, prompt
from kvpact.demo.engine import EngineProcess, EngineSettings, Output
from kvpact.demo.phases import settle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

SLOW_DISK = "tier.slow"


def crowd(
    seed: int, requests: int, block: int = BLOCK, *, stems: int = 8, distinct: int | None = None
) -> list[list[int]]:
    """Prompts of three to five blocks and a bit, which begin alike; the `distinct` ones come first, then some again."""
    choose = random.Random(seed)
    beginnings = [prompt(10_000 + 100 * seed + number, 5 * block // BLOCK + 1) for number in range(stems)]
    kinds = []
    for number in range(distinct or requests):
        tail = prompt(20_000 + 10_000 * seed + number, 0, choose.randrange(1, block))
        kinds.append([*choose.choice(beginnings)[: choose.randrange(3, 6) * block], *tail])
    return [*kinds, *choose.choices(kinds, k=requests - len(kinds))]


def rest(engine: FaultyEngine) -> dict[str, Any]:
    """The counts once all is done; the engine gives up its own prefix cache only if no block is held."""
    engine.process.reset_prefix_cache()
    return settle(engine.process)


def check_plans(plans: list[EndedPlan], stats: Mapping[str, Any]) -> None:
    """P1 and P7, for each plan and for their sum."""
    assert [plan for plan in plans if not plan.adds_up] == []
    assert stats["leases_held"] == stats["open_plans"] == stats["hook_errors"] == stats["refused_counts"] == 0
    for name in ("promised", "committed", "loaded", "failed"):
        assert stats[f"{name}_tokens"] == sum(getattr(plan, name) for plan in plans)


def test_p11_forty_requests_at_once_on_a_slow_disk(faulty_engine: FaultyEngine, references: References) -> None:
    """One runs at a time, a block a step, so that every answer is bit for bit that of a local prefix hit."""
    asked = crowd(1, 40, stems=12, distinct=20)
    faulty_engine.process.generate(asked[:20])
    before, plans = rest(faulty_engine), len(faulty_engine.plans)
    faulty_engine.fail(SLOW_DISK)
    answers = faulty_engine.process.crowd(asked, leaving=0.2, seed=1, timeout=120.0)
    faulty_engine.fail()
    assert Counter(answer.finish_reason for answer in answers).keys() <= {"length", "abort"}
    finished = [(tokens, answer) for tokens, answer in zip(asked, answers, strict=True) if answer.tokens]
    assert len(finished) > 25
    for tokens, answer in finished:
        assert answer.same_answer(references.answer(tokens, (len(tokens) - 1) // BLOCK))
    stats = rest(faulty_engine)
    ended = faulty_engine.plans[plans:]
    assert sum(plan.used > 0 for plan in ended) > 5
    assert stats['read_blocks{tier="disk"}'] > before['read_blocks{tier="disk"}'], "memory holds less than is asked"
    assert [plan for plan in ended if not plan.adds_up] == []
    assert stats["leases_held"] == stats["open_plans"] == 0
    assert stats["hook_errors"] == before["hook_errors"], "no invariant was broken on the way"


# Long forms

TOKEN_COUNTS = [
    f"{name}_tokens" for name in ("promised", "committed", "loaded", "failed", "used", "used_again", "withdrawn")
]


def show(what: str, **figures: object) -> None:
    """For benchmarks/RESULTS.md; without and with kvpact where there are two numbers."""
    print(f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))


@pytest.mark.soak
def test_p1_p7_two_thousand_requests_under_pressure(tiny_model: Path, tmp_path: Path) -> None:
    """Twelve at a time in 24 KV blocks of 32 tokens; a fifth of the users leave, whoever runs is preempted."""
    block, requests = 32, 2000
    arguments = {
        "block_size": block,
        "num_gpu_blocks_override": TIGHT_KV_BLOCKS,
        "max_model_len": 12 * block,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "dtype": "float32",
    }
    engine = FaultyEngine(tiny_model, tmp_path, arguments=arguments, memory="24MiB", sync_load_limit="512KiB")
    asked = crowd(2, requests, block)
    with engine.process.wait_ready():
        began = time.monotonic()
        answers = engine.process.crowd(asked, at_once=12, leaving=0.3, seed=2, max_tokens=20, timeout=3000.0)
        seconds = time.monotonic() - began
        stats, metrics, plans = rest(engine), engine.process.metrics(), engine.plans
        reasons = Counter(answer.finish_reason for answer in answers)
        assert reasons.keys() <= {"length", "abort"}
        check_plans(plans, stats)
        assert metrics["vllm:num_preemptions"] > 0
        assert stats["used_tokens"] > 0
        show(
            "pressure",
            requests=requests,
            seconds=round(seconds),
            **reasons,
            preemptions=metrics["vllm:num_preemptions"],
            plans=dict(Counter(plan.state for plan in plans)),
            **{name: stats[name] for name in TOKEN_COUNTS},
            leases_held=stats["leases_held"],
        )


ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": BLOCK, "dtype": "float32"}


@pytest.mark.soak
def test_p11_two_hundred_requests_at_once_on_a_slow_disk(tiny_model: Path, tmp_path: Path) -> None:
    """The disk takes 50 ms more for each operation, and memory is too small for what is asked."""
    requests, prepare_deadline, load_deadline = 200, 2.0, 1.0
    tight = {**ONE_AT_A_TIME, "num_gpu_blocks_override": TIGHT_KV_BLOCKS, "max_model_len": 8 * BLOCK}
    asked = crowd(3, requests, stems=16, distinct=40)
    with EngineProcess(EngineSettings(tiny_model, arguments=tight), tmp_path / "plain.log").wait_ready() as plain:
        hits: dict[tuple[int, ...], Output] = {}
        for tokens in asked[:40]:
            plain.generate([tokens])
            (hits[tuple(tokens)],) = plain.generate([tokens])
            assert hits[tuple(tokens)].cached_tokens == (len(tokens) - 1) // BLOCK * BLOCK
        plain.reset_prefix_cache()
        computed = plain.crowd(asked, timeout=1800.0)
    engine = FaultyEngine(
        tiny_model,
        tmp_path,
        arguments=tight,
        memory="24MiB",
        prepare_deadline=f"{prepare_deadline}s",
        load_deadline=f"{load_deadline}s",
    )
    with engine.process.wait_ready():
        engine.process.generate(asked[:40], timeout=600.0)
        rest(engine)
        engine.fail(SLOW_DISK)
        answers = engine.process.crowd(asked, leaving=0.2, seed=3, timeout=1800.0)
        engine.fail()
        stats, plans = rest(engine), engine.plans
    reasons = Counter(answer.finish_reason for answer in answers)
    assert reasons.keys() <= {"length", "abort"}
    different = [
        number
        for number, (tokens, answer) in enumerate(zip(asked, answers, strict=True))
        if answer.tokens and not answer.same_answer(hits[tuple(tokens)])
    ]
    assert different == []
    late = [
        answer.seconds - without.seconds
        for answer, without in zip(answers, computed, strict=True)
        if answer.seconds > without.seconds
    ]
    assert max(late, default=0.0) < prepare_deadline + load_deadline
    check_plans(plans, stats)
    assert stats['read_blocks{tier="disk"}'] > 0
    show(
        "overload",
        requests=requests,
        **reasons,
        not_identical=len(different),
        last_seconds=[round(max(answer.seconds for answer in one), 1) for one in (computed, answers)],
        median_seconds=[round(median(answer.seconds for answer in one), 1) for one in (computed, answers)],
        later=len(late),
        latest_by_seconds=round(max(late, default=0.0), 1),
        blocks_from_disk=stats['read_blocks{tier="disk"}'],
        **{name: stats[name] for name in TOKEN_COUNTS},
        leases_held=stats["leases_held"],
    )
