"""What people are told of each request: the last ones are kept, whatever happens to them, and the sums agree."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest

from kvpact.cache.records import RECORDS, Records, RequestRecord
from kvpact.contract import WorkerReport
from kvpact.errors import NAME_CHARS
from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact.metrics import EndReason, MissReason
from scenes import BLOCK_SIZE, Scene, SceneRequest, failed, open_disk, tokens


@pytest.fixture
def scene() -> Scene:
    return Scene()


def record_of(scene: Scene, request_id: str) -> RequestRecord:
    (record,) = (one for one in scene.cache.requests.records.all() if one.request_id == request_id)
    return record


def test_a_request_that_finds_nothing_says_why_and_what_it_saved(scene: Scene) -> None:
    request = SceneRequest("cold", tokens(17))
    assert scene.prepare(request).num_tokens == 0
    scene.run_cold(request)
    record = record_of(scene, "cold")
    assert (record.miss, record.looked_up_from, record.saved_blocks) == (MissReason.NOT_STORED, 0, 4)
    assert (record.prompt_tokens, record.engine_tokens, record.plans) == (17, 0, 0)
    assert record.found is not None
    assert (record.found.resident, record.found.by_tier) == (0, ())


def test_a_request_that_is_served_says_from_where_and_how_much(scene: Scene) -> None:
    scene.run_cold(SceneRequest("cold", tokens(17)))
    request = SceneRequest("warm", tokens(17))
    scene.load(request, scene.prepare(request, computed=BLOCK_SIZE), 2 * BLOCK_SIZE)
    scene.step_computing(request)
    scene.cache.request_finished("warm")
    record = record_of(scene, "warm")
    assert (record.looked_up_from, record.blocks, record.ended, record.miss) == (1, (1, 4), EndReason.LOADED, None)
    assert (record.promised_tokens, record.committed_tokens) == (3 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert record.loaded_tokens == record.used_tokens == 2 * BLOCK_SIZE
    assert record.found is not None
    assert record.found.resident == 4
    prompts = scene.cache.requests.records.prompts
    assert (prompts.requests, prompts.tokens, prompts.engine_tokens) == (2, 34, BLOCK_SIZE)


def test_what_a_tier_had_is_told_although_it_was_read_into_memory_first(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)])
    scene.run_cold(SceneRequest("cold", tokens(17)))
    scene.settle_tiers()
    scene.forget_memory()
    request = SceneRequest("warm", tokens(17))
    scene.assert_loads(request, 4 * BLOCK_SIZE)
    found = record_of(scene, "warm").found
    assert found is not None
    assert (found.resident, found.by_tier) == (0, (4,))


def test_a_load_that_fails_says_how_much_did_not_arrive(scene: Scene) -> None:
    scene.run_cold(SceneRequest("cold", tokens(17)))
    request = SceneRequest("warm", tokens(17))
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, match.num_tokens, scene.allocate(request))
    work = scene.cache.end_step()
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, 1) for job in work.loads}}))
    scene.step_computing(request)
    record = record_of(scene, "warm")
    assert (record.ended, record.committed_tokens) == (EndReason.SHORT, 4 * BLOCK_SIZE)
    assert record.loaded_tokens == record.used_tokens == BLOCK_SIZE


def test_the_last_requests_are_kept_and_one_that_comes_again_begins_anew() -> None:
    records = Records(lambda: 7.0, 3)
    for name in "abcda":
        records.begin(name, 1)
    assert [(record.request_id, record.arrived_at) for record in records.all()] == [("c", 7.0), ("d", 7.0), ("a", 7.0)]
    records.note_saved("b", 1)


def test_an_id_that_a_client_has_chosen_is_cut_and_can_be_told() -> None:
    records = Records(lambda: 7.0)
    assert records.begin("a" * 1_000, 1).request_id == "a" * NAME_CHARS
    assert records.begin("b\ud800\x1bü", 1).request_id == "b\\ud800\\x1bü"


def test_10_000_requests_take_no_more_memory_than_1_000(scene: Scene) -> None:
    def play(numbers: range) -> None:
        for number in numbers:
            request = SceneRequest(f"{number:05}", tokens(BLOCK_SIZE + 1, seed=number // 2))
            match = scene.prepare(request)
            if match.num_tokens:
                scene.load(request, match)
            scene.run_cold(request)
            del scene.tables[request.request_id]

    def allocated() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    play(range(1_000))
    before = allocated()
    play(range(1_000, 10_000))
    assert len(scene.cache.requests.records.all()) == RECORDS
    assert allocated() - before < 500


class LongText(str):
    """A text that a client sends as its request's id, or as a salt; whether anything still has it can be seen."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("place", ["request_id", "salt"])
def test_h118_nothing_keeps_a_long_id_or_salt_of_a_request_that_has_ended(scene: Scene, place: str) -> None:
    kept = []
    for number in range(30):
        text = LongText(f"{number:05}" * 1_000)
        identity = RequestIdentity(salt=text if place == "salt" else "")
        request = SceneRequest(text if place == "request_id" else f"{number}", tokens(BLOCK_SIZE + 1), identity)
        match = scene.prepare(request)
        if match.num_tokens:
            scene.load(request, match)
        scene.run_cold(request)
        del scene.tables[request.request_id]
        kept.append(weakref.ref(text))
        del text, request, identity
    scene.cache.end_step()
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= 2, "those that a step's last work may still name"
    assert len(scene.cache.requests.records.all()) == 30


def test_h118_of_two_long_ids_that_begin_alike_each_has_its_own_record() -> None:
    scene = Scene()
    names = ["x" * 1_000 + end for end in "ab"]
    scene.run_cold(SceneRequest("cold", tokens(17)))
    for name in names:
        request = SceneRequest(name, tokens(17))
        scene.load(request, scene.prepare(request))
        scene.step_computing(request)
        scene.cache.request_finished(name)
    records = [one for one in scene.cache.requests.records.all() if one.request_id == names[0][:NAME_CHARS]]
    assert [record.loaded_tokens for record in records] == [16, 16]


def test_h118_a_salt_separates_however_long_it_is() -> None:
    keys = [
        BlockKeys(bytes(32), 4, RequestIdentity(salt="s" * length + end)).extend(range(8))
        for length in (1, 10_000)
        for end in "ab"
    ]
    assert len({key for each in keys for key in each}) == 8
