"""Nothing of other weights is served on real tiers: each hazard of resets, above a disk and a Redis server.

The embedded engine tells weights apart. The kit has the same for anybody's cache (`cache_checks_epochs.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from epoch_engine import EpochEngine, disk, prompt, store
from kvpact.contract import WorkerReport
from kvpact.identity.epochs import Epoch
from kvpact.metrics import MEMORY, series
from kvpact.tiers.base import SupportsScan, Tier
from kvpact.tiers.shared.store import NAMESPACE_RECORD, RecordPieces, StoreError
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.engine import RequestStatus
from scenes import Scene, SceneRequest, open_disk, tokens
from servers.redis_server import RedisServer, redis_server

DOCUMENT, OTHER = prompt(8, 1), prompt(8, 2)
STORED = 8 * 16
WAIT_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(server: RedisServer) -> str:
    with server.client() as client:
        client.flushall()
    return f"redis://{server.address}?timeout=500ms"


@pytest.fixture
def started() -> Iterator[Callable[..., EpochEngine]]:
    """Engines, which end with the test."""
    with ExitStack() as engines:

        def start(*tiers: Tier, **settings: object) -> EpochEngine:
            engine = EpochEngine(*tiers, **settings)  # type: ignore[arg-type]
            engines.callback(engine.close)
            return engine

        yield start


@pytest.fixture(params=["disk", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Tier:
    return disk(tmp_path) if request.param == "disk" else store(redis_url)


def records(server: RedisServer) -> int:
    """Blocks that the server holds."""
    with server.client() as client:
        return sum(1 for key in client.scan_iter("*") if not key.endswith(b"namespace"))


def require_right(engine: EpochEngine) -> None:
    assert not engine.wrong, engine.wrong[0]


def test_h35_of_two_resets_close_together_the_second_counts_too(
    tier: Tier, started: Callable[..., EpochEngine]
) -> None:
    """Where a reset makes a tier clear itself, the first clear ends late, and the second not before the question."""
    gates = [threading.Event(), threading.Event()]
    clear, calls = tier.clear, list[int]()

    def slow_clear() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            clear()
            gates[0].wait(WAIT_S)
        else:
            gates[1].wait(WAIT_S)
            clear()

    tier.clear = slow_clear  # type: ignore[method-assign]
    engine = started(tier)
    engine.store(DOCUMENT)
    engine.engine.update_weights()
    engine.serve(OTHER)
    engine.step(200)
    engine.engine.update_weights()
    gates[0].set()
    engine.step(200)
    for _ in range(2):
        engine.serve(OTHER)
        engine.serve(DOCUMENT)
    gates[1].set()
    require_right(engine)


def test_h36_a_store_that_refuses_everything_during_a_reset_and_is_back(
    server: RedisServer, redis_url: str, started: Callable[..., EpochEngine]
) -> None:
    engine = started(store(redis_url))
    engine.store(DOCUMENT, OTHER)
    assert records(server) == 16
    with server.client() as administrator:
        administrator.execute_command("ACL", "SETUSER", "default", "-@all", "+acl")
        engine.engine.update_weights()
        engine.serve(prompt(3, 3))
        engine.step(100)
        administrator.execute_command("ACL", "SETUSER", "default", "+@all")
    assert records(server) >= 16
    for _ in range(3):
        engine.skew += 100
        engine.step(100)
        engine.serve(DOCUMENT)
        engine.serve(OTHER)
    require_right(engine)


def test_h37_after_a_restart_from_the_old_files_nothing_of_the_new_weights_is_served(
    tmp_path: Path, started: Callable[..., EpochEngine]
) -> None:
    first = EpochEngine(disk(tmp_path))
    first.store(DOCUMENT)
    first.engine.update_weights()
    first.store(OTHER, DOCUMENT)
    first.close()
    restarted = started(disk(tmp_path))
    restarted.serve(OTHER)
    restarted.serve(DOCUMENT)
    require_right(restarted)


def test_h37_an_engine_that_is_not_updated_yet_and_one_that_is_share_nothing(
    redis_url: str, started: Callable[..., EpochEngine]
) -> None:
    updated, old = started(store(redis_url)), started(store(redis_url))
    updated.engine.update_weights()
    updated.store(DOCUMENT)
    old.store(DOCUMENT, OTHER)
    updated.serve(OTHER)
    updated.serve(DOCUMENT)
    require_right(old)
    require_right(updated)


def test_h37_engines_that_say_the_same_word_share_again(redis_url: str, started: Callable[..., EpochEngine]) -> None:
    engines = [started(store(redis_url)) for _ in range(2)]
    for engine in engines:
        engine.engine.update_weights(1)
        engine.cache.set_weights_version("v1")
    engines[0].store(DOCUMENT)
    assert engines[1].serve(DOCUMENT) == STORED
    require_right(engines[1])


def test_p13_under_a_drawn_epoch_shared_stores_are_not_written(
    server: RedisServer, redis_url: str, tmp_path: Path, started: Callable[..., EpochEngine]
) -> None:
    """A training run would fill a bucket for ever. Memory and the engine's own disk have the blocks."""
    engine = started(disk(tmp_path), store(redis_url))
    engine.engine.update_weights(1)
    engine.store(DOCUMENT)
    assert records(server) == 0
    engine.forget_memory(1)
    assert engine.serve(DOCUMENT) == STORED
    assert records(server) == 0
    engine.engine.update_weights(2)
    engine.cache.set_weights_version("v2")
    engine.store(OTHER)
    assert records(server) == 8
    require_right(engine)


