"""A folder that others write to is input: no file in it costs more than itself (H108, H109).

What is not protected from planted KV is said at the start (H111).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.late_tiers import LateTiers
from kvpact.config import load_config
from kvpact.errors import TierError
from kvpact.identity.base_weights import BaseWeights
from kvpact.identity.keys import KEY_BYTES, BlockKey, Namespace
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, RecordHeader, RecordMac, chained, leading
from kvpact.tiers.directory.evictor_lock import host
from kvpact.tiers.directory.store import DirectoryStore, open_directory
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.foreign_slab import ForeignSlab
from kvpact.tiers.disk.inspection import scan_directory, verify_slab
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.log_once import LogOnce
from kvpact.tiers.record import FIELDS, RECORD_FORMAT, RECORD_MAGIC
from kvpact.tiers.registry import TierContext
from kvpact.tiers.registry import open_tier as open_any_tier
from kvpact.tiers.shared.inspection import summarize, verify_store
from kvpact.tiers.shared.store import StoreError, group_name, record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from slab_scenes import (
    NAMESPACE,
    OTHER,
    SLOT,
    capacity_for,
    chain,
    filled,
    memory,
    open_tier,
    served,
    slab_path,
    store,
    superblock_page,
)
from slab_tables import sealed

KEYS = chain("document", 8)
NAMES = [record_name(group_name(NAMESPACE, UNSEALED), key) for key in KEYS]
NAMES = [record_name(group_name(NAMESPACE, UNSEALED), key) for key in KEYS]
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


@settings(max_examples=25)
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


# H109: files that are no files, unreadable ones, holes, numbers and names


def in_time(call: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What `call` returns; it may hang for ever where a FIFO is waited for."""
    answer: Queue[Any] = Queue()

    def run() -> None:
        try:
            answer.put(call())
        except Exception as error:
            answer.put(error)

    threading.Thread(target=run, daemon=True).start()
    found = answer.get(timeout=seconds)
    if isinstance(found, Exception):
        raise found
    return found


def a_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"no slab")
        file.truncate(1 << 40)


