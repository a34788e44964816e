"""The oracle names every kind of wrong block: stale, torn, foreign, early; the request, the block, and what was
there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from workloads import prompt

from kvpact.identity.keys import RequestIdentity
from kvpact_testkit.engine import Engine, EngineConfig, OracleViolation, Request

CONFIG = EngineConfig(num_ranks=2, num_layers=2)


def running(config: EngineConfig = CONFIG, **changes: object) -> tuple[Engine, Request, list[int]]:
    """An engine with one request in the middle of its output, and that request's block ids."""
    engine = Engine(replace(config, **changes))  # type: ignore[arg-type]
    engine.run([Request("past", prompt(64, 7), 4, identity=RequestIdentity(salt="other tenant"))])
    request = engine.add_request(Request("victim", prompt(64), 40))
    for _ in range(3):
        engine.step()
    return engine, request, list(request.block_ids[0])


def slots(block: int) -> slice:
    return slice(block * 16, block * 16 + 16)


def test_undisturbed_everything_is_right() -> None:
    engine, _, _ = running()
    engine.run()
    assert engine.counts.wrong_reads == 0


def test_a_stale_block_is_named_with_what_it_was() -> None:
    engine, _, blocks = running()
    past = engine.finished["past"]
    stale = engine.runner.truth_of(past)[16:32]
    engine.runner.memory[:, slots(blocks[1])] = stale + engine.runner.masks[0][:, None]
    with pytest.raises(OracleViolation) as caught:
        engine.step()
    assert str(caught.value) == (
        f"request victim reads token 16 in block {blocks[1]} (group 0, rank 0, layer 0) and finds "
        "token 16 of request past as group 0, rank 0, layer 0 would hold it"
    )


def test_a_torn_block_is_named_by_rank_and_layer() -> None:
    engine, _, blocks = running()
    engine.runner.memory[3, blocks[2] * 16 + 8 : blocks[2] * 16 + 16] = 0
    with pytest.raises(OracleViolation, match=r"token 40 .*rank 1, layer 1\) and finds nothing: the slot was never"):
        engine.step()


def test_another_ranks_part_is_foreign() -> None:
    engine, _, blocks = running()
    memory = engine.runner.memory
    memory[0, slots(blocks[0])] = memory[2, slots(blocks[0])]
    with pytest.raises(OracleViolation, match="finds token 0 of request victim as group 0, rank 1, layer 0 would"):
        engine.step()


def test_the_same_tokens_at_another_place_are_foreign() -> None:
    engine = Engine(CONFIG)
    half = prompt(16)
    request = engine.add_request(Request("r", half + half, 10))
    engine.step()
    first, second = (slots(block) for block in request.block_ids[0][:2])
    engine.runner.memory[:, second] = engine.runner.memory[:, first]
    with pytest.raises(OracleViolation, match=r"reads token 16 .* finds token 0 of request r"):
        engine.step()


def test_flipped_bits_belong_to_nobody() -> None:
    engine, _, blocks = running()
    engine.runner.memory[1, blocks[0] * 16 + 5] ^= np.uint64(1 << 40)
    with pytest.raises(OracleViolation, match=r"token 5 .*which belongs to no request known here"):
        engine.step()


def test_an_early_publication_is_found_before_anybody_reads_it() -> None:
    engine = Engine(CONFIG)
    request = engine.add_request(Request("r", prompt(64), 10))
    engine.scheduler.schedule()
    engine.scheduler.kv.publish(request, 32)
    with pytest.raises(OracleViolation, match=r"P8: a published block is not valid: .* never written"):
        engine.check()


def test_the_incremental_oracle_finds_damage_at_the_end_at_the_latest() -> None:
    engine, _, blocks = running(oracle="incremental")
    engine.runner.memory[0, slots(blocks[1])] = 0
    engine.step()  # not looked at
    with pytest.raises(OracleViolation, match="reads token 16"):
        engine.run()


def test_the_incremental_oracle_looks_at_all_of_a_prefix_that_is_taken_over() -> None:
    engine, _, blocks = running(oracle="incremental")
    engine.runner.memory[0, slots(blocks[1])] = 0
    engine.add_request(Request("next", [*prompt(64), 1], 4))
    with pytest.raises(OracleViolation, match="request next reads token 16"):
        engine.step()


def test_the_incremental_oracle_sees_two_requests_in_one_block() -> None:
    engine = Engine(replace(CONFIG, oracle="incremental", num_blocks=5))
    first = engine.add_request(Request("first", prompt(20), 10))
    engine.step()
    given_twice = first.block_ids[0][1]
    engine.scheduler.kv.pool.free([given_twice])
    second = engine.add_request(Request("second", prompt(40, 1), 4))
    with pytest.raises(OracleViolation, match=r"request first reads .* finds token 3. of request second"):
        engine.run()
    assert second.block_ids[0][2] == given_twice


def test_recorded_instead_of_raised_a_wrong_read_changes_the_output() -> None:
    engine, request, blocks = running(on_violation="record")
    engine.runner.memory[0, slots(blocks[1])] = 0
    engine.run()
    assert engine.counts.wrong_reads > 0
    assert "request victim reads token 16" in engine.recorded[0]
    clean, right, _ = running()
    clean.run()
    assert request.output_token_ids != right.output_token_ids
    assert request.output_token_ids[:3] == right.output_token_ids[:3]


def test_out_of_the_window_nothing_is_read() -> None:
    from kvpact_testkit.engine import GroupKind, KVCacheGroup

    engine = Engine(EngineConfig(groups=(KVCacheGroup(GroupKind.WINDOW, 16, 20),)))
    request = engine.add_request(Request("r", prompt(100), 10))
    engine.step()
    engine.runner.memory[:, slots(request.block_ids[0][0])] = 0
    engine.step()
    engine.runner.memory[:, slots(request.block_ids[0][5])] = 0
    with pytest.raises(OracleViolation):
        engine.step()
