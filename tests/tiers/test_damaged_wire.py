"""A network that damages every tenth answer of a real store: nothing wrong is served, hits go on (H22)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpact.metrics import series
from kvpact.tiers.objects.store import open_objects
from kvpact.tiers.redis.opening import open_redis
from kvpact.tiers.shared.store import RecordStore
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from scenes import NAMESPACE, PAGE, Scene, SceneRequest, tokens
from servers.damaging_proxy import DamagingProxy, damaging_proxy
from servers.object_server import CREDENTIALS, object_server
from servers.redis_server import redis_server

DOCUMENTS = 12
LENGTH = 33
BLOCKS = 8


def redis_behind_a_proxy(directory: Path, stack: ExitStack) -> tuple[DamagingProxy, RecordStore]:
    server = stack.enter_context(redis_server(directory))
    proxy = stack.enter_context(damaging_proxy(server.port))
    return proxy, open_redis(parse_tier_url(f"redis://127.0.0.1:{proxy.port}/0?timeout=300ms"))


def s3_behind_a_proxy(directory: Path, stack: ExitStack) -> tuple[DamagingProxy, RecordStore]:
    traffic = stack.enter_context(object_server())
    proxy = stack.enter_context(damaging_proxy(traffic.port))
    url = f"s3://bucket/wire?endpoint=http://127.0.0.1:{proxy.port}&allow_http=true&timeout=1s"
    return proxy, open_objects(parse_tier_url(url))


STORES = {"redis": (redis_behind_a_proxy, 240), "object": (s3_behind_a_proxy, 60)}


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    for name, text in CREDENTIALS.items():
        monkeypatch.setenv(name, text)
    with ExitStack() as stack:
        yield stack


def load(scene: Scene, name: str, seed: int) -> int:
    """Blocks that a request loads, each of which must be its own; what is missing is computed and saved."""
    request = SceneRequest(name, tokens(LENGTH, seed))
    match = scene.prepare(request, seconds=20.0)
    blocks = match.num_tokens // 4
    if blocks:
        scene.load(request, match)
        assert scene.holds_content(request, range(blocks))
    scene.compute(request, blocks)
    scene.cache.note_computed(request, LENGTH, lambda: scene.tables[name])
    scene.report(scene.cache.end_step())
    scene.cache.request_finished(name)
    scene.settle_tiers(20.0)
    scene.forget_memory()
    scene.now += 1.0
    return blocks


def trouble(scene: Scene, kind: str) -> float:
    """What the tier says that it could not read, write, or use."""
    counts = scene.cache.observe()
    return counts[series("damaged_records", kind)] + counts[series("tier_failures", kind)]


@pytest.mark.parametrize("kind", STORES)
def test_h22_every_tenth_answer_is_damaged_on_the_wire(tmp_path: Path, stack: ExitStack, kind: str) -> None:
    open_store, turns = STORES[kind]
    proxy, store = open_store(tmp_path, stack)
    scene = Scene(24, tiers=[SharedTier(store, NAMESPACE, PAGE)], recompute_if_faster=False)
    loaded = 0
    for turn in range(turns):
        loaded += load(scene, f"turn {turn}", turn % DOCUMENTS)
    assert proxy.damaged > turns / 10, "hardly anything was damaged"
    assert scene.cache.observe()[series("damaged_records", kind)] > 0, "no record was damaged"
    assert loaded > 0.5 * BLOCKS * (turns - DOCUMENTS), "what arrives sound is not used"
    assert scene.cache.observe()["leases_held"] == 0
    proxy.share = 0.0
    scene.now += 120.0
    # A connection that was damaged may fail when it is next used, and what was damaged in the store is found when it is
    # read; both are counted, and cost this prompt or, if it was a write, its next load.
    before: list[float] = [-1.0] * DOCUMENTS
    missed = [1]
    rounds = 0
    while any(missed):
        rounds += 1
        assert rounds < DOCUMENTS, f"blocks are missed although the wire is sound: {missed}"
        missed = []
        for seed in range(DOCUMENTS):
            last = before[seed]
            before[seed] = trouble(scene, kind)
            missed.append(BLOCKS - load(scene, f"round {rounds}, {seed}", seed))
            assert not missed[-1] or trouble(scene, kind) > last, f"{missed[-1]} blocks are missed, nobody says why"
    assert scene.cache.observe()[series("tier_up", kind)] == 1
