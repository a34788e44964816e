"""A folder that others write to is input: no file in it costs more than itself (H108, H109)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache.late_tiers import LateTiers
from kvpact.config import load_config
from kvpact.identity.base_weights import BaseWeights
from kvpact.identity.keys import KEY_BYTES, Namespace
from kvpact.tiers.base import UNSEALED
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.foreign_slab import ForeignSlab
from kvpact.tiers.disk.slab import Superblock
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.record import FIELDS, RECORD_FORMAT, RECORD_MAGIC
from slab_scenes import (
    NAMESPACE,
    SLOT,
    capacity_for,
    chain,
    open_tier,
    served,
    slab_path,
    store,
    superblock_page,
)
from slab_tables import sealed

KEYS = chain("document", 8)
DEEP = b"[" * 3000
PLANTED = [b"[]", b"null", b"", DEEP, b'{"model": 1}', b"\xff\xfe", b'{"model":' * 300]


def planted(path: Path, content: bytes) -> Path:
    """A file that somebody else has put there."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def slab_file(text: bytes) -> bytes:
    """A whole file, with a right checksum, of a slab that says `text` of itself."""
    return superblock_page(text).ljust(1 << 16, b"\0")


@pytest.mark.parametrize("text", PLANTED, ids=lambda text: str(text[:12]))
def test_h108_a_planted_superblock_costs_its_file_and_no_start(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted(slab_path(tmp_path), slab_file(text))
    planted(slab_path(tmp_path).with_name("another.slab"), slab_file(text))
    tier = open_tier(tmp_path)
    assert store(tier, KEYS) == served(tier, KEYS) == 8
    assert caplog.text.count("has a superblock without a namespace") == 1


@pytest.mark.parametrize("text", [b"[]", DEEP], ids=["list", "deep"])
def test_h108_a_slab_planted_beside_running_engines_stops_no_thread(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "TEND_SECONDS", 0.01)
    monkeypatch.setattr(disk_tier, "TEND_SHARE", 1.0)
    first, second = (open_tier(tmp_path, capacity=4 << 20) for _ in range(2))
    planted(tmp_path / "kvpact" / f"{NAMESPACE.name}-5.slab", slab_file(text))
    planted(tmp_path / "kvpact" / "0.slab", slab_file(text))
    time.sleep(0.05)  # both have looked at them
    deadline = time.monotonic() + 10
    while store(first, KEYS) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    while second.leading(KEYS) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served(second, KEYS) == 8


def test_h108_a_planted_slab_costs_no_other_tier_of_an_engine(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    known = Namespace({"model": "tiny"})
    whole = Namespace({**known.fields, "weights": "files:0"})
    for place in places:
        place.mkdir()
    planted(places[0] / "kvpact" / f"{whole.name}.slab", slab_file(DEEP))
    config = load_config({"tiers": [f"disk://{place}?capacity=1MiB" for place in places]}, {})
    late = LateTiers(config, UNSEALED, known, SLOT, BaseWeights(("files:0",)))
    tiers = late.open()
    assert tiers is not None
    assert [queue.tier.name for queue in tiers.queues] == ["disk", "disk"]
    tiers.close()
    late.close()


def test_h108_what_looking_at_a_slab_raises_is_noted_once_and_costs_that_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)
    first, second, third = (open_tier(tmp_path, capacity=4 << 20) for _ in range(3))
    scan, sick = ForeignSlab.scan, first.slab.path

    def broken(slab: ForeignSlab, stopped: Callable[[], bool]) -> None:
        if slab.path == sick:
            raise OverflowError("what nobody expected")
        scan(slab, stopped)

    monkeypatch.setattr(ForeignSlab, "scan", broken)
    for _ in range(2):
        for tier in (first, second, third):
            tier.tend()
    assert store(second, KEYS) == 8
    for _ in range(5):
        third.tend()
    assert served(third, KEYS) == 8
    assert third.health().ok
    assert "OverflowError: what nobody expected" in third.health().reason
    assert caplog.text.count("what nobody expected") == 2, "each of the two who look at it says it once"
    monkeypatch.undo()
    third.tend()
    assert third.health().reason == ""


HEADERS = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 5), st.integers(0, 3), st.floats(), st.sampled_from([0, 1, SLOT, 2 * SLOT])
    ),
    min_size=1,
    max_size=8,
)


@given(HEADERS)
def test_h108_a_header_table_with_right_checksums_may_say_anything(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[int, int, int, float, int]]
) -> None:
    """Keys twice, blocks that are their own parents, circles, times that are no numbers: to its owner and to others."""
    directory = tmp_path_factory.mktemp("planted")
    headers = np.zeros(64, FIELDS)
    for slot, (key, parent, depth, when, length) in enumerate(said):
        headers["magic"][slot], headers["version"][slot] = np.frombuffer(RECORD_MAGIC, "<u8")[0], RECORD_FORMAT
        headers["slot"][slot], headers["depth"][slot], headers["length"][slot] = slot, depth, length
        headers["written"][slot] = headers["used"][slot] = when
        headers["namespace"][slot] = np.frombuffer(NAMESPACE.digest, "<u8")
        headers["key"][slot] = np.frombuffer(bytes([key + 1]) * KEY_BYTES, "<u8")
        headers["parent"][slot] = np.frombuffer(bytes([parent]) * KEY_BYTES, "<u8")
    sealed(headers[: len(said)])
    block = Superblock(SLOT, 64, NAMESPACE)
    content = (block.encode() + headers.tobytes()).ljust(block.file_bytes(16), b"\0")
    keys = [bytes([key + 1]) * KEY_BYTES for key in range(5)]
    for name in (f"{NAMESPACE.name}.slab", f"{NAMESPACE.name}-1.slab"):
        planted(directory / "kvpact" / name, content)
    tier = DiskTier.open(directory, NAMESPACE, SLOT, capacity_for(64), timeout=0.0)
    try:
        tier.lookup(keys)
        assert not any(tier.get(keys, [[memoryview(bytearray(SLOT))] for _ in keys])), "no payload fits its digest"
        tier.tend()
        store(tier, KEYS)
        tier.check()
    finally:
        tier.close()
