"""Identity of weights by content: a digest that two directories share only if they hold the same model.

Reads whole files in the calling thread, and stores their digests in the user's cache folder, so that a restart does not
read them again. Waits for the file system, so it never runs on a scheduler's thread.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvpact.errors import KvpactError
from kvpact.own_files import CacheFile, NotOurs

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

LOADED_OTHERWISE = frozenset(
    {
        "config.json",  # the engine's own reading of it is in the namespace, with what the user has overridden
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "chat_template.json",
    }
)
"""JSON files without influence on the model's computation from given tokens; any other JSON file may have some."""

NOT_LOADED = "original"
"""Folder with another copy of the weights in their author's own format; engines do not load it."""

CHUNK_BYTES = 8 << 20
"""Bytes per read: a shutdown waits for at most one chunk, and the interpreter's lock is taken 125 times per GB."""

MAX_READINGS = 3
"""Most times that files are read which change meanwhile."""

SETTLED_SECONDS = 2.0
"""Least age of a file's last change, in seconds, for its digest to be stored: clocks of file systems are coarse, so
another change might leave its times the same."""

MAX_REMEMBERED = 4096
"""Most files with a stored digest; a model of 400 GB has about 100. Their file takes at most 1 MiB."""

BLOB: Final = re.compile("[0-9a-f]{64}")
"""Name of a large file in the hub's cache: its SHA-256."""


SPLIT: Final = re.compile(r"(?P<model>.*)-\d{5}-of-\d{5}\.gguf")


class WeightsUnknown(KvpactError):
    """Files that exist but do not show the weights that the engine has loaded; the message has the reason."""


