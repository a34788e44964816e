"""Faults inside kvpact in a real engine: answers stay bit-identical, and the engine lives on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from faulty_engine import TIGHT_KV_BLOCKS, FaultyEngine
from references import References

from engines import BLOCK, prompt
from kvpact_testkit.demo.messages import Output

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SMALL, LARGE = 2, 4
"""Blocks of a prompt that is loaded synchronously, and of one that is loaded asynchronously: see `sync_load_budget`."""


DEADLINE = 1.0
"""As `FaultyEngine` sets `load_deadline`, in seconds."""

LOAD_FAULTS = ["cache.commit_external_match", "cache.end_step", "worker.start_loads", "engine.scatter"]
OTHER_FAULTS = [
    *("scheduler.on_new_request", "scheduler.prepare", "scheduler.end_step", "scheduler.request_finished"),
    *("scheduler.poll_idle", "scheduler.collect_stats", "cache.prepare_external_match"),
    *("cache.note_computed", "cache.request_finished", "worker.wait_for_layer_load", "worker.start_saves"),
    *("transfer.wait_for_layer", "transfer.wait_for_loads", "transfer.start_saves", "engine.gather"),
]


@pytest.fixture(autouse=True)
def whole_again(faulty_engine: FaultyEngine) -> Iterator[None]:
    """No test leaves a fault on."""
    yield
    faulty_engine.fail()


def assert_right(references: References, tokens: list[int], output: Output, reused: int | None = None) -> None:
    """The answer is what an engine without kvpact says with as many blocks from its own cache."""
    if reused is None:
        assert references.agree(tokens, output)
    else:
        assert output.same_answer(references.answer(tokens, reused))


@pytest.mark.parametrize("blocks", [SMALL, LARGE], ids=["sync", "async"])
def test_without_a_fault_it_is_kvpact(faulty_engine: FaultyEngine, references: References, blocks: int) -> None:
    tokens = prompt(500 + blocks, blocks)
    assert faulty_engine.ask(tokens).cached_tokens == 0
    again = faulty_engine.ask(tokens)
    assert again.cached_tokens == blocks * BLOCK
    assert_right(references, tokens, again)


@pytest.mark.parametrize("first_failed", [0, 1, 3])
def test_a_failed_asynchronous_load_is_recomputed_from_there(
    faulty_engine: FaultyEngine, references: References, first_failed: int
) -> None:
    tokens = prompt(510 + first_failed, LARGE)
    faulty_engine.ask(tokens)
    faulty_engine.fail(f"transfer.fault.{first_failed}")
    struck = len(faulty_engine.raised)
    assert_right(references, tokens, faulty_engine.ask(tokens), reused=first_failed)
    assert len(faulty_engine.raised) == struck + LARGE - first_failed, "H09: it is tried once"
    faulty_engine.fail()
    again = faulty_engine.ask(tokens)
    assert again.cached_tokens == LARGE * BLOCK, "what failed is gone and was stored anew"
    assert_right(references, tokens, again)


@pytest.mark.parametrize("fault", ["transfer.fault.0", "transfer.fault.3", "engine.scatter"])
@pytest.mark.parametrize("blocks", [SMALL, LARGE], ids=["sync", "async"])
def test_h75_hits_are_what_was_not_computed_after_a_failed_load(
    faulty_engine: FaultyEngine, references: References, blocks: int, fault: str
) -> None:
    """The answer's own count, vLLM's counter and kvpact's. The fault by block strikes asynchronous loads alone."""
    tokens = prompt(700 + 10 * blocks + len(fault) + int(fault.endswith("3")), blocks)
    faulty_engine.ask(tokens)
    arrive = {"transfer.fault.0": 0, "transfer.fault.3": 3, "engine.scatter": 0}[fault]
    if blocks == SMALL and fault != "engine.scatter":
        arrive = SMALL
    hits = faulty_engine.process.metrics()["vllm:external_prefix_cache_hits"]
    faulty_engine.fail(fault)
    output = faulty_engine.ask(tokens)
    faulty_engine.fail()
    assert_right(references, tokens, output, reused=arrive)
    assert output.cached_tokens == arrive * BLOCK
    assert faulty_engine.process.metrics()["vllm:external_prefix_cache_hits"] - hits == output.cached_tokens
    assert faulty_engine.plans[-1].used == output.cached_tokens


@pytest.mark.parametrize("blocks", [SMALL, LARGE], ids=["sync", "async"])
@pytest.mark.parametrize("fault", LOAD_FAULTS)
def test_h28_nothing_of_a_load_that_failed_stays_anywhere(
    faulty_engine: FaultyEngine, references: References, fault: str, blocks: int
) -> None:
    seed = 530 + 10 * LOAD_FAULTS.index(fault) + blocks
    stem, longer = prompt(seed, blocks), [*prompt(seed, blocks)[: blocks * BLOCK], *prompt(seed + 1, 2)]
    faulty_engine.ask(stem)
    faulty_engine.fail(fault)
    assert_right(references, longer, faulty_engine.ask(longer), reused=0)
    assert fault in faulty_engine.raised
    faulty_engine.fail()
    assert_right(
        references, longer, faulty_engine.ask(longer, keep_local=True)
    )  # from what the engine now has by itself
    faulty_engine.ask(longer)
    again = faulty_engine.ask(longer)
    assert again.cached_tokens == (blocks + 2) * BLOCK
    assert_right(references, longer, again)