WAYS: dict[str, Callable[[Path], object]] = {
    "FIFO": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "junk": lambda path: path.write_bytes(b"junk" * 4000),
    "hole": a_hole,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("way", WAYS)
def test_h109_whatever_lies_in_a_disk_tiers_folder_costs_no_more_than_itself(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)
    with TemporaryDirectory() as short:
        directory = Path(short)
        folder = directory / "kvpact"
        folder.mkdir(mode=0o700)
        names = (slab_path(directory).name, f"{NAMESPACE.name}-1.slab", "0.slab", "1-aa.newcomer", "00.refuted")
        for name in names:
            WAYS[way](folder / name)
        tier = in_time(lambda: open_tier(directory))
        other = in_time(lambda: open_tier(directory, namespace=OTHER))
        assert store(tier, KEYS) == served(tier, KEYS) == 8
        in_time(tier.tend)
        in_time(other.tend)
        assert caplog.text.count("is skipped") <= 2
        assert len(in_time(lambda: scan_directory(directory))) >= 2
        with pytest.raises(TierError):
            in_time(lambda: verify_slab(folder / "0.slab"))
        tier.close()
        other.close()
        assert served(in_time(lambda: open_tier(directory)), KEYS) == 8


def test_h109_an_unreadable_file_of_the_first_slabs_name_is_left_alone_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted(slab_path(tmp_path), b"whatever")
    really = os.open

    def closed(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(os.fspath(path)).name == slab_path(tmp_path).name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(path, *arguments, **options)

    monkeypatch.setattr(os, "open", closed)
    for _ in range(2):
        tier = open_tier(tmp_path)
        assert store(tier, KEYS) == served(tier, KEYS) == 8
        tier.close()
    assert caplog.text.count("is skipped, another file is used: Permission denied") == 2, "once each start"


def test_h109_idle_slabs_that_leave_a_new_engine_no_room_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capacity = capacity_for(16)
    block = replace(Superblock.for_capacity(NAMESPACE, SLOT, capacity), claim_bytes=capacity)
    for number, slots in (("-1", 16), ("", 0)):
        path = planted(slab_path(tmp_path).with_name(f"{NAMESPACE.name}{number}.slab"), block.encode())
        os.truncate(path, block.file_bytes(slots))
    tier = open_tier(tmp_path, capacity=capacity)
    assert store(tier, KEYS) == 0
    assert "nothing is stored in" in caplog.text
    assert "slabs of engines that may come back fill it" in caplog.text


@pytest.mark.parametrize("way", [way for way in WAYS if way != "hole"])
def test_h109_whatever_lies_in_a_shared_folder_costs_no_more_than_itself(way: str) -> None:
    with TemporaryDirectory() as short:
        directory = Path(short)
        first = shared(directory)
        assert isinstance(first.store, DirectoryStore)
        place = directory / "kvpact" / first.store.path_of(NAMES[5]).relative_to(first.store.root)
        assert stored(first, KEYS[:2]) == 2
        first.close()
        control = directory / "kvpact" / ".kvpact"
        dead = f"{host()}+999999999+0a0a0a0a"
        for path in (place, control / "writers" / "w", control / "new" / "n", control / "new" / dead):
            path.parent.mkdir(exist_ok=True, parents=True)
            WAYS[way](path)
        (control / "stocktaking").unlink()
        if way != "folder":  # nothing can be written there then; its maker could as well remove all
            WAYS[way](control / "stocktaking")
        (directory / "kvpact" / "stranger").touch()
        tier = in_time(lambda: shared(directory))
        assert in_time(lambda: stored(tier, KEYS[:5])) == 5
        assert in_time(lambda: tier.lookup(KEYS))[:5] == [True] * 5
        assert in_time(lambda: leading(tier.get(KEYS, memory(8)))) == 5
        assert tier.health().ok
        in_time(tier.close)


def stored(tier: SharedTier, keys: list[BlockKey]) -> int:
    """How many blocks of a prompt are held, in a row, after they were written."""
    return leading(tier.put(chained(keys, filled(keys))))


def shared(directory: Path, blocks: int = 20) -> SharedTier:
    capacity = blocks * (HEADER_BYTES + SLOT) + 8192
    store = open_directory(parse_tier_url(f"dir://{directory}?capacity={capacity}"))
    return SharedTier(store, NAMESPACE, SLOT)


def test_h109_a_fifo_among_objects_is_not_there_and_holds_no_thread(tmp_path: Path) -> None:
    tier = open_any_tier(parse_tier_url(f"file://{tmp_path}?timeout=1s"), TierContext(NAMESPACE, SLOT))
    for name in NAMES[:2]:
        (tmp_path / "kvpact" / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "kvpact" / name)
    assert in_time(lambda: tier.lookup(KEYS[:2])) == [False, False]
    assert tier.health().ok
    in_time(tier.close)


@pytest.mark.parametrize(
    "said",
    [
        {"used_bytes": -(10**15)},
        {"used_bytes": 0, "settled": 2**62},
        {"used_bytes": 0, "life_seconds": -1e300},
        {"settled": -(2**70)},
    ],
    ids=str,
)
def test_h109_no_number_in_the_ledger_lifts_the_bound(said: dict[str, Any], tmp_path: Path) -> None:
    tier = shared(tmp_path)
    assert isinstance(tier.store, DirectoryStore)
    stored(tier, chain("before", 15))
    snapshot = tmp_path / "kvpact" / ".kvpact" / "stocktaking"
    settled = {tier.store.quota.writer: said.get("settled", 0)}
    snapshot.write_text(json.dumps({"used_bytes": 0, "life_seconds": 1.0, **said, "settled": settled}))
    for number in range(2):
        stored(tier, chain(f"after {number}", 10))
        files = [path.stat().st_size for path in (tmp_path / "kvpact").rglob("*") if path.is_file()]
        assert sum(files) <= tier.store.quota.capacity_bytes + 8192
    tier.close()


def test_h109_looking_allocates_no_more_than_is_there(tmp_path: Path) -> None:
    """A slab of one record whose slots and table are a terabyte of nothing; a record and a description of a GiB."""
    block = Superblock(1 << 40, 1 << 32, NAMESPACE)
    header = RecordHeader(NAMESPACE.digest, KEYS[0], b"", 0, 1 << 40, bytes(16), 1.0, 1.0, slot=0)
    slab = planted(slab_path(tmp_path), block.encode() + header.encode())
    os.truncate(slab, block.payload_at + (1 << 20))
    tier = shared(tmp_path / "dir")
    stored(tier, KEYS[:1])
    assert isinstance(tier.store, DirectoryStore)
    group = group_name(NAMESPACE, UNSEALED)
    huge = RecordHeader(NAMESPACE.digest, KEYS[1], b"", 0, (1 << 30) - 1, bytes(16), 1.0, 1.0)
    for name, content in ((f"{group}/namespace", b"{}"), (record_name(group, KEYS[1]), huge.encode())):
        path = tier.store.path_of(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.truncate(path, 1 << 30 if content == b"{}" else 4096)
    tracemalloc.start()
    try:
        (summary,) = scan_directory(tmp_path)
        report = verify_slab(slab)
        (of_group,) = summarize(tier.store)
        verified = verify_store(tier.store, UNSEALED, lambda done, total: None)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary.blocks == 1
    assert [damage.reason for damage in report.damaged] == ["payload ends after 1048576"]
    assert (of_group.fields, verified.sound, len(verified.damaged)) == ({}, 1, 1)
    assert most < 16 << 20
    tier.close()


ESCAPES = "\x1b]0;owned\x07 \x9b31m \u202e text\nINFO a line of its own"


def test_h109_a_stores_text_reaches_log_and_health_without_what_a_terminal_obeys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> None:
        raise ValueError(ESCAPES)

    accounts = Accounts(logging.getLogger("test"), "redis tier")
    accounts.note_failed("write", f"cannot write: {StoreError(ESCAPES)}")
    with accounts.contained("look", "cannot look"):
        broken()
    LogOnce(logging.getLogger("test")).log("kind", logging.ERROR, "raised: %s", ESCAPES, error=ValueError(ESCAPES))
    said = [record.getMessage() for record in caplog.records]
    for text in (*said, accounts.health().reason, str(TierError(ESCAPES))):
        assert "owned" in text
        assert all(sign.isprintable() or sign == "\n" for sign in text)
        assert "\nINFO" not in text
    assert len(said) == 3


GROUPS = "capacity=1MiB&group=0"


@pytest.mark.parametrize(
    ("urls", "sealed", "said"),
    [
        (["disk://{0}/a?capacity=1MiB", "dir://{0}/b?capacity=1MiB", "file://{0}/c"], False, []),
        ([f"disk://{{0}}/a?{GROUPS}", f"dir://{{0}}/b?{GROUPS}", "file://{0}/c?group=0"], False, ["a", "b", "c"]),
        ([f"disk://{{0}}/a?{GROUPS}", f"dir://{{0}}/b?{GROUPS}", "file://{0}/c?group=0"], True, ["a"]),
        (["redis://127.0.0.1:1"], False, ["127.0.0.1:1"]),
        (["redis://127.0.0.1:1"], True, []),
        (["dir:///missing/folder?capacity=1MiB&group=0"], False, ["folder"]),
    ],
)
def test_h111_what_is_not_protected_is_said_at_start_in_one_line(
    urls: list[str], sealed: bool, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config({"tiers": [url.format(tmp_path) for url in urls]}, {})
    seal = RecordMac.from_secret(b"sixteen bytes or more") if sealed else UNSEALED
    late = LateTiers(config, seal, Namespace({"model": "tiny"}), SLOT, BaseWeights(("files:0",)))
    tiers = late.open()
    assert tiers is not None
    lines = [record.getMessage() for record in caplog.records if "can inject KV" in record.getMessage()]
    assert len(lines) == bool(said)
    for line in lines:
        assert line.count("://") == len(said) + 1
        assert all(f"{name}?" in line or f"{name} " in line for name in said)
        assert line.endswith("see https://github.com/kvpact/kvpact/blob/main/SECURITY.md")
    tiers.close()
    late.close()
