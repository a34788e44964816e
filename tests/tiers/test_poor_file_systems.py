"""File systems that lack something: hard links, modes, locks, times, room. Each is said in one sentence, and what does
not need it works."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chain_calls import put_document, served_of_document
from kvpact.identity.keys import Namespace
from kvpact.tiers.objects.store import open_objects
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.shared import tier as shared_tier
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document
from poor_file_system import run_without

SLOT = 64 << 10
NAMESPACE = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})

STORES = """
import logging, sys
from chain_calls import put_document, served_of_document
from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document
logging.basicConfig(format="%(message)s")
namespace = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})
for url in sys.argv[1].split():
    try:
        for _ in range(2):
            tier = open_tier(parse_tier_url(url), TierContext(namespace, 4096))
            wanted = document("document", 8)
            print(put_document(tier, wanted, 4096), served_of_document(tier, wanted, 4096), tier.health())
            tier.close()
    except TierError as error:
        print(error)
"""
"""Stores eight blocks in each of these tiers, and finds them again after a restart."""

WORKS = "8 8 TierHealth(ok=True, reason='', readable=True)"


KINDS = ("disk", "dir", "file")


def url_of(kind: str, place: Path) -> str:
    return {"file": f"file://{place}?timeout=20s"}.get(kind, f"{kind}://{place}?capacity=8MiB")


def urls_in(place: Path, *kinds: str) -> str:
    """Tiers of these kinds, each in a folder that it makes."""
    return " ".join(url_of(kind, place / kind) for kind in kinds)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_h104_without_hard_links_all_is_stored(tmp_path: Path, number: int) -> None:
    said = run_without("link,linkat", number, STORES, urls_in(tmp_path, *KINDS)).splitlines()
    assert [line for line in said if not line.startswith("file tier")] == [WORKS] * 6
    about = [line for line in said if "has no hard links: of engines that store the same block" in line]
    assert len(about) == 2, "once a start"


def test_h104_without_modes_all_is_stored_and_it_is_said_that_others_may_look(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can use a folder whose mode the umask has spoilt")
    program = "import os\nos.umask(0o100)\n" + STORES
    said = run_without("chmod,fchmod,fchmodat", errno.EPERM, program, urls_in(tmp_path, *KINDS)).splitlines()
    assert [line for line in said if line == WORKS] == [WORKS] * 6, said


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        ("chmod,fchmod,fchmodat", errno.EPERM),
        ("fsync", errno.EINVAL),
        ("fallocate", errno.ENOSYS),
        ("setpriority", errno.EPERM),
        ("sched_getaffinity", errno.EPERM),
        ("statfs,fstatfs", errno.ENOSYS),
        ("fadvise64", errno.ENOSYS),
    ],
)
def test_what_a_file_system_or_container_refuses_and_a_tier_can_do_without_costs_nothing(
    tmp_path: Path, calls: str, number: int
) -> None:
    """No thread ends by it either."""
    assert run_without(calls, number, STORES, urls_in(tmp_path, *KINDS)).splitlines() == [WORKS] * 6


def test_h104_without_locks_a_disk_tier_says_what_to_do_and_others_need_none(tmp_path: Path) -> None:
    first, *others = run_without("flock", errno.ENOLCK, STORES, urls_in(tmp_path, *KINDS)).splitlines()
    assert first == (
        f"disk tier: {tmp_path}/disk/kvpact/lock cannot be locked: No locks available; give a directory on a local "
        "disk, or use dir:// there"
    )
    assert others == [WORKS] * 4


def test_h104_without_times_all_is_stored(tmp_path: Path) -> None:
    assert run_without("utimensat", errno.EPERM, STORES, urls_in(tmp_path, "dir", "file")).splitlines() == [WORKS] * 4


@contextmanager
def mounted(place: Path, limit: str) -> Iterator[None]:
    """A file system in memory with this limit, as `mount` takes it."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(place)], check=False).returncode:
        pytest.skip("mounting needs more rights than this user has")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for some 30 blocks."""
    with mounted(tmp_path, "size=2m"):
        yield tmp_path


@pytest.mark.parametrize(("kind", "inodes", "documents"), [("dir", 350, 110), ("file", 40, 60)])
def test_h95_a_file_system_that_takes_no_more_files_is_no_dead_end(
    tmp_path: Path, kind: str, inodes: int, documents: int
) -> None:
    """Of these records each is a file, in dir:// one of up to 256 folders."""
    with mounted(tmp_path, f"size=64m,nr_inodes={inodes}"):
        tier = open_tier(parse_tier_url(url_of(kind, tmp_path)), TierContext(NAMESPACE, 4096))
        wanted = [document(f"document {number}", 4) for number in range(documents)]
        assert [put_document(tier, one, 4096) for one in wanted] == [4] * len(wanted)
        assert [served_of_document(tier, one, 4096) for one in (wanted[0], wanted[-1])] == [0, 4]
        assert tier.health().ok
        assert "the least recently used blocks are evicted" in tier.health().reason
        tier.close()


def objects_in(place: Path) -> SharedTier:
    return SharedTier(open_objects(parse_tier_url(f"file://{place}?timeout=20s")), NAMESPACE, SLOT)


def test_h95_objects_on_a_full_file_system_give_way_to_new_ones(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = objects_in(small_disk)
    used = document("used", 4)
    assert put_document(tier, used, SLOT) == 4
    for number in range(20):
        wanted = document(f"document {number}", 4)
        assert put_document(tier, wanted, SLOT) == 4, "the new one is stored, in the same call"
        assert served_of_document(tier, wanted, SLOT) == 4
        assert tier.leading(used.keys) == 4, "what is used stays"
    assert served_of_document(tier, used, SLOT) == 4
    assert tier.leading(document("document 0", 4).keys) == 0
    assert tier.counts().evicted > 10
    assert tier.counts().dropped_writes == tier.counts().damaged == 0
    assert tier.health().ok
    full = f"file://{small_disk}: No space left on device"
    assert tier.health().reason == f"{full}; the least recently used blocks are evicted"
    assert caplog.text.count("No space left on device") == 1
    again = objects_in(small_disk)
    assert put_document(again, document("after a restart", 4), SLOT) == 4
    assert again.leading(used.keys) == 4
    tier.delete(document("document 19", 4).keys)
    monkeypatch.setattr(shared_tier, "FULL_SECONDS", 0.0)
    assert put_document(tier, document("fits", 2), SLOT) == 2
    assert tier.health().reason == ""
    tier.close()
    again.close()