def test_p13_who_shares_drawn_epochs_deletes_them_when_the_engine_ends(
    server: RedisServer, redis_url: str, started: Callable[..., EpochEngine]
) -> None:
    engine = started(store(redis_url), share_drawn_epochs=True)
    engine.store(DOCUMENT)
    engine.engine.update_weights(1)
    engine.store(OTHER)
    assert records(server) == 16
    engine.forget_memory(2)
    assert engine.serve(OTHER) == STORED, "from the store"
    require_right(engine)
    engine.close()
    assert records(server) == 8, "those of the first epoch, which others may have as well"


def test_p13_every_record_names_its_epoch(redis_url: str, tmp_path: Path, started: Callable[..., EpochEngine]) -> None:
    tiers = disk(tmp_path), store(redis_url)
    engine = started(*tiers, weights_version="v1")
    engine.store(DOCUMENT)
    engine.engine.update_weights(1)
    engine.cache.set_weights_version("v2")
    engine.store(OTHER)
    for tier in tiers:
        assert isinstance(tier, SupportsScan)
        epochs = Counter(header.epoch for header in tier.scan())
        assert epochs == {Epoch.of_word("v1"): 8, Epoch.of_word("v2"): 8}


def test_p13_blocks_of_older_epochs_go_first_when_room_is_needed(
    tmp_path: Path, started: Callable[..., EpochEngine]
) -> None:
    """A reset itself frees nothing: it may be the beginning of a sleep."""
    engine = started(disk(tmp_path), num_slots=24)
    engine.store(DOCUMENT)
    held_blocks = series("held_blocks", MEMORY)
    assert engine.cache.observe()[held_blocks] == 8
    engine.engine.update_weights(1)
    assert engine.cache.observe()[held_blocks] == 8
    newer = [prompt(8, seed) for seed in (11, 12, 13)]
    engine.store(*newer)
    assert engine.cache.observe()[held_blocks] == 24
    assert [engine.serve(tokens) for tokens in newer] == [STORED] * 3, "nothing of this epoch was evicted for the old"
    require_right(engine)


def test_p13_a_reset_that_turns_out_to_be_none_is_taken_back(tier: Tier, started: Callable[..., EpochEngine]) -> None:
    """As after a sleep from which the same weights wake: what was stored before is served, what came since is not."""
    engine = started(tier)
    engine.store(DOCUMENT)
    engine.engine.update_weights(1)
    engine.serve(OTHER)
    engine.engine.change_weights(0)
    assert engine.cache.take_back_reset()
    assert engine.serve(DOCUMENT) == STORED
    assert engine.serve(OTHER) == 0
    assert not engine.cache.take_back_reset()
    require_right(engine)


