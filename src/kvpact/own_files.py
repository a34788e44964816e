"""Files that belong to this user, or to one group, also in a directory that every user may write to.

Owns the folder `kvpact` inside a directory that a user names, the modes of files and folders in it, and the ways to
create and replace files: never through a link, never overwriting an existing file, and independent of the umask. And
the files in the user's cache folder.
"""

from __future__ import annotations

import errno
import grp
import json
import logging
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvpact.border import json_object
from kvpact.errors import DataError, TierError

logger = logging.getLogger(__name__)

OWN_FOLDER: Final = "kvpact"
"""Name of kvpact's folder inside the directory that a user names."""

NAMED_MODE: Final = 0o755
"""Mode of a named directory that kvpact makes: other users may pass through it, but not add or rename files."""

_MAKING_SECONDS: Final = 1.0
"""Seconds that another member of the group may take between making the folder and opening it to the group."""

_RETRY_SECONDS: Final = 0.05
_OTHERS: Final = 0o007
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
UNABLE: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors from file systems without modes, links or times, about a file of this user; or from a container."""

_SHARED_BITS: Final = 0o2070
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


class NotOurs(TierError):
    """File or folder of another user, a link, or one that cannot be made, so that kvpact cannot use it."""


def group_number(name: str) -> int:
    """Number of a group by its name or number. Raises ValueError if this machine knows no such group."""
    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"this machine knows no group {name!r}; give its name or number as in /etc/group") from None


@dataclass(frozen=True, slots=True)
class Access:
    """Right to read and write: for this user alone, or also for the members of one `group` (its number)."""

    group: int | None = None

    @classmethod
    def of(cls, name: str | None) -> Access:
        """Access for a group's name or number, as in `?group=NAME`. Raises NotOurs if there is no such group."""
        try:
            return cls(None if name is None else group_number(name))
        except ValueError as error:
            raise NotOurs(str(error)) from None

    @property
    def file_mode(self) -> int:
        return 0o600 if self.group is None else 0o660

    @property
    def folder_mode(self) -> int:
        """With a group, new files inside belong to the group too (setgid)."""
        return 0o700 if self.group is None else 0o2770

    def create(self, path: Path, flags: int = os.O_WRONLY) -> int:
        """Create and open a file. Raises FileExistsError if anything has that name, a link included, and OSError."""
        descriptor = open_own(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self.settle(descriptor, self.file_mode)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open(self, path: Path, flags: int) -> int:
        """Open a file, or create it if it is missing; never through a link. Raises OSError."""
        while True:
            try:
                return open_own(path, flags)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    return self.create(path, flags)

    def make_folder(self, path: Path) -> None:
        """Make a folder if it is missing. Raises OSError."""
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            self.settle(path, self.folder_mode)

    def make_parents(self, path: Path, below: Path) -> None:
        """Make the folders between `below`, which exists, and `path`. Raises OSError."""
        for folder in reversed(path.relative_to(below).parents[:-1]):
            self.make_folder(below / folder)

    def settle(self, what: int | Path, mode: int) -> None:
        """Give a file or folder of ours its group and mode, if it has others: the umask may have cleared bits.

        A file system without modes gives it those of the folder, about which there is one warning.
        """
        found = os.stat(what)
        if self.group is not None and found.st_gid != self.group:
            os.chown(what, -1, self.group)
        if stat.S_IMODE(found.st_mode) != mode:
            try:
                os.chmod(what, mode)
            except OSError as error:
                if self.group is not None or error.errno not in UNABLE:
                    raise

    def admits(self, found: os.stat_result) -> bool:
        """True if another member's folder is open to the group, and to no other user."""
        return found.st_gid == self.group and found.st_mode & (_SHARED_BITS | _OTHERS) == _SHARED_BITS


class OwnFolder:
    """Folder `kvpact` inside a directory, held open: it stays the same even if it is renamed or replaced."""

    def __init__(self, path: Path, descriptor: int | None, access: Access) -> None:
        self.path = path
        """Path in messages."""
        self.held = path if descriptor is None else Path(f"/proc/self/fd/{descriptor}")
        """Path to use, valid in this process only."""
        self.access = access
        self._descriptor = descriptor
        self._release = weakref.finalize(self, os.close, descriptor) if descriptor is not None else None

    @classmethod
    def make(cls, parent: Path, access: Access, name: str = OWN_FOLDER) -> OwnFolder:
        """Open the folder inside `parent`; make it, and the last part of the path of `parent`, if missing.

        Raises:
            NotOurs: the folder is another user's or a link, or cannot be made.
        """
        _make_named(parent)
        with suppress(FileExistsError):
            _make_folder(parent / name, parent / name)
        return cls.again(parent, access, name)

    @classmethod
    def again(cls, parent: Path, access: Access, name: str = OWN_FOLDER) -> OwnFolder:
        """Open the folder inside `parent`, which exists. Raises NotOurs and OSError."""
        path = parent / name
        folder = cls(path, _open_path(path), access)
        deadline = time.monotonic() + _MAKING_SECONDS
        while not _settled(folder, parent):
            if time.monotonic() >= deadline:
                raise NotOurs(_foreign(folder))
            time.sleep(_RETRY_SECONDS)
        return folder

    @property
    def is_there(self) -> bool:
        """True if the folder exists; False only after `look`."""
        return self._release is not None

    def require_ours(self) -> None:
        """Raise NotOurs for another user's folder, where our files would be in the way."""
        if self.is_there and os.stat(self.held).st_uid != os.geteuid() and self.access.group is None:
            raise NotOurs(_foreign(self))

    @classmethod
    def look(cls, parent: Path) -> OwnFolder:
        """Open the folder inside `parent` for reading, whoever owns it, even if there is none.

        Raises:
            NotOurs: a link or a file has its name.
        """
        path = parent / OWN_FOLDER
        try:
            descriptor = _open_path(path)
        except (FileNotFoundError, NotADirectoryError):
            return cls(path, None, PRIVATE)
        found = os.fstat(descriptor)
        return cls(path, descriptor, Access(found.st_gid if found.st_mode & _SHARED_BITS == _SHARED_BITS else None))

    def lost(self) -> str:
        """Reason why `path` is another folder than this one now; "" if it is this one. Waits for the file system."""
        return "" if self._descriptor is None else lost_from(self.path, self._descriptor)

    def close(self) -> None:
        """Close the folder: `held` is invalid afterwards. Idempotent; also done when the last reference is dropped."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PRIVATE: Final = Access()


def open_own(path: Path, flags: int, mode: int = 0) -> int:
    """`os.open` of a file, but never through a link, and not inherited by other programs. Raises OSError.

    Refuses at once (ENXIO) anything but a file, such as a planted FIFO, which would block.
    """
    with closing(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "Not a regular file", str(path))
        return os.dup(descriptor)


def lost_from(path: Path, descriptor: int) -> str:
    """Reason why `path` names another file or folder than an open one; "" if it does not, or is unknown. Waits for I/O.

    While it is open no other gets its inode's number. Raises OSError for the descriptor alone.
    """
    held = os.fstat(descriptor)
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        return f"{path} was removed" if error.errno in _ABSENT else ""
    if stat.S_ISREG(held.st_mode) and not held.st_nlink:
        return f"{path} was removed"
    is_same = (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
    return "" if is_same else f"{path} was replaced, or something else was mounted there"


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Context that closes the descriptor at its end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replace_own(
    path: Path, content: bytes, access: Access = PRIVATE, *, beside: Path | None = None, durable: bool = False
) -> None:
    """Write a file with this content at `path`; readers see the old or the new file, never a part of one.

    Writes to `beside` first, by default a random name in the same folder. `durable`: after return the file survives a
    power cut. Raises OSError; then the old file is still there.
    """
    beside = beside or path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = access.create(beside)
    try:
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    sync_file(descriptor)
            os.rename(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    finally:
        if durable:
            sync_folder(path.parent)


class CacheFile:
    """JSON object in a file of the user's cache folder, for values that can be computed again if it is lost.

    Several processes may use it at once, as each replaces it as a whole. A damaged file, or one that another user could
    have written, counts as empty.
    """

    def __init__(self, path: Path | None) -> None:
        """Use a file in kvpact's own folder. With `path` None, as without a home folder, nothing is stored."""
        self.path = path

    @classmethod
    def of_user(cls, name: str) -> Self:
        """`kvpact/NAME` in XDG_CACHE_HOME, or in ~/.cache."""
        try:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:
            return cls(None)
        return cls(folder / OWN_FOLDER / name)

    def read(self) -> dict[str, object]:
        """Read the object; empty if there is none."""
        if self.path is None:
            return {}
        try:
            with OwnFolder.again(self.path.parent.parent, PRIVATE, self.path.parent.name) as folder:
                return json_object(_read_if_ours(folder.held / self.path.name))
        except (OSError, NotOurs, DataError):
            return {}

    def write(self, content: Mapping[str, object]) -> None:
        """Replace the object. Raises OSError and NotOurs."""
        if self.path is None:
            return
        parent = self.path.parent.parent
        parent.mkdir(parents=True, exist_ok=True)
        with OwnFolder.make(parent, PRIVATE, self.path.parent.name) as folder:
            replace_own(folder.held / self.path.name, json.dumps(content).encode(), durable=True)


def _read_if_ours(path: Path) -> bytes:
    """Content of a file that no other user can have written, else b"". Raises OSError."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        found = os.fstat(file.fileno())
        return file.read() if found.st_uid == os.geteuid() and not found.st_mode & 0o022 else b""


def sync_file(descriptor: int) -> None:
    """Make a file survive a power cut, where its file system supports that.

    Raises OSError if it does and failed.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {*UNABLE, errno.EINVAL}:
            raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut, where its file system supports that."""
    with suppress(OSError), closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def _make_named(path: Path) -> None:
    try:
        path.mkdir(mode=NAMED_MODE)
        PRIVATE.settle(path, NAMED_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise NotOurs(f"{path} is not a directory; give the path of one") from None
    except FileNotFoundError:
        raise NotOurs(f"{path.parent} does not exist; create it, or correct the path {path}") from None
    except OSError as error:
        raise NotOurs(f"cannot create {path}: {error.strerror}") from None


def _make_folder(path: Path, wanted: Path) -> None:
    """Make a folder; messages name the `wanted` one. Raises NotOurs and FileExistsError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in _DENIED:
            raise NotOurs(
                f"{path.parent} cannot be written by user {os.geteuid()}; give this user the right to"
            ) from None
        raise NotOurs(f"cannot create {wanted}: {error.strerror}; name another directory") from None


def require_makeable(wanted: Path) -> None:
    """Raise NotOurs if `wanted` cannot be made, or a folder in it if it exists.

    Tries it with an unnamed file, which changes nothing; where the file system does not support or refuses it, with a
    folder of another name, which is removed at once.
    """
    place = wanted if os.path.lexists(wanted) else wanted.parent
    if not place.is_dir():
        raise NotOurs(f"{place} is not a directory" if os.path.lexists(place) else f"there is no directory {place}")
    if _takes_unnamed_files(place):
        return
    probe = place / f".{OWN_FOLDER}-{secrets.token_hex(8)}"
    _make_folder(probe, wanted)
    os.rmdir(probe)


def _takes_unnamed_files(place: Path) -> bool:
    try:
        descriptor = os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    os.close(descriptor)
    return True


def _open_path(path: Path) -> int:
    """Open a descriptor that needs no permission on the folder; for its status and for paths through it."""
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        raise NotOurs(f"user {os.geteuid()} may not enter the directory of {path}; run as its owner") from None
    except NotADirectoryError:
        if not path.parent.is_dir():
            raise
        found = f"a link to {os.readlink(path)}" if path.is_symlink() else "not a directory"
        raise NotOurs(
            f"{path} is {found}; kvpact needs that name for a folder of its own: remove it, or give another directory"
        ) from None


def _settled(folder: OwnFolder, parent: Path) -> bool:
    """True if the folder is ours, with the right mode, or open to the group; False while another member makes it.

    Raises NotOurs if it belongs to a user who does not share it.
    """
    found = os.stat(folder.held)
    if found.st_uid in (os.geteuid(), _owner_of_new(parent, found.st_uid)):
        _require_modes(folder)
        return True
    group = folder.access.group
    if group is None or (os.geteuid() and group not in (os.getegid(), *os.getgroups())):
        raise NotOurs(_foreign(folder))
    return folder.access.admits(found)


def _require_modes(folder: OwnFolder) -> None:
    access = folder.access
    try:
        access.settle(folder.held, access.folder_mode)
    except OSError as error:
        if access.group is not None:
            raise NotOurs(
                f"{folder.path} cannot be given to group {access.group}: {error.strerror}; user {os.geteuid()} must be "
                f"a member of it"
            ) from None
    mode = stat.S_IMODE(os.stat(folder.held).st_mode)
    if mode & 0o077 & ~access.folder_mode:
        logger.warning(
            "kvpact: %s keeps mode %04o instead of %04o: this file system does not hide it from other users",
            folder.path, mode, access.folder_mode,
        )  # fmt: skip


def _owner_of_new(parent: Path, claimed: int) -> int:
    """Owner of files that this process makes there: a file server may map root to another user (root_squash)."""
    if claimed == os.geteuid():
        return claimed
    probe = parent / f".{OWN_FOLDER}-{secrets.token_hex(8)}"
    try:
        descriptor = PRIVATE.create(probe)
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _foreign(folder: OwnFolder) -> str:
    found = os.stat(folder.held)
    whose = f"user {found.st_uid}, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"
    right = "name another directory for this user, or have that folder removed"
    if folder.access.group is not None:
        right = f"with ?group= its mode must be 2770, its group {folder.access.group}, and this user a member of that"
    return f"{folder.path} is not a folder of user {os.geteuid()} ({whose}): {right}"
