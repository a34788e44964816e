"""Commands that only look leave every byte, time, name and lock as it was; what is written down to last is synced."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from typer.testing import CliRunner

from kvpact.cli.app import app
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import Tier, chained
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document, filled_buffers
from servers.object_server import CREDENTIALS, Traffic, object_server
from servers.redis_server import redis_server

KVPACT = Path(sys.executable).with_name("kvpact")
SLOT = 8192
PLACE = TierContext(Namespace({"model": "looked-at", "block_size": "16"}), SLOT)
DOCUMENT = document("looked at", 32)
LOOKING = (("inspect",), ("verify",), ("tiers",), ("gc", "--namespace", "nothing"))
"""The last one is refused, after it has looked for what it is to remove."""


def kvpact(*arguments: object) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code in (0, 2) or arguments[0] == "tiers", done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def installed_kvpact(*arguments: object) -> str:
    """What the installed command prints, as an operator runs it."""
    done = subprocess.run([KVPACT, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def store(url: str, blocks: int = 32) -> Tier:
    tier = open_tier(parse_tier_url(url), PLACE)
    keys = DOCUMENT.keys[:blocks]
    assert tier.put(chained(keys, filled_buffers(keys, SLOT, 2))) == [True] * blocks
    return tier


Entry = tuple[str, int, int, int, int, int, str]


def tree(place: Path) -> list[Entry]:
    """Every folder and file: name, inode, mode, size, time of the last write, of the last change, content."""
    found = []
    for path in sorted((place, *place.rglob("*"))):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        size = about.st_size if path.is_file() else 0
        found.append(
            (str(path), about.st_ino, about.st_mode, size, about.st_mtime_ns, about.st_ctime_ns, content)
        )  # fmt: skip
    return found


def require_looking_only(place: Path, *urls: object) -> None:
    """Each command that only looks is run on each URL, also as installed where nothing is, and changes nothing."""
    before = tree(place)
    for command, *options in LOOKING:
        for url in urls:
            if not str(url).startswith("disk:") or command != "gc":  # which locks a disk tier's directory
                run = installed_kvpact if "/empty" in str(url) and command == "inspect" else kvpact
                run(command, url, *options)
                assert tree(place) == before, f"{command} {url} has changed what it was to look at"


def test_h73_looking_at_a_shared_directory_changes_nothing(tmp_path: Path) -> None:
    """Neither beside an engine nor without; not with a smaller capacity, nor where the ledger is lost, nor a dead
    writer's files: all of that an engine would put in order."""
    place = tmp_path / "store"
    place.mkdir()
    url = f"dir://{place}?capacity=1GiB"
    small = f"dir://{place}?capacity={16 * SLOT}"
    tier = store(url)
    require_looking_only(place, url, small, f"dir://{place}")
    tier.close()
    for path in place.rglob("*"):
        if path.is_file() and path.name not in ("stocktaking", "collector"):
            os.utime(path, ns=(10**18, 10**18))  # long ago: a look-up by an engine would count as use
    (stocktaking,) = place.rglob("stocktaking")
    left = stocktaking.parent / "new" / f"{os.uname().nodename}+1+999999999+01234567.0"
    left.write_bytes(b"half a rec")
    require_looking_only(place, small)
    stocktaking.unlink()
    require_looking_only(place, small, f"dir://{place}")
    assert " 32 " in kvpact("inspect", small)


def test_h73_looking_at_a_directory_of_objects_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.mkdir()
    url = f"file://{place}"
    tier = store(url)
    require_looking_only(place, url)
    tier.close()
    require_looking_only(place, url)
    assert " 32 " in kvpact("inspect", url)


def test_h73_looking_at_slabs_changes_nothing(tmp_path: Path) -> None:
    """Nor does it make the lock file of an engine; an engine that has the slab open notices nothing."""
    place = tmp_path / "slabs"
    url = f"disk://{place}?capacity=16MiB"
    tier = store(url)
    require_looking_only(place, url)
    assert f"pid {os.getpid()}" in kvpact("inspect", place)
    tier.close()
    for lock in place.rglob("lock"):
        lock.unlink()
    require_looking_only(place, url)
    assert "idle" in kvpact("inspect", place)
    tier = open_tier(parse_tier_url(url), PLACE)
    assert tier.lookup(DOCUMENT.keys) == [True] * 32
    tier.close()


