"""What kvpact writes is for its user alone, or for one group, also in a directory where everybody may do everything.

Other users are real: children of these tests with user ids of their own.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chain_calls import put_document, served_of_document
from kvpact.cache.stats_file import StatsFile
from kvpact.cache.status import EngineStatus
from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.identity.weights import DigestMemory, FileStamp
from kvpact.memory.arena import ArenaSegment
from kvpact.tiers.base import Tier
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document
from other_user import GROUP, OTHER_USER, SECOND_USER, THIRD_USER, as_user, needs_root, open_place

SLOT = 8192
NAMESPACE = Namespace({"model": "private", "block_size": "16"})
KINDS = ("disk", "dir", "file")

STORE = """
def stored(url, name, seconds=0.0):
    place = registry.TierContext(Namespace({"model": "private", "block_size": "16"}), 8192)
    tier = registry.open_tier(parse_tier_url(url), place)
    wanted = document(name, 4)
    count = sum(tier.put(chained(wanted.keys, filled_buffers(wanted.keys, 8192, 2))))
    time.sleep(seconds)
    tier.close()
    return count
def served(url, name):
    place = registry.TierContext(Namespace({"model": "private", "block_size": "16"}), 8192)
    tier = registry.open_tier(parse_tier_url(url), place)
    wanted = document(name, 4)
    buffers = empty_buffers(4, 8192, 2)
    count = leading(tier.get(wanted.keys, buffers))
    assert all(b"".join(buffer) == content(key, 8192) for key, buffer in zip(wanted.keys[:count], buffers))
    tier.close()
    return count
"""

READ_ALL = """
read = []
for folder, folders, names in os.walk(place):
    read += [name for name in names if attempt(lambda: open(os.path.join(folder, name), "rb").close()) == "done"]
print(json.dumps(read))
"""


def url_of(kind: str, place: Path, group: int | None = None) -> str:
    options = [] if kind == "file" else ["capacity=16MiB"]
    options += [] if group is None else [f"group={group}"]
    return f"{kind}://{place}" + (f"?{'&'.join(options)}" if options else "")


def open_here(kind: str, place: Path, group: int | None = None) -> Tier:
    return open_tier(parse_tier_url(url_of(kind, place, group)), TierContext(NAMESPACE, SLOT))


def put(tier: Tier, name: str, blocks: int = 4) -> int:
    return put_document(tier, document(name, blocks), SLOT)


def served(tier: Tier, name: str) -> int:
    return served_of_document(tier, document(name, 4), SLOT)


def modes(place: Path) -> dict[str, set[str]]:
    """The modes of all folders and of all files below a directory."""
    found: dict[str, set[str]] = {"folders": set(), "files": set()}
    for folder, folders, names in os.walk(place):
        for what, entries in (("folders", folders), ("files", names)):
            found[what] |= {f"{stat.S_IMODE(os.lstat(os.path.join(folder, entry)).st_mode):o}" for entry in entries}
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    with open_place() as place:
        yield place


def open_places(place: Path) -> list[Path]:
    """A folder for each of `KINDS`, in which every user may do everything."""
    places = [place / kind for kind in KINDS]
    for each in places:
        each.mkdir()
        each.chmod(0o777)
    return places


# Who can read


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_h84_nobody_else_can_read_what_is_stored_whatever_the_umask(umask: int, place: Path) -> None:
    places = open_places(place)
    storing = f"{STORE}\nprint(json.dumps([stored(url, 'secrets') for url in {[*map(url_of, KINDS, places)]}]))"
    assert as_user(SECOND_USER, storing, place, umask=umask) == [4, 4, 4]
    assert [modes(place) for place in places] == [{"folders": {"700"}, "files": {"600"}}] * 3
    assert as_user(OTHER_USER, READ_ALL, place) == []


@needs_root
def test_h84_while_a_tier_is_open_nobody_else_can_read_it(place: Path) -> None:
    places = open_places(place)
    tiers = [*map(open_here, KINDS, places)]
    assert [put(tier, "secrets") for tier in tiers] == [4, 4, 4]
    assert [modes(place) for place in places] == [{"folders": {"700"}, "files": {"600"}}] * 3
    assert as_user(OTHER_USER, READ_ALL, place) == []
    for tier in tiers:
        tier.close()


@needs_root
def test_h84_a_group_that_is_named_shares_and_nobody_else(place: Path) -> None:
    """Two users of the group, with the umask that most have: each serves what the other stored."""
    places = open_places(place)
    urls = [url_of(kind, its, GROUP) for kind, its in zip(KINDS, places, strict=True)]
    members: dict[str, Any] = {"groups": (GROUP,), "umask": 0o022}
    for user, name in ((SECOND_USER, "first"), (OTHER_USER, "second")):
        storing = f"{STORE}\nprint(json.dumps([stored(url, {name!r}) for url in {urls}]))"
        assert as_user(user, storing, place, **members) == [4, 4, 4]
    for user in (SECOND_USER, OTHER_USER):
        both = f"{STORE}\nprint(json.dumps([served(url, name) for url in {urls} for name in ('first', 'second')]))"
        assert as_user(user, both, place, **members) == [4] * 6
    assert [modes(place) for place in places] == [{"folders": {"2770"}, "files": {"660"}}] * 3
    assert as_user(THIRD_USER, READ_ALL, place) == []
    without = f"""{STORE}
