"""What a writer that was killed in a put leaves in a `file://` store: obstore's NAME#1, which it lists nowhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chain_calls import put_document, served_of_document
from kvpact.cli.app import app
from kvpact.identity.keys import Namespace
from kvpact.tiers import use_clock
from kvpact.tiers.objects import files
from kvpact.tiers.objects.bucket import Bucket
from kvpact.tiers.objects.store import ObjectStore, open_objects
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document

NAMESPACE = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})
SLOT = 64 << 10
NAME = "0" * 16 + "/" + "1" * 64

WRITER = """
import sys
from kvpact.tiers.objects.store import open_objects
from kvpact.tiers.urls import parse_tier_url
store = open_objects(parse_tier_url(sys.argv[1]))
while True:
    store.write([sys.argv[2]], [[bytes(64 << 20)]])
    store.remove([sys.argv[2]])
"""


def open_store(place: Path) -> ObjectStore:
    return open_objects(parse_tier_url(f"file://{place}?timeout=20s"))


def unfinished(place: Path) -> list[Path]:
    return [path for path in (place / "kvpact").rglob("*#*") if path.is_file()]


def kill_in_a_put(place: Path) -> Path:
    """The file that a process left which was killed while it wrote a record."""
    url = f"file://{place}?timeout=20s"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, NAME], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + 60.0
    try:
        while not (left := [path for path in unfinished(place) if path.stat().st_size]):
            assert time.monotonic() < deadline
            assert writer.poll() is None
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(20.0)
    (path,) = left
    return path if path.exists() else kill_in_a_put(place)  # it was done a moment before


def leave(place: Path, name: str = NAME, nbytes: int = 1 << 20) -> Path:
    """A file as `kill_in_a_put` leaves it."""
    path = place / "kvpact" / f"{name}#1"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(nbytes))
    return path


def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what was written before a store's clock was asked last is that old."""
    monkeypatch.setattr(use_clock, "ABANDONED_SECONDS", -1.0, raising=False)


def test_h123_what_a_writer_killed_in_a_put_leaves_is_shown_and_goes_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = kill_in_a_put(tmp_path)
    monkeypatch.setattr(files, "TIDY_SECONDS", 0.0, raising=False)
    size = 512 * left.stat().st_blocks
    with closing(open_store(tmp_path)) as engine:
        assert left.exists(), "its writer may be at work"
        shown = CliRunner().invoke(app, ["inspect", f"file://{tmp_path}", "--json"])
        assert json.loads(shown.output)["unfinished_bytes"] == size
        shown = CliRunner().invoke(app, ["inspect", f"file://{tmp_path}"])
        assert "MiB in unfinished files, being written" in shown.output
        assert left.exists(), "a tool removes nothing"
        an_hour_later(monkeypatch)
        with closing(open_store(tmp_path)):
            assert not left.exists(), "who opens the store removes it"
        left.write_bytes(bytes(100))
        engine.write([NAME], [[b"a record"]])
        assert not left.exists(), "and who has it open and writes"
    assert "being written" not in CliRunner().invoke(app, ["inspect", f"file://{tmp_path}"]).output


def test_h123_what_is_being_written_or_is_somebody_elses_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [leave(tmp_path, name) for name in ("notes", "a/b", f"{'0' * 16}/notes", f"ours/{'1' * 64}")]
    others += [leave(tmp_path, f"{NAME}#x"), leave(tmp_path, f"{NAME}/below")]
    folder = tmp_path / "kvpact" / f"{'0' * 16}" / f"{'2' * 64}#1"
    folder.mkdir()
    link = folder.with_name(f"{'3' * 64}#1")
    link.symlink_to(others[0])
    fresh = leave(tmp_path, f"{'0' * 16}/{'4' * 64}")
    open_store(tmp_path).close()
    assert fresh.exists()
    an_hour_later(monkeypatch)
    open_store(tmp_path).close()
    assert not fresh.exists()
    assert all(path.exists() for path in (*others, folder, link))


def test_h123_on_a_full_file_system_what_is_left_goes_before_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=True)
    try:
        with closing(SharedTier(open_store(tmp_path), NAMESPACE, SLOT)) as tier:
            left = leave(tmp_path)
            assert isinstance(tier.store, ObjectStore)
            an_hour_later(monkeypatch)
            documents = [document(f"document {number}", 4) for number in range(5)]
            assert [put_document(tier, one, SLOT) for one in documents] == [4] * 5
            assert [served_of_document(tier, one, SLOT) for one in documents] == [4] * 5
            assert not left.exists()
            assert tier.counts().evicted == 0
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("name", ["notes", NAME])
def test_h123_in_a_bucket_nothing_is_looked_for(name: str) -> None:
    """There a put that was cut off leaves no object."""
    import obstore.store

    objects = Bucket(obstore.store.MemoryStore(), "s3://x", timeout=1.0, concurrency=1)
    with closing(ObjectStore(objects)) as store:
        assert objects.put(name, b"data") is not None
        assert store.unfinished().used_bytes == 0
        assert store.make_room(1 << 20) == 0
        assert objects.get(name) is not None
