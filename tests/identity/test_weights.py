"""Weights are told apart by all of their bytes, and a file that was read once is read again only if it has changed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kvpact.identity import weights
from kvpact.identity.weights import DigestMemory, FileStamp, ReadingStopped, WeightFiles, WeightsUnknown, file_digest

ROWS, ROW_BYTES = 4096, 256


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory: an embedding table in one tensor, another file in Torch's format, and settings."""
    place = tmp_path / "model"
    place.mkdir()
    header = json.dumps({"embed": {"dtype": "U8", "shape": [ROWS, ROW_BYTES], "data_offsets": [0, ROWS * ROW_BYTES]}})
    table = bytes(range(256)) * (ROWS * ROW_BYTES // 256)
    (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + table)
    (place / "extra.bin").write_bytes(bytes(8 << 20))
    (place / "config.json").write_text('{"_name_or_path": "here"}')
    age(place)
    return place


def age(place: Path, seconds: float = 60.0) -> None:
    """Let the files look older, as far as their times can be set."""
    for path in place.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are remembered although they were made just now: the time of their last change cannot be set."""
    monkeypatch.setattr(weights, "SETTLED_SECONDS", -1.0)


def digest(place: Path, memory: Path | None = None, *, with_code: bool = False) -> str:
    return WeightFiles(place, DigestMemory(memory), with_code=with_code).digest()


def overwrite(path: Path, start: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * count)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read, in order."""
    names: list[str] = []
    read = weights.file_digest

    def noted(path: Path, stopped: Callable[[], bool]) -> str:
        names.append(path.name)
        return read(path, stopped)

    monkeypatch.setattr(weights, "file_digest", noted)
    return names


def test_h39_rows_of_an_embedding_that_changed_are_seen(model: Path) -> None:
    """1,008 of 4,096, away from the tensor's first and middle bytes."""
    before, table = digest(model), model / "model.safetensors"
    overwrite(table, table.stat().st_size - 1008 * ROW_BYTES, 1008 * ROW_BYTES)
    assert digest(model) != before


def test_h39_three_quarters_of_a_file_that_changed_are_seen(model: Path) -> None:
    """Of one in Torch's format, which has no index: all but 4 KiB of each 16 KiB."""
    large = model / "large.bin"
    with large.open("wb") as file:
        file.truncate(64 << 20)
    before = digest(model)
    with large.open("r+b") as file:
        for start in range(0, 64 << 20, 16 << 10):
            file.seek(start + (4 << 10))
            file.write(b"\xff" * (12 << 10))
    changed = digest(model)
    assert changed != before
    overwrite(large, 1, 1)
    assert digest(model) != changed, "one byte"


def test_equal_content_is_equal_wherever_it_lies_and_whatever_its_configuration_is_called(
    model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "config.json").write_text('{"_name_or_path": "there"}')
    (copy / "README.md").write_text("about it")
    (copy / "tokenizer.json").write_text("{}")
    (copy / "original").mkdir()
    (copy / "original" / "consolidated.00.pth").write_bytes(b"the same weights in another format")
    assert digest(copy) == digest(model)


@pytest.mark.parametrize("name", ["quantize_config.json", "model.safetensors.index.json", "part/weights.pt"])
def test_h39_what_decides_what_a_model_computes_belongs_to_it(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text('{"bits": 4}')
    with_it = digest(model)
    (model / name).write_text('{"bits": 8}')
    assert len({before, with_it, digest(model)}) == 3


def test_h39_python_files_belong_to_it_where_the_engine_runs_them(model: Path) -> None:
    (model / "modeling.py").write_text("scale = 1")
    before = digest(model), digest(model, with_code=True)
    (model / "modeling.py").write_text("scale = 2")
    after = digest(model), digest(model, with_code=True)
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_a_blob_of_the_hubs_cache_is_its_name_and_a_copy_of_it_has_the_same_digest(
    model: Path, tmp_path: Path, readings: list[str]
) -> None:
    repository = tmp_path / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in model.glob("*.*"):
        blob = shutil.copy(path, blobs / sha256(path.read_bytes()).hexdigest())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    assert WeightFiles(snapshot, DigestMemory(None)).unread_bytes == 0
    of_snapshot = digest(snapshot)
    assert readings == []
    assert of_snapshot == digest(model)
    assert readings == ["extra.bin", "model.safetensors"]


def test_a_single_file_is_told_with_the_parts_that_belong_to_it(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    before = [digest(tmp_path / name) for name in ("a-00001-of-00002.gguf", "other.gguf")]
    (tmp_path / "a-00002-of-00002.gguf").write_bytes(b"GGUG")
    after = [digest(tmp_path / name) for name in ("a-00001-of-00002.gguf", "other.gguf")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]


def test_h39_a_restart_reads_only_what_has_changed(model: Path, tmp_path: Path, readings: list[str]) -> None:
    memory = tmp_path / "cache" / "weights.json"
    before = digest(model, memory)
    assert readings == ["extra.bin", "model.safetensors"]
    assert WeightFiles(model, DigestMemory(memory)).unread_bytes == 0
    assert digest(model, memory) == before
    assert len(readings) == 2, "a restart"
    stat = (model / "extra.bin").stat()
    overwrite(model / "extra.bin", 100, 1)
    os.utime(model / "extra.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest(model, memory) != before, "of equal size, its time of change set back"
    assert readings[2:] == ["extra.bin"]
    assert memory.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in memory.parent.iterdir()] == ["weights.json"]


def test_a_file_that_has_just_changed_is_not_remembered(
    model: Path, tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SETTLED_SECONDS", 60.0)
    for _ in range(2):
        digest(model, tmp_path / "weights.json")
    assert len(readings) == 4


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"{", b"[]", b'{"format": 2, "files": {}}', b'{"format": 1, "files": []}', b"[" * 100_000],
)
def test_a_damaged_memory_is_as_good_as_none(model: Path, tmp_path: Path, readings: list[str], content: bytes) -> None:
    memory = tmp_path / "weights.json"
    memory.write_bytes(content)
    for _ in range(2):
        digest(model, memory)
    assert len(readings) == 2, "read once, then remembered"


@pytest.mark.parametrize("entry", [None, 7, [], [[1, 2, 3, 4], "0" * 64], ["stamp", "x"], ["stamp", 5]])
def test_a_damaged_entry_is_as_good_as_none(model: Path, tmp_path: Path, readings: list[str], entry: object) -> None:
    memory = tmp_path / "weights.json"
    before = digest(model, memory)
    known = json.loads(memory.read_text())
    name = str(model / "extra.bin")
    stamp = known["files"][name][0]
    known["files"][name] = [stamp, *entry[1:]] if isinstance(entry, list) and entry[:1] == ["stamp"] else entry
    memory.write_text(json.dumps(known))
    assert digest(model, memory) == before
    assert readings[2:] == ["extra.bin"]


def test_a_memory_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert digest(model, tmp_path / "file" / "weights.json") == digest(model)
    (tmp_path / "weights.json").mkdir()
    assert digest(model, tmp_path / "weights.json") == digest(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model", "weights.json"], "nothing left behind"


def test_the_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_REMEMBERED", 3)
    memory = DigestMemory(tmp_path / "weights.json")
    stamp = FileStamp(1, 2, 3, 4)
    for number in range(5):
        memory.remember(tmp_path / str(number), stamp, f"{number:064x}")
    assert [memory.find(tmp_path / str(number), stamp) is not None for number in range(5)] == [False] * 2 + [True] * 3


def test_where_the_memory_is(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    for variable, value, place in (("XDG_CACHE_HOME", "xdg", "xdg"), ("HOME", "home", "home/.cache")):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(variable, str(tmp_path / value))
        WeightFiles(model, DigestMemory.of_user()).digest()
        assert (tmp_path / place / "kvpact" / "weights.json").is_file()


def changing(path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes each time when it was read, `times` times."""
    read, left = weights.file_digest, [times]

    def read_and_change(file: Path, stopped: Callable[[], bool]) -> str:
        found = read(file, stopped)
        if file == path and left[0]:
            left[0] -= 1
            overwrite(path, left[0], 1)
        return found

    monkeypatch.setattr(weights, "file_digest", read_and_change)


def test_files_that_change_while_they_are_read_are_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing(model / "extra.bin", 2, monkeypatch)
    found = digest(model, tmp_path / "weights.json")
    monkeypatch.undo()
    assert found == digest(model), "of what was there in the end"


def test_files_that_do_not_stop_to_change_have_no_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing(model / "extra.bin", 100, monkeypatch)
    with pytest.raises(WeightsUnknown, match="change while they are read"):
        digest(model)


def test_reading_stops_when_it_is_told_to(model: Path) -> None:
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return True

    with pytest.raises(ReadingStopped):
        WeightFiles(model, DigestMemory(None)).digest(stopped)
    assert len(asked) == 1, "after the first piece"
    assert file_digest(model / "extra.bin") == sha256(bytes(8 << 20)).hexdigest()


def test_h39_files_that_changed_after_a_moment_are_told(model: Path, tmp_path: Path) -> None:
    """Also by another link on the way to them, and by renaming the directory."""
    time.sleep(0.02)  # the clock of a file system
    (tmp_path / "current").symlink_to(model)
    time.sleep(0.02)
    now = time.time_ns()
    time.sleep(0.02)
    WeightFiles(model, DigestMemory(None)).require_older_than(now)
    WeightFiles(tmp_path / "current", DigestMemory(None)).require_older_than(now)
    (tmp_path / "other").symlink_to(shutil.copytree(model, tmp_path / "new"))
    (tmp_path / "other").rename(tmp_path / "current")
    with pytest.raises(WeightsUnknown, match="current changed after the engine began to start"):
        WeightFiles(tmp_path / "current", DigestMemory(None)).require_older_than(now)
    WeightFiles(model, DigestMemory(None)).require_older_than(now)
    overwrite(model / "extra.bin", 0, 1)
    age(model)
    with pytest.raises(WeightsUnknown, match=r"extra\.bin changed after the engine began to start"):
        WeightFiles(model, DigestMemory(None)).require_older_than(now)


def test_a_directory_without_weights_or_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    with pytest.raises(FileNotFoundError, match="no weight files"):
        WeightFiles(tmp_path, DigestMemory(None))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        WeightFiles(tmp_path, DigestMemory(None)).digest()
    with pytest.raises(FileNotFoundError):
        WeightFiles(tmp_path / "gone", DigestMemory(None)).digest()