@pytest.mark.parametrize("scheme", ["disk", "dir", "file"])
def test_h73_looking_at_a_place_makes_nothing_there(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    capacity = "" if scheme == "file" else "?capacity=1GiB"
    require_looking_only(tmp_path, *(f"{scheme}://{tmp_path}/{name}{capacity}" for name in ("empty", "missing")))
    for name in ("empty", "missing"):
        assert " works" in kvpact("tiers", f"{scheme}://{tmp_path}/{name}{capacity}")


READS = {"STRLEN", "GETRANGE", "SCAN", "INFO", "SELECT", "PING", "HELLO", "AUTH", "CLIENT", "CONFIG"}
"""Commands by which nothing in a server changes; CONFIG is this test's own, and CLIENT says who asks."""


def test_h73_looking_at_a_redis_server_changes_nothing(tmp_path: Path) -> None:
    """Records that expire do not live longer for being read by a tool."""
    with redis_server(tmp_path / "redis") as server, server.client() as client:
        store(f"redis://{server.address}?timeout=20s&expiry=1h&part=4KiB", 4).close()
        before = {key: client.dump(key) for key in client.scan_iter()}
        deadlines = {key: client.execute_command("PEXPIRETIME", key) for key in before}
        client.config_resetstat()
        for command, *options in LOOKING:
            kvpact(command, f"redis://{server.address}?timeout=20s&expiry=2h", *options)
        asked = {name.removeprefix("cmdstat_").partition("|")[0].upper() for name in client.info("commandstats")}
        assert asked - READS == set()
        assert {key: client.dump(key) for key in client.scan_iter()} == before
        assert {key: client.execute_command("PEXPIRETIME", key) for key in before} == deadlines


@pytest.fixture(scope="module")
def s3() -> Iterator[Traffic]:
    with pytest.MonkeyPatch.context() as patch, object_server() as traffic:
        for name, text in CREDENTIALS.items():
            patch.setenv(name, text)
        yield traffic


def test_h73_looking_at_a_bucket_changes_nothing(s3: Traffic) -> None:
    def objects() -> list[object]:
        bucket = S3Store("bucket", endpoint=s3.server, client_options={"allow_http": True})
        pages = list(obstore.list(bucket, prefix="looked"))
        entries = (entry for page in pages for entry in page)
        return [(entry["path"], entry["size"], entry["e_tag"], entry["last_modified"]) for entry in entries]

    url = f"s3://bucket/looked?endpoint={s3.endpoint}&allow_http=true&timeout=20s"
    store(url, 4).close()
    before = objects()
    assert before
    with s3.counted() as requests:
        for command, *options in LOOKING:
            kvpact(command, url, *options)
    assert {request.method for request in requests} <= {"GET", "HEAD"}
    assert objects() == before


# What must outlast a power cut


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, name of the file) of each sync and each change of a name, in order."""
    made: list[tuple[str, str]] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        made.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        real_sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        made.append(("rename", f"{Path(source).name} {Path(target).name}"))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return made


def test_h73_what_a_writer_reserves_and_an_evictor_finds_is_synced_before_it_counts(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    """A power cut that lost a reservation would let the directory grow beyond its capacity."""
    tier = store(f"dir://{tmp_path}?capacity=1GiB", 2)
    (counter,) = tmp_path.rglob("writers/*")
    (stocktaking,) = (call for call in calls if call[1].endswith(" stocktaking"))
    beside = stocktaking[1].split()[0]
    at = calls.index(stocktaking)
    assert ("sync", beside) in calls[:at], "the content before the name"
    assert calls[at + 1] == ("sync", ".kvpact"), "then the name"
    records = [index for index, (what, name) in enumerate(calls) if what == "rename" and len(name.split()[1]) == 64]
    assert len(records) >= 2
    assert calls.index(("sync", counter.name)) < records[0], "reserved before written"
    assert calls.index(("sync", "writers")) < records[0], "under a name that lasts"
    tier.close()


def test_h73_a_new_slabs_superblock_is_synced_before_it_has_its_name(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    store(f"disk://{tmp_path}?capacity=16MiB", 2).close()
    (slab,) = tmp_path.rglob("*.slab")
    at = calls.index(("rename", f"{slab.stem}.new {slab.name}"))
    assert ("sync", f"{slab.stem}.new") in calls[:at]
    assert calls[at + 1] == ("sync", slab.parent.name)
