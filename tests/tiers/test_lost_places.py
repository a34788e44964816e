"""A place that is taken away from a tier in use: removed, renamed or replaced. It is seen, told of, and opened anew."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvpact import own_files
from kvpact.identity.keys import BlockKey
from kvpact.tiers import awaited
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import GetDone, PutDone, TierExecutor
from kvpact.tiers.registry import TierContext
from kvpact.tiers.urls import parse_tier_url
from polling import until
from slab_scenes import NAMESPACE, SLOT, chain, content, filled, memory

URLS = {
    "disk": "disk://{}/kv?capacity=16MiB",
    "dir": "dir://{}/kv?capacity=16MiB",
    "file": "file://{}/kv",
}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "LOOK_SECONDS", 0.002)


class Used:
    """A tier as an engine uses it."""

    def __init__(self, url: str) -> None:
        (self.opened,) = open_tiers([parse_tier_url(url)], TierContext(NAMESPACE, SLOT), 10.0)
        executor = TierExecutor(self.opened, 2, 1 << 20)
        self.client = TierClient(executor, LentSlots(64), timeout=10.0, clock=time.monotonic)

    def put(self, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """Store a chain; which of its blocks are held afterwards."""
        assert self.client.submit_put("put", keys, filled(keys), SLOT * len(keys), before=())
        done = self._done()
        assert isinstance(done, PutDone)
        return done.each

    def get(self, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """Read a chain; which of its blocks arrived, all of them right."""
        buffers = memory(len(keys))
        assert self.client.submit_get("get", keys, buffers, before=())
        done = self._done()
        assert isinstance(done, GetDone)
        for key, buffer, arrived in zip(keys, buffers, done.each, strict=True):
            assert not arrived or b"".join(buffer) == content(key)
        return done.each

    def _done(self) -> Any:
        until(lambda: self.client.executor.has_completions)
        return next(self.client.poll())

    def until_changed(self) -> None:
        """Until the client has another tier than before."""
        until(self.client.use_what_is_there)

    def until_anew(self) -> None:
        """Until the client has an opened tier in another place of the old one."""
        until(lambda: self.client.use_what_is_there() and not self.client.health.is_awaited)

    def close(self) -> None:
        assert self.client.close(5.0)


@pytest.fixture(params=sorted(URLS))
def used(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Used]:
    (tmp_path / "mounted").mkdir()
    with closing(Used(URLS[request.param].format(tmp_path / "mounted"))) as used:
        yield used


def remove(folder: Path) -> None:
    """At once, since an engine makes what it misses anew while it goes."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def replace(folder: Path) -> None:
    """By an empty folder of the same name, as a volume that is mounted anew shows it."""
    rename(folder)
    folder.mkdir()


TAKEN: dict[str, Callable[[Path], object]] = {
    "named folder removed": remove,
    "own folder removed": lambda folder: remove(folder / "kvpact"),
    "renamed": rename,
    "replaced": replace,
    "own folder replaced": lambda folder: replace(folder / "kvpact"),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_h122_a_place_that_is_taken_away_is_opened_anew_without_what_it_held(
    used: Used, tmp_path: Path, take: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = chain("old", 3), chain("new", 3)
    assert used.put(old) == (True,) * 3
    take(tmp_path / "mounted" / "kv")
    used.until_anew()
    assert used.get(old) == (False,) * 3
    assert used.put(new) == used.get(new) == (True,) * 3
    assert used.client.tier.health().ok
    (said,) = [line.getMessage() for line in caplog.records if "lost its content and is opened anew" in line.msg]
    assert str(tmp_path / "mounted" / "kv") in said
    used.close()
    again = Used(used.opened.url.url)
    assert again.get(new) == (True,) * 3, "and what is stored from then on is there after a restart"
    again.close()


def test_h122_until_it_can_be_opened_its_loss_is_told_as_the_reason(used: Used, tmp_path: Path) -> None:
    """Nothing is written or asked meanwhile, so that nothing is lost in silence; nobody waits."""
    mount = tmp_path / "mounted"
    remove(mount)
    used.until_changed()
    assert used.client.health.is_paused
    assert (
        "was removed; it is opened anew" in used.client.health.trouble or "does not exist" in used.client.health.trouble
    )
    until(lambda: "does not exist; create it" in used.client.health.trouble)
    assert not used.client.health.may_write
    assert not used.client.health.may_read
    assert used.client.capacity().used_bytes == 0
    mount.mkdir()
    used.until_anew()
    assert not used.client.health.is_paused


def test_h122_counts_go_on_where_a_tier_is_opened_anew(used: Used, tmp_path: Path) -> None:
    damaged = used.client.counts().damaged
    (key, *_) = chain("one", 1)
    assert used.put([key]) == (True,)
    for path in (
        path for path in (tmp_path / "mounted" / "kv").rglob("*") if path.is_file() and path.stat().st_size > SLOT
    ):
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"damage")
    assert used.get([key]) in ((False,), (True,))
    damaged = used.client.counts().damaged
    remove(tmp_path / "mounted" / "kv")
    used.until_anew()
    assert used.client.counts().damaged == damaged


def test_h122_a_lost_slab_has_given_its_bytes_back_before_there_is_another(tmp_path: Path) -> None:
    """Although another engine has it open, to read from it: old and new keep to one capacity."""
    with closing(Used(URLS["disk"].format(tmp_path))) as used:
        assert used.put(chain("old", 8)) == (True,) * 8
        (slab,) = (tmp_path / "kv" / "kvpact").glob("*.slab")
        with slab.open("rb") as reader:
            assert os.fstat(reader.fileno()).st_blocks > 0
            left: list[int] = []
            really = DiskTier.open

            def opened(*arguments: Any, **settings: Any) -> DiskTier:
                left.append(os.fstat(reader.fileno()).st_blocks)
                return really(*arguments, **settings)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DiskTier, "open", opened)
                slab.unlink()
                used.until_anew()
            assert left == [0]