class ReadingStopped(KvpactError):
    """Reading ended because `stopped` returned True."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Facts of a file system that change with a file's content, without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Stamp of the file to which `path` leads. Raises OSError."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class DigestMemory:
    """SHA-256 digests of files, stored in one small file of the user as long as the files do not change.

    Several processes may use it at once: each replaces it as a whole, and reads a file again whose digest is lost. A
    damaged file, or one that another user could have written, is ignored; without write access nothing is stored.
    """

    def __init__(self, path: Path | None) -> None:
        """Use the file `path`; with None, as without a home folder, nothing is stored."""
        self._file = CacheFile(path)

    @classmethod
    def of_user(cls) -> DigestMemory:
        """Memory in `kvpact/weights.json` in XDG_CACHE_HOME, or in ~/.cache."""
        return cls(CacheFile.of_user("weights.json").path)

    def find(self, path: Path, stamp: FileStamp) -> str | None:
        """Stored digest of the file with this stamp, or None."""
        match self._read().get(os.path.realpath(path)):
            case [list(known), str(digest)] if known == list(astuple(stamp)) and BLOB.fullmatch(digest):
                return digest
        return None

    def remember(self, path: Path, stamp: FileStamp, digest: str) -> None:
        """Store a digest; above `MAX_REMEMBERED` files, the oldest entries are dropped."""
        known = self._read()
        name = os.path.realpath(path)
        known.pop(name, None)
        known[name] = [list(astuple(stamp)), digest]
        kept = dict(list(known.items())[-MAX_REMEMBERED:])
        with suppress(OSError, NotOurs):
            self._file.write({"format": 1, "files": kept})

    def _read(self) -> dict[str, object]:
        content = self._file.read()
        files = content.get("files") if content.get("format") == 1 else None
        return files if isinstance(files, dict) else {}


class WeightFiles:
    """Files that determine the computation of the model in a directory, or in a single file."""

    def __init__(self, place: Path, memory: DigestMemory, *, with_code: bool = False) -> None:
        """`with_code`: the engine runs Python files from there.

        Raises OSError if the directory cannot be read, FileNotFoundError if it holds no weights.
        """
        self._place = place
        self._memory = memory
        self._with_code = with_code
        if not any(name.endswith(WEIGHT_SUFFIXES) for name in self._files()) and place.is_dir():
            raise FileNotFoundError(f"no weight files ({', '.join(WEIGHT_SUFFIXES)}) in {place}")

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that `digest` would have to read. Raises OSError."""
        sizes = ((path, FileStamp.of(path)) for path in self._files().values())
        return sum(stamp.size for path, stamp in sizes if self._known(path, stamp) is None)

    def digest(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """Hex digest over names, sizes and SHA-256 of all files; equal content gives an equal digest in any directory.

        Raises OSError, WeightsUnknown if the files keep changing, and ReadingStopped soon after `stopped` is true.
        """
        for _ in range(MAX_READINGS):
            stamps = self._stamps()
            whole = blake3()
            for name, path in self._files().items():
                whole.update(f"{name}\0{FileStamp.of(path).size}\0{self._file_digest(path, stopped)}\n".encode())
            if self._stamps() == stamps:
                return whole.hexdigest()
        raise WeightsUnknown(f"the files in {self._place} change while they are read")

    def require_older_than(self, moment_ns: int) -> None:
        """Raise WeightsUnknown if a file changed after `moment_ns` (Unix time): the engine may have loaded another.

        Notices changes of files, of links on the way to them, and of the directory itself. Raises OSError.
        """
        real = Path(os.path.realpath(self._place))
        links = [path for path in (self._place.absolute(), *self._place.absolute().parents) if path.is_symlink()]
        for path in (*links, real, *self._files().values()):
            if path.lstat().st_ctime_ns > moment_ns or (
                blob_digest(path) is None and not path.is_dir() and path.stat().st_ctime_ns > moment_ns
            ):
                raise WeightsUnknown(f"{path} changed after the engine began to start, which may have loaded another")

    def _stamps(self) -> dict[str, FileStamp]:
        return {name: FileStamp.of(path) for name, path in self._files().items()}

    def _files(self) -> dict[str, Path]:
        """Files by their paths relative to the directory, sorted."""
        if not self._place.is_dir():
            return {"": self._place} | {path.name: path for path in sorted(self._parts_beside())}
        return dict(sorted((str(path.relative_to(self._place)), path) for path in self._walk()))

    def _parts_beside(self) -> Iterator[Path]:
        """Files loaded together with a single file: other parts of a GGUF model, and its encoder for media."""
        split = SPLIT.fullmatch(self._place.name)
        for path in self._place.parent.glob("*.gguf"):
            other = SPLIT.fullmatch(path.name)
            if (split and other and split["model"] == other["model"]) or "mmproj" in path.name:
                yield path

    def _walk(self) -> Iterator[Path]:
        def fail(error: OSError) -> None:
            raise error

        for folder, folders, names in os.walk(self._place, onerror=fail):
            at_top = Path(folder) == self._place
            folders[:] = [name for name in folders if not name.startswith(".") and not (at_top and name == NOT_LOADED)]
            for name in names:
                is_loaded = name.endswith(WEIGHT_SUFFIXES) or (self._with_code and name.endswith(".py"))
                is_loaded |= name.endswith(".json") and not (at_top and name in LOADED_OTHERWISE)
                if is_loaded and not name.startswith("."):
                    yield Path(folder) / name

    def _known(self, path: Path, stamp: FileStamp) -> str | None:
        return blob_digest(path) or self._memory.find(path, stamp)

    def _file_digest(self, path: Path, stopped: Callable[[], bool]) -> str:
        stamp = FileStamp.of(path)
        began_ns = time.time_ns()
        known = self._known(path, stamp)
        if known is not None:
            return known
        digest = file_digest(path, stopped)
        age = (began_ns - max(stamp.mtime_ns, stamp.ctime_ns)) / 1e9
        if age >= SETTLED_SECONDS and FileStamp.of(path) == stamp:
            self._memory.remember(path, stamp, digest)
        return digest


def file_digest(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Hex SHA-256 of a file's content, its name in the hub's cache. Raises OSError and ReadingStopped.

    Reads the file instead of mapping it: truncating a mapped file kills the process.
    """
    digest = sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if stopped():
                raise ReadingStopped(f"the reading of {path} was stopped")
    return digest.hexdigest()


def blob_digest(path: Path) -> str | None:
    """SHA-256 of a file in the model hub's cache, from the name of the file that `path` links to; else None."""
    if not path.is_symlink():
        return None
    blob = Path(os.path.realpath(path))
    is_blob = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return blob.name if is_blob and BLOB.fullmatch(blob.name) else None


def adapter_digest(directory: Path) -> str:
    """Hex digest over all bytes of an adapter's files. Raises OSError if the directory cannot be read."""
    digest = blake3()
    files = sorted(path for path in directory.iterdir() if path.suffix in (*WEIGHT_SUFFIXES, ".json"))
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise FileNotFoundError(f"no adapter weights in {directory}")
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