said = []
for url in {urls}:
    try: stored(url, 'third')
    except TierError as error: said.append(str(error))
print(json.dumps(said))"""
    messages = as_user(THIRD_USER, without, place)
    assert isinstance(messages, list)
    owner = f"(user {SECOND_USER}, group {GROUP}, mode 2770)"
    for its, message in zip(places, messages, strict=True):
        assert f"{its}/kvpact is not a folder of user {THIRD_USER} {owner}" in message
        assert f"its group {GROUP}, and this user a member of that" in message


def test_h84_a_group_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="knows no group 'no-such-group'; give its name or number"):
        open_tier(parse_tier_url(f"dir://{tmp_path}?capacity=1MiB&group=no-such-group"), TierContext(NAMESPACE, SLOT))


@pytest.mark.parametrize("kind", KINDS)
def test_h84_a_folder_of_ours_that_was_opened_to_others_is_closed_again(kind: str, tmp_path: Path) -> None:
    open_here(kind, tmp_path).close()
    (tmp_path / "kvpact").chmod(0o777)
    tier = open_here(kind, tmp_path)
    assert stat.S_IMODE((tmp_path / "kvpact").stat().st_mode) == 0o700
    assert put(tier, "more") == 4
    tier.close()


def test_h84_small_files_are_for_the_user_alone(tmp_path: Path) -> None:
    """The counts that an engine writes, the digests that it remembers, the memory that its processes share."""
    before = os.umask(0)
    try:
        file = StatsFile(tmp_path / "stats.json")
        file.close(EngineStatus(pid=1, model="m", block_size=16, metrics={"lookups": 1.0}))
        (tmp_path / "weights").write_bytes(b"weights")
        memory = DigestMemory(tmp_path / "cache" / "kvpact" / "weights.json")
        memory.remember(tmp_path / "weights", FileStamp.of(tmp_path / "weights"), "ab" * 32)
    finally:
        os.umask(before)
    kept = tmp_path / "cache" / "kvpact"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    for path in (tmp_path / "stats.json", kept / "weights.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert memory.find(tmp_path / "weights", FileStamp.of(tmp_path / "weights")) == "ab" * 32
    segment = ArenaSegment.create(2, 4096)
    assert stat.S_IMODE(os.fstat(segment.address().descriptor).st_mode) == 0o600
    segment.close()


@pytest.mark.parametrize("kind", ["disk", "dir"])
def test_h84_what_an_older_kvpact_left_is_said(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It lay right in the directory, with modes that it had from the umask: nobody reads it."""
    if kind == "disk":
        (tmp_path / "0123456789abcdef.slab").write_bytes(b"old")
    else:
        (tmp_path / ".kvpact").mkdir()
    with caplog.at_level(logging.WARNING, logger="kvpact"):
        tier = open_here(kind, tmp_path)
    assert "of an older kvpact" in caplog.text
    assert "remove them" in caplog.text
    assert put(tier, "new") == 4
    tier.close()


# Who can get in the way


def refusal(kind: str, place: Path) -> str:
    with pytest.raises(TierError) as refused:
        open_here(kind, place)
    message = str(refused.value)
    assert "\n" not in message
    return message


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_h86_a_folder_of_our_name_that_another_user_made_is_refused(kind: str, place: Path) -> None:
    as_user(OTHER_USER, "(place / 'kvpact').mkdir(0o777); os.chmod(place / 'kvpact', 0o777); print(0)", place)
    message = refusal(kind, place)
    assert f"{place}/kvpact is not a folder of user 0 (user {OTHER_USER}" in message
    assert "name another directory" in message
    assert not list((place / "kvpact").iterdir())
    assert [path.name for path in place.iterdir()] == ["kvpact"]


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_h86_a_link_of_our_name_is_refused(kind: str, place: Path, tmp_path: Path) -> None:
    """It leads to a folder of the victim's own, where files of kvpact's would hurt."""
    as_user(OTHER_USER, f"(place / 'kvpact').symlink_to({str(tmp_path)!r}); print(0)", place)
    message = refusal(kind, place)
    assert f"{place}/kvpact is a link to {tmp_path}" in message
    assert "remove it, or give another directory" in message
    assert not list(tmp_path.iterdir())


HOLD = """
held = []
for folder, folders, names in os.walk(place):
    for name in [".", *names]:
        try:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(descriptor)
        except OSError:
            pass
print(json.dumps(len(held)), flush=True)
sys.stdin.read()
"""


