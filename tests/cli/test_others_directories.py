"""Tools on a directory of another user, and what they ask before they remove anything: as a shell user meets both."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvpact.identity.keys import Namespace
from kvpact.tiers.disk.tier import DiskTier
from other_user import OTHER_USER, needs_root

AS_OTHER_USER = """
import contextlib, io, json, os, sys
import obstore, rich.console, rich.progress, rich.table
import kvpact.cli.app, kvpact.cli.serve, kvpact.cli.slabs, kvpact.cli.stores, kvpact.cli.transfer_config
import kvpact.tiers.directory.store, kvpact.tiers.objects.store, kvpact.tiers.registry
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
os.chdir("/")
for command in json.loads(sys.argv[2]):
    sys.argv, said, code = ["kvpact", *command], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            kvpact.cli.app.main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    print(json.dumps([command, code, said.getvalue()]))
"""
"""Everything is imported before the user changes: the interpreter itself may lie where only root can read."""

GC = ("gc", "--older-than=1d")


@needs_root
@pytest.mark.parametrize("hidden", [False, True], ids=["theirs", "behind theirs"])
def test_a_directory_of_another_user_is_refused_in_one_line(*, hidden: bool) -> None:
    with TemporaryDirectory(prefix="kvpact-theirs-", dir="/tmp") as place:
        slabs = Path(place) / "slabs"
        slabs.mkdir()
        DiskTier.open(slabs, Namespace({"model": "llama"}), 4096, 1 << 24).close()
        Path(place).chmod(0o700 if hidden else 0o755)
        commands = [
            [*command, f"{scheme}://{slabs}" + ("?capacity=1GiB" if scheme != "file" and command == ("tiers",) else "")]
            for command in (("tiers",), ("inspect",), ("verify",), (*GC, "--dry-run"), (*GC, "--yes"))
            for scheme in ("disk", "dir", "file")
        ]
        ended = subprocess.run(
            [sys.executable, "-c", AS_OTHER_USER, str(OTHER_USER), json.dumps(commands)],
            capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "400"}, check=True,
        )  # fmt: skip
        results = [json.loads(line) for line in ended.stdout.splitlines()]
        assert len(results) == len(commands)
        for command, code, said in results:
            assert str(slabs) in said, command
            assert f"user {OTHER_USER}" in said or "Permission denied; give" in said, command
            assert code == (1 if command[0] == "tiers" else 2), (command, said)
            assert command[0] == "tiers" or said.count("\n") == 1, said


@pytest.mark.parametrize(("answer", "left"), [("n", 1), ("y", 0)])
def test_gc_asks_whoever_sits_there(answer: str, left: int, tmp_path: Path) -> None:
    DiskTier.open(tmp_path, Namespace({"model": "llama"}), 4096, 1 << 24).close()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvpact", "gc", str(tmp_path), "--older-than", "0s"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
        os.write(ours, f"{answer}\n".encode())
        said, _ = asking.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert "remove 1 slab? [y/N]" in said
    assert len(list(tmp_path.glob("kvpact/*.slab"))) == left
    assert ("removed 1 slab" in said) == (not left)
