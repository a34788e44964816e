"""Too many requests for too few KV blocks and too slow a disk, on real engines: all end, all plans add up, none stays.

`make proofs` runs the short form and `make soak` the long one, which prints what stands in benchmarks/RESULTS.md.
The same with two ranks is in `test_tensor_parallel.py`.
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
from spread import answers_apart, blocks_apart, nearest_wrong_block, saved_blocks, texts

from engines import BLOCK, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings
from kvpact_testkit.demo.phases import settle

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


# Proofs, and their long forms

TOKEN_COUNTS = [
    f"{name}_tokens" for name in ("promised", "committed", "loaded", "failed", "used", "used_again", "withdrawn")
]


def show(what: str, **figures: object) -> None:
    """For benchmarks/RESULTS.md; without and with kvpact where there are two numbers."""
    print(f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))


BLIND = "cache.prepare_external_match"
"""While this fails, nothing is loaded; what is computed is saved all the same."""

IN_CI = [pytest.mark.proof, pytest.mark.timeout(900)]

ROUNDING = 1e-5
"""What the spread counts as if it is less: ten roundings of a float32 between 8 and 16. With AVX-512 small batches give
equal results, and larger ones differ by 4e-6."""

AS_RIGHT = 4.0
"""How much further apart a right result may be than those of two runs that load nothing. They are a sample of what
other batches do; the nearest wrong block differs by 5."""

FAR = 100.0
"""How much further than that a wrong result must be, or the comparison would say nothing."""


@pytest.mark.parametrize(
    ("requests", "distinct"),
    [pytest.param(150, 50, marks=IN_CI), pytest.param(2000, 2000, marks=[pytest.mark.soak])],
)
def test_p1_p7_thousands_of_requests_under_pressure(
    tiny_model: Path, tmp_path: Path, requests: int, distinct: int
) -> None:
    """Twelve at a time in 24 KV blocks of 32 tokens; a third of the users is impatient, whoever runs is preempted.

    An engine with room for all computes the same, loading nothing: one after the other, and many at a time.
    """
    block, at_once, max_tokens = 32, 12, 20
    arguments = {
        "block_size": block,
        "num_gpu_blocks_override": TIGHT_KV_BLOCKS,
        "max_model_len": 12 * block,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "dtype": "float32",
    }
    roomy = {**arguments, "num_gpu_blocks_override": 16 * TIGHT_KV_BLOCKS}
    asked = crowd(2, requests, block, distinct=distinct)
    kinds = asked[:distinct]
    (tmp_path / "quiet").mkdir()
    quiet = FaultyEngine(
        tiny_model, tmp_path / "quiet", arguments=roomy, tiers=[f"disk://{tmp_path}/quiet/slabs?capacity=2GiB"]
    )
    with quiet.process.wait_ready():
        quiet.fail(BLIND)
        alone = quiet.process.generate(kinds, max_tokens=max_tokens, timeout=1800.0)
        together = quiet.process.generate(
            kinds, max_tokens=max_tokens, together=True, cache_salt="together", timeout=1800.0
        )
        rest(quiet)
        assert quiet.side_by_side == 8
    right = saved_blocks(quiet.slabs, texts(kinds, alone), block)
    batched = saved_blocks(quiet.slabs, texts(kinds, together), block, "together")
    blocks_spread = max(ROUNDING, blocks_apart(right, batched))
    answers_spread = max(ROUNDING, *map(answers_apart, alone, together))
    engine = FaultyEngine(tiny_model, tmp_path, arguments=arguments, memory="24MiB", sync_load_budget="512KiB")
    with engine.process.wait_ready():
        began = time.monotonic()
        answers = engine.process.crowd(
            asked, at_once=at_once, leaving=0.3, seed=2, max_tokens=max_tokens, timeout=3000.0
        )
        seconds = time.monotonic() - began
        stats, metrics, plans = rest(engine), engine.process.metrics(), engine.plans
    reasons = Counter(str(answer.finish_reason) for answer in answers)
    assert reasons.keys() == {"length", "abort"}
    check_plans(plans, stats)
    assert metrics["vllm:num_preemptions"] > 0
    assert stats["used_tokens"] > 0

    saved = saved_blocks(engine.slabs, texts(asked, answers), block)
    common = len(saved.keys() & right.keys())
    assert common >= 0.9 * len(saved), f"{len(saved) - common} of {len(saved)} blocks are of answers nobody else gave"
    assert len(saved) > distinct / 8
    assert FAR * AS_RIGHT * blocks_spread < nearest_wrong_block(right), "a wrong block could not be told apart"
    assert blocks_apart(saved, right) <= AS_RIGHT * blocks_spread

    known = {tuple(tokens): answer for tokens, answer in zip(kinds, alone, strict=True)}
    given = [(answer, known[tuple(tokens)]) for tokens, answer in zip(asked, answers, strict=True) if answer.tokens]
    assert FAR * AS_RIGHT * answers_spread < min(map(answers_apart, alone, alone[1:])), "nor could a wrong answer"
    max_computed = max(answers_apart(*pair) for pair in given)
    assert max_computed <= AS_RIGHT * answers_spread
    show(
        "pressure",
        requests=requests,
        seconds=round(seconds),
        **reasons,
        preemptions=metrics["vllm:num_preemptions"],
        plans=dict(Counter(plan.state for plan in plans)),
        blocks_compared=common,
        blocks_apart=[blocks_spread, blocks_apart(saved, right), nearest_wrong_block(right)],
        answers_apart=[answers_spread, max_computed, min(map(answers_apart, alone, alone[1:]))],
        **{name: stats[name] for name in TOKEN_COUNTS},
        leases_held=stats["leases_held"],
    )


SIDE_BY_SIDE = {"max_num_seqs": 8, "max_num_batched_tokens": 8 * BLOCK, "dtype": "float32"}


@pytest.mark.parametrize(
    ("requests", "distinct"),
    [pytest.param(60, 20, marks=IN_CI), pytest.param(200, 40, marks=[pytest.mark.soak])],
)
def test_p11_more_requests_than_run_at_once_on_a_slow_disk(
    tiny_model: Path, tmp_path: Path, requests: int, distinct: int
) -> None:
    """The disk takes 50 ms more for each operation, and memory is too small for what is asked; eight run at once."""
    prepare_deadline, load_deadline = 2.0, 1.0
    arguments = {**SIDE_BY_SIDE, "num_gpu_blocks_override": 2 * TIGHT_KV_BLOCKS, "max_model_len": 8 * BLOCK}
    asked = crowd(3, requests, stems=16, distinct=distinct)
    kinds = asked[:distinct]
    with ForkedEngine(EngineSettings(tiny_model, arguments=arguments), tmp_path / "plain.log").wait_ready() as plain:
        alone = plain.generate(kinds, timeout=600.0)
        plain.reset_prefix_cache()
        computed = plain.crowd(asked, timeout=1800.0)
        other_block = prompt(9, 1, tail=0)
        spoilt = plain.generate([[*tokens[:BLOCK], *other_block, *tokens[2 * BLOCK :]] for tokens in kinds[:5]])
    right = {tuple(tokens): answer for tokens, answer in zip(kinds, alone, strict=True)}
    without = [answers_apart(answer, right[tuple(tokens)]) for tokens, answer in zip(asked, computed, strict=True)]
    spread = max(ROUNDING, *without)
    engine = FaultyEngine(
        tiny_model,
        tmp_path,
        arguments=arguments,
        memory="16MiB",
        prepare_deadline=f"{prepare_deadline}s",
        load_deadline=f"{load_deadline}s",
    )
    with engine.process.wait_ready():
        engine.process.generate(kinds, timeout=600.0)
        rest(engine)
        engine.fail(SLOW_DISK)
        answers = engine.process.crowd(asked, leaving=0.2, seed=3, timeout=1800.0)
        engine.fail()
        stats, plans = rest(engine), engine.plans
    reasons = Counter(str(answer.finish_reason) for answer in answers)
    assert reasons.keys() <= {"length", "abort"}
    assert engine.side_by_side == 8
    wrong = min(map(answers_apart, spoilt, alone))
    assert FAR * AS_RIGHT * spread < wrong, "one wrong block could not be told by the answer"
    given = [(answer, right[tuple(tokens)]) for tokens, answer in zip(asked, answers, strict=True) if answer.tokens]
    max_computed = max(answers_apart(*pair) for pair in given)
    assert max_computed <= AS_RIGHT * spread
    late = [
        answer.seconds - its.seconds
        for answer, its in zip(answers, computed, strict=True)
        if answer.seconds > its.seconds
    ]
    assert max(late, default=0.0) < prepare_deadline + load_deadline
    check_plans(plans, stats)
    assert stats['read_blocks{tier="disk"}'] > 0
    show(
        "overload",
        requests=requests,
        **reasons,
        side_by_side=engine.side_by_side,
        answers_apart=[max(without), max_computed, wrong],
        last_seconds=[round(max(answer.seconds for answer in one), 1) for one in (computed, answers)],
        median_seconds=[round(median(answer.seconds for answer in one), 1) for one in (computed, answers)],
        later=len(late),
        latest_by_seconds=round(max(late, default=0.0), 1),
        blocks_from_disk=stats['read_blocks{tier="disk"}'],
        **{name: stats[name] for name in TOKEN_COUNTS},
        leases_held=stats["leases_held"],
    )