@contextmanager
def locks_held_by_another_user(place: Path) -> Iterator[None]:
    """Everything that another user can open is locked by him."""
    program = f"import fcntl, json, os, sys\nplace = {str(place)!r}\nos.setgid({OTHER_USER}); os.setuid({OTHER_USER})"
    with subprocess.Popen(
        [sys.executable, "-c", program + HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert json.loads(other.stdout.readline()) >= 1, "the directory itself can be locked by everybody"
        yield
        other.stdin.close()


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_h86_no_lock_of_ours_can_be_taken_by_another_user(kind: str, place: Path) -> None:
    """He locks what he can open, before a tier is opened and again while it is: nothing waits for him."""
    with locks_held_by_another_user(place):
        tier = open_here(kind, place)
    with locks_held_by_another_user(place):
        assert put(tier, "one", 4) == 4
        assert served(tier, "one") == 4
        tier.close()
        tier = open_here(kind, place)
        assert served(tier, "one") == 4
        tier.close()


@needs_root
def test_h86_the_lock_of_the_folder_is_a_private_file_of_ours(place: Path) -> None:
    tier = open_here("disk", place)
    lock = place / "kvpact" / "lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # the tier itself may have it for a moment
        with pytest.raises(TierError, match=r"has held .*/kvpact locked for"):
            open_tier(parse_tier_url(url_of("disk", place)), TierContext(Namespace({"model": "b"}), SLOT))
    tier.close()


@needs_root
def test_h86_a_temporary_name_never_follows_a_link(place: Path, tmp_path: Path) -> None:
    """Another user has put links where a slab and a stats file are written before they get their names."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    slab = f"{NAMESPACE.name}.new"
    plant = f"for name in ({slab!r}, 'lock', 'stats.{os.getpid()}.tmp', '.stats.json.{os.getpid()}.tmp'):\n"
    plant += f"    (place / name).symlink_to({str(precious)!r})\nprint(0)"
    as_user(OTHER_USER, plant, place)
    tier = open_here("disk", place)
    assert put(tier, "one") == 4
    tier.close()
    status = EngineStatus(pid=1, model="m", block_size=16, metrics={"lookups": 1.0})
    StatsFile(place / "stats.json").close(status)
    assert json.loads((place / "stats.json").read_text())["engines"][0]["metrics"] == status.metrics
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["lock", f"{NAMESPACE.name}.new", f"{NAMESPACE.name}.slab"])
def test_h86_nor_does_any_name_inside_our_folder(name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "cache" / "kvpact").mkdir(parents=True)
    (tmp_path / "cache" / "kvpact" / name).symlink_to(precious)
    if name != "lock":
        open_here("disk", tmp_path / "cache").close()
    else:
        assert "symbolic link" in refusal("disk", tmp_path / "cache")
    assert precious.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("kind", ["disk", "dir"])
def test_h86_whoever_takes_our_folders_name_while_we_use_it_gets_nothing(kind: str, place: Path) -> None:
    """In a directory that is not sticky others can rename what is ours."""
    tier = open_here(kind, place)
    assert put(tier, "before") == 4
    swap = "(place / 'kvpact').rename(place / 'gone'); (place / 'kvpact').mkdir(); os.chmod(place / 'kvpact', 0o777)"
    as_user(OTHER_USER, f"{swap}; print(0)", place)
    assert put(tier, "after") == 4
    assert [served(tier, name) for name in ("before", "after")] == [4, 4]
    assert not list((place / "kvpact").iterdir())
    tier.close()
    assert "is not a folder of user 0" in refusal(kind, place)


@needs_root
def test_h86_digests_that_somebody_else_could_have_written_are_not_believed(tmp_path: Path) -> None:
    """A planted digest would let one model's weights pass for another's."""
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    stamp = FileStamp.of(weights)
    kept = tmp_path / "cache" / "kvpact" / "weights.json"
    memory = DigestMemory(kept)
    memory.remember(weights, stamp, "ab" * 32)
    assert memory.find(weights, stamp) == "ab" * 32
    kept.chmod(0o666)
    assert memory.find(weights, stamp) is None
    kept.chmod(0o600)
    os.chown(kept, OTHER_USER, OTHER_USER)
    assert memory.find(weights, stamp) is None
    os.chown(kept, 0, 0)
    os.chown(kept.parent, OTHER_USER, OTHER_USER)
    assert memory.find(weights, stamp) is None


# What must still work


@needs_root
def test_h84_engines_of_one_user_share_and_one_whose_parent_folder_is_another_users_works(place: Path) -> None:
    """Containers that run as one user: the directory is anybody's, the folder in it theirs."""
    os.chown(place, OTHER_USER, OTHER_USER)
    place.chmod(0o777)
    for kind in ("dir", "file"):
        store = place / kind
        store.mkdir(mode=0o777)
        store.chmod(0o777)
        url = url_of(kind, store)
        assert as_user(SECOND_USER, f"{STORE}\nprint(json.dumps(stored({url!r}, 'one')))", place) == 4
        assert as_user(SECOND_USER, f"{STORE}\nprint(json.dumps(served({url!r}, 'one')))", place) == 4
