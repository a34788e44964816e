"""Acts of another user of this machine: a child without root's rights, under a user id of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

OTHER_USER = 65534
SECOND_USER = 65533
THIRD_USER = 65532
GROUP = 61234
"""Numbers of users and of a group; none needs a name."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users")

_BEGIN = """
import fcntl, json, os, stat, sys, time
from pathlib import Path
import obstore.exceptions, obstore.store
from chain_calls import get_chain, put_chain
from kvpact.identity.keys import Namespace
from kvpact.errors import TierError
from kvpact_testkit.sample_blocks import content, document, empty_buffers, filled_buffers
from kvpact.tiers.base import chained, leading
from kvpact.tiers.urls import parse_tier_url
from kvpact.tiers import registry
from kvpact.tiers.directory import store as directory
from kvpact.tiers.objects import store as object
from kvpact.tiers.disk import tier as disk
os.setgroups([int(group) for group in sys.argv[2].split(",") if group])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
os.umask(int(sys.argv[3], 8))
place = Path(sys.argv[4])
def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.strerror
    return "done"
"""
"""Everything is imported before the user changes: the interpreter itself may lie where only root can read."""


@contextmanager
def open_place() -> Iterator[Path]:
    """A directory in which every user may do everything, as Kubernetes' emptyDir is: mode 0777, not sticky."""
    with TemporaryDirectory(prefix="kvpact-open-", dir="/tmp") as made:
        Path(made).chmod(0o777)
        place = Path(made) / "emptyDir"
        place.mkdir()
        place.chmod(0o777)
        yield place


def as_user(
    user: int, program: str, place: Path, *, groups: tuple[int, ...] = (), umask: int = 0o022, imports: str = ""
) -> object:
    """What a Python program prints, as JSON, when this user runs it; it knows `place` and `attempt`."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            imports + _BEGIN + program,
            str(user),
            ",".join(map(str, groups)),
            f"{umask:o}",
            str(place),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
