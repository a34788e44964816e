"""Files that eviction cannot remove: it goes past them, names one, and counts them as taken."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpact.cli.app import app
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import chained
from kvpact.tiers.directory import files
from kvpact.tiers.directory.store import DirectoryStore, open_directory
from kvpact.tiers.disk import slab_directory
from kvpact.tiers.objects.store import open_objects
from kvpact.tiers.shared.store import StoreError
from kvpact.tiers.urls import parse_tier_url
from slab_scenes import NAMESPACE, OTHER, bare_tier, chain, files_in, filled, slab_path

OTHER_STILL = Namespace({"model": "third", "block_size": "16"})
RECORD = [bytes(4000)]
TAKEN = 4096
CAPACITY = 40 * TAKEN
SMALL = 14 * TAKEN
GROUP = "0" * 16


def name(number: int) -> str:
    return f"{GROUP}/{number:064x}"


def open_store(place: Path, capacity: int = CAPACITY) -> DirectoryStore:
    return open_directory(parse_tier_url(f"dir://{place}?capacity={capacity}"))


def bytes_of_records(place: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in (place / "kvpact" / GROUP).rglob("*") if path.is_file())


@contextmanager
def held_fast(*paths: Path) -> Iterator[None]:
    """Something is mounted on these files, so that nobody removes them (EBUSY)."""
    with ExitStack() as mounts:
        for path in paths:
            subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
            mounts.callback(subprocess.run, ["umount", str(path)], check=True)
        yield


def test_h127_a_directory_evicts_past_what_it_cannot_remove(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The oldest cannot go, more of them than one eviction looks for: then others go, and the bound holds."""
    with closing(open_store(tmp_path)) as store:
        for number in range(30):
            store.write([name(number)], [RECORD])
        with held_fast(*(store.path_of(name(number)).resolve() for number in range(8))):
            for number in range(100, 130):
                store.write([name(number)], [RECORD])
                assert bytes_of_records(tmp_path) <= CAPACITY
            assert store.exists([name(129), name(0), name(8)]) == [True, True, False]
        told = [line.getMessage() for line in caplog.records if "cannot be removed" in line.msg % line.args]
        assert len(told) == 1, "once"
        assert "Device or resource busy" in told[0]
        assert "others are evicted instead" in told[0]


@given(stuck=st.sets(st.integers(0, 7)), writes=st.integers(1, 10))
@settings(max_examples=15, deadline=None)
def test_h127_whatever_cannot_be_removed_the_bound_holds_and_what_has_room_is_stored(
    stuck: set[int], writes: int
) -> None:
    really = files.remove
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        store = stack.enter_context(closing(open_store(place, SMALL)))
        held = {str(store.path_of(name(number))) for number in stuck}

        def remove(path: Path | str) -> bool:
            if str(path) in held:
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
            return really(path)

        patch.setattr(files, "remove", remove)
        store.write([name(number) for number in range(8)], [RECORD] * 8)
        for number in range(100, 100 + writes):
            store.write([name(number)], [RECORD])
            assert store.exists([name(number)]) == [True]
            assert bytes_of_records(place) <= SMALL
            assert store.usage().used_bytes >= bytes_of_records(place)


def test_h127_of_records_to_remove_one_that_stays_keeps_no_other(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.write([name(number) for number in range(3)], [RECORD] * 3)
        with held_fast(store.path_of(name(0)).resolve()), pytest.raises(StoreError, match="cannot remove"):
            store.remove([name(number) for number in range(3)])
        assert store.exists([name(number) for number in range(3)]) == [True, False, False]


def test_h127_on_a_full_file_system_objects_go_past_what_cannot_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_objects(parse_tier_url(f"file://{tmp_path}?timeout=20s"))) as store:
        for number in range(8):
            store.write([name(number)], [RECORD])
        with held_fast(tmp_path / "kvpact" / name(0), tmp_path / "kvpact" / name(1)):
            assert store.make_room(3 * TAKEN) == 3
            assert store.exists([name(number) for number in range(8)]) == [True] * 2 + [False] * 3 + [True] * 3
    assert caplog.text.count("2 files in the way cannot be removed") == 1


def test_h127_an_idle_slab_that_cannot_be_removed_counts_as_taken_and_the_next_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slab_directory, "ABSENT_S", 0.0)
    capacity = 4 << 20
    both = [bare_tier(tmp_path, namespace=namespace, capacity=capacity) for namespace in (OTHER, OTHER_STILL)]
    for tier in both:
        keys = chain("theirs", 100)
        tier.put(chained(keys, filled(keys)))
    for tier in both:
        tier.close()
    os.utime(slab_path(tmp_path, OTHER), (1, 1))  # it is asked first
    with held_fast(slab_path(tmp_path, OTHER)):
        with closing(bare_tier(tmp_path, capacity=capacity)) as tier:
            keys = chain("ours", 600)
            for first in range(0, 600, 50):
                tier.put(chained(keys[first : first + 50], filled(keys[first : first + 50]), keys[:first]))
                assert files_in(tmp_path) <= capacity
            assert sum(tier.lookup(keys)) > 100, "the other's room is taken"
        assert slab_path(tmp_path, OTHER).exists()
        assert not slab_path(tmp_path, OTHER_STILL).exists()
    said = [line.getMessage() for line in caplog.records]
    assert len([line for line in said if line.startswith("disk tier: 1 files in the way cannot be removed")]) == 1


def test_h127_gc_removes_what_it_can_and_names_what_it_cannot(tmp_path: Path) -> None:
    for namespace in (NAMESPACE, OTHER):
        bare_tier(tmp_path, namespace=namespace).close()
    first, second = sorted((slab_path(tmp_path), slab_path(tmp_path, OTHER)))
    os.utime(first, (1, 1))
    os.utime(second, (1, 1))
    with held_fast(first):
        found = CliRunner().invoke(app, ["gc", str(tmp_path), "--older-than", "1d", "--yes"])
    assert found.exit_code != 0
    assert "1 of 2 slabs" in str(found.output) + str(found.exception)
    assert first.exists()
    assert not second.exists()