def test_h122_a_place_is_not_opened_anew_while_an_operation_holds_the_old_one_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Used(URLS["disk"].format(tmp_path))) as used:
        keys, began, go_on = chain("old", 2), threading.Event(), threading.Event()
        assert used.put(keys) == (True,) * 2
        slab = used.client.tier.slab  # type: ignore[attr-defined]
        really = slab.preadv

        def hang(*arguments: Any) -> int:
            began.set()
            assert go_on.wait(20.0)
            return int(really(*arguments))

        monkeypatch.setattr(type(slab), "preadv", staticmethod(hang))
        assert used.client.submit_get("hangs", keys, memory(2), before=())
        assert began.wait(20.0)
        looks: list[int] = []
        really_released = vars(DiskTier)["released"].fget

        def released(tier: DiskTier) -> bool:
            looks.append(1)
            return bool(really_released(tier))

        monkeypatch.setattr(DiskTier, "released", property(released))
        remove(tmp_path / "kv")
        until(lambda: len(looks) > 10)
        used.client.use_what_is_there()
        assert used.client.health.is_awaited
        assert not (tmp_path / "kv").exists()
        go_on.set()
        used.until_anew()


def test_h122_who_looks_at_the_place_is_never_the_thread_that_uses_the_tier(
    used: Used, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that hangs, as on a server that is away, costs nothing but the look."""
    began, go_on, threads = threading.Event(), threading.Event(), set[str]()
    really = own_files.OwnFolder.lost

    def hang(folder: own_files.OwnFolder) -> str:
        threads.add(threading.current_thread().name)
        began.set()
        assert go_on.wait(20.0)
        return really(folder)

    monkeypatch.setattr(own_files.OwnFolder, "lost", hang)
    assert began.wait(20.0)
    keys = chain("served meanwhile", 3)
    assert used.put(keys) == used.get(keys) == (True,) * 3
    assert not used.client.use_what_is_there()
    go_on.set()
    assert threads == {"kvpact-watch-tier"}


def test_h122_what_cannot_be_judged_is_not_lost(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def refused(path: Path, **_: Any) -> Any:
        looks.append(1)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refused)
    until(lambda: len(looks) > 5)
    monkeypatch.undo()
    assert not used.client.use_what_is_there()
    assert used.put(chain("still there", 1)) == (True,)


def test_h122_a_cleaner_that_removes_the_empty_folder_of_unfinished_records_stops_nothing(tmp_path: Path) -> None:
    """As those do that keep /tmp and /var/tmp small."""
    with closing(Used(URLS["dir"].format(tmp_path))) as used:
        keys = chain("old", 2)
        assert used.put(keys) == (True,) * 2
        (tmp_path / "kv" / "kvpact" / ".kvpact" / "new").rmdir()
        used.until_anew()
        assert used.get(keys) == (True,) * 2, "what is still there is found"
        assert used.put(chain("new", 2)) == (True,) * 2