@pytest.mark.proof
def test_h13_an_exception_in_any_hook_costs_a_hit_never_the_engine(
    faulty_engine: FaultyEngine, references: References
) -> None:
    loaded = prompt(600, SMALL)
    faulty_engine.ask(loaded)
    for number, fault in enumerate(OTHER_FAULTS):
        fresh = prompt(601 + number, SMALL)
        faulty_engine.fail(fault)
        for tokens in (loaded, fresh):
            output = faulty_engine.ask(tokens)
            assert any(output.same_answer(references.answer(tokens, reused)) for reused in (0, SMALL)), fault
        assert fault in faulty_engine.raised
        faulty_engine.fail()
        for tokens in (loaded, fresh):
            faulty_engine.ask(tokens)
            again = faulty_engine.ask(tokens)
            assert again.cached_tokens == SMALL * BLOCK, fault
            assert_right(references, tokens, again)
    assert "the engine goes on without it (logged once)" in faulty_engine.process.log.read_text()


def test_h13_a_hook_that_always_fails_leaves_their_core_to_others(
    faulty_engine: FaultyEngine, references: References
) -> None:
    """What this engine waits for never ends. The other engine's worker is bound to the same core."""
    tokens = prompt(650, SMALL)
    faulty_engine.fail("cache.apply_report")
    output = faulty_engine.ask(tokens)
    assert_right(references, tokens, output)
    deadline, steps = time.monotonic() + 30.0, -1
    while steps != len(faulty_engine.raised):
        assert time.monotonic() < deadline, "it steps for ever"
        steps = len(faulty_engine.raised)
        time.sleep(0.3)
    faulty_engine.fail()
    faulty_engine.ask(tokens)
    again = faulty_engine.ask(tokens)
    assert again.cached_tokens == SMALL * BLOCK
    assert_right(references, tokens, again)


@pytest.mark.parametrize(
    ("blocks", "local"),
    [
        pytest.param(SMALL, 0, marks=pytest.mark.soak, id="sync, nothing local"),
        pytest.param(SMALL, 1, id="sync, a local hit"),
        pytest.param(LARGE, 0, marks=pytest.mark.soak, id="async, nothing local"),
        pytest.param(LARGE, 1, marks=pytest.mark.soak, id="async, a local hit"),
    ],
)
def test_h07_h10_h74_a_copy_that_hangs_for_ever_costs_its_request_the_deadline(
    faulty_engine: FaultyEngine, references: References, blocks: int, local: int
) -> None:
    """Meanwhile others are served; only what loads within the step has everybody wait, once."""
    seed = 800 + 10 * blocks + 5 * local
    tokens, other, later = prompt(seed, blocks + local), prompt(seed + 1, 1), prompt(seed + 2, LARGE)
    free, small = TIGHT_KV_BLOCKS - 1, prompt(seed + 3, 1)
    began = time.monotonic()
    faulty_engine.ask(tokens)
    compute_seconds = time.monotonic() - began
    faulty_engine.ask(small)
    if local:
        faulty_engine.fail("cache.prepare_external_match")
        faulty_engine.ask(tokens[: local * BLOCK + 1], max_tokens=1)
    faulty_engine.fail("engine.scatter.hang")
    overdue = faulty_engine.count("overdue_loads")
    began = time.monotonic()
    hangs, beside = faulty_engine.process.generate([tokens, other], max_tokens=4)
    seconds = time.monotonic() - began
    assert DEADLINE <= seconds < DEADLINE + 3 * compute_seconds + 0.5
    assert references.agree(tokens, hangs)
    assert hangs.cached_tokens <= local * BLOCK, "nothing of the load counts"
    assert_right(references, other, beside, reused=0)
    if blocks == LARGE:
        assert beside.first_token_seconds < DEADLINE <= hangs.first_token_seconds
    for asked in (later, tokens):
        assert references.agree(asked, faulty_engine.ask(asked, keep_local=True))
    assert faulty_engine.free_blocks <= free - blocks, "the copy's blocks are nobody's"
    faulty_engine.fail()
    until = time.monotonic() + 20.0
    while faulty_engine.free_blocks != free:  # as of the last step, which may have heard of no save's end
        assert time.monotonic() < until, "the copy has ended"
        faulty_engine.ask(small, keep_local=True)
    assert faulty_engine.count("leases_held") == 0
    assert faulty_engine.count("overdue_loads") - overdue == 1, "nobody waited behind the copy"
    again = faulty_engine.ask(tokens)
    assert again.cached_tokens >= blocks * BLOCK, "what is stored is not at fault"
    assert_right(references, tokens, again, reused=again.cached_tokens // BLOCK)


def test_h82_an_engine_with_kvpact_uses_the_network_for_nothing_of_kvpact(faulty_engine: FaultyEngine) -> None:
    assert faulty_engine.raised, "the engine has been at work"
    assert not (faulty_engine.control / "network").exists()