@pytest.mark.parametrize("preset", ["native", "vllm-0.32"])
def test_h38_blocks_that_running_requests_computed_before_a_reset_are_never_saved(
    preset: str, tier: Tier, started: Callable[..., EpochEngine]
) -> None:
    engine = started(tier, preset=preset)
    half, writing = engine.add(prompt(12, 1), 5), engine.add(prompt(2, 2), 60)
    while writing.num_tokens < 50:
        engine.step()
    engine.engine.update_weights(clear_cache=False)
    assert RequestStatus.RUNNING in (half.status, writing.status)
    engine.run(half, writing)
    engine.settle()
    everything = [list(half.token_ids), list(writing.token_ids)]
    for sequence in everything:
        engine.serve([*sequence, 1])
    require_right(engine)


def test_h46_one_engines_reset_takes_nothing_from_the_others(
    server: RedisServer, redis_url: str, started: Callable[..., EpochEngine]
) -> None:
    one, other = started(store(redis_url)), started(store(redis_url))
    one.store(DOCUMENT)
    one.engine.reset()
    one.step(200)
    assert records(server) == 8
    assert other.serve(DOCUMENT) == STORED
    require_right(other)


def test_h46_a_store_that_lost_its_blocks_gets_them_again(
    server: RedisServer, redis_url: str, started: Callable[..., EpochEngine]
) -> None:
    engine = started(store(redis_url))
    engine.store(DOCUMENT)
    with server.client() as administrator:
        administrator.flushall()
    for _ in range(3):
        engine.skew += 100
        assert engine.serve(DOCUMENT) == STORED, "memory has it"
        engine.settle()
    assert records(server) == 8
    assert started(store(redis_url)).serve(DOCUMENT) == STORED


@pytest.mark.parametrize("reported", [False, True], ids=["while the save is under way", "when it is stored"])
@pytest.mark.parametrize("repaired", [False, True], ids=["left as they are", "computed again"])
def test_h48_blocks_that_another_connector_failed_to_load_are_never_served(
    reported: bool, repaired: bool, tmp_path: Path
) -> None:
    """The engine took them for loaded, so they were to be saved with what was computed behind them."""
    scene = Scene(tiers=[open_disk(tmp_path)])
    request = SceneRequest("victim", tokens(24))
    table = scene.allocate(request)
    scene.compute(request)
    scene.kv[0][table[2]] = 7  # another connector's load, which fails
    scene.cache.note_computed(request, 24, lambda: table)
    work = scene.cache.end_step()
    outcomes = scene.execute(work, 0)
    if reported:
        scene.cache.apply_report(WorkerReport({0: outcomes}))
        scene.settle_tiers()
    scene.cache.distrust_blocks([table[2]], {"victim": table})
    if not reported:
        scene.cache.apply_report(WorkerReport({0: outcomes}))
    if repaired:
        scene.compute(request, 2)
        scene.cache.note_computed(request, 24, lambda: table)
        scene.report(scene.cache.end_step())
    scene.cache.request_finished("victim")
    scene.settle_tiers()
    later = SceneRequest("later", tokens(24))
    match = scene.prepare(later)
    assert match.num_tokens <= (20 if repaired else 8), "the third block is garbage, and those behind it stand on it"
    if match.num_tokens:
        scene.load(later, match)
        assert scene.holds_content(later, range(match.num_tokens // 4))
    scene.cache.request_finished("later")


def test_h69_a_write_that_was_given_up_lands_after_the_reset_and_is_nobodys(
    server: RedisServer, redis_url: str, started: Callable[..., EpochEngine]
) -> None:
    """As where a client's thread goes on with what its caller has given up: object stores and Mooncake."""
    tier = store(redis_url)
    assert isinstance(tier, SharedTier)
    write, late = tier.store.write, list[Callable[[], object]]()

    def given_up(names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        if names[0].endswith(NAMESPACE_RECORD):
            write(names, records)
            return
        copies = [[bytes(piece) for piece in record] for record in records]
        late.append(lambda: write(names, copies))
        raise StoreError("no answer within 0.5 s")

    tier.store.write = given_up  # type: ignore[method-assign]
    engine = started(tier)
    engine.store(DOCUMENT)
    engine.engine.update_weights()
    engine.step(200)
    assert late
    for land in late:
        land()
    assert records(server) == 8
    for _ in range(3):
        engine.skew += 100
        engine.step(100)
        engine.serve(DOCUMENT)
    require_right(engine)
