"""Types the commands of docs/first-hour.md into a shell, on real engines, and writes the answers into the page.

    python scripts/play_first_hour.py [--keep FOLDER]

Takes some minutes: a server is started twice. Of each block of the page that follows `<!-- typed: NAME -->` the lines
that begin with `$ ` are typed as they stand, in a folder of their own in which `kvpact` is this checkout; what they
print takes the place of the other lines. Only the ports differ, so that servers of others may run beside: 8000, which
vLLM takes by itself, and 6379 become free ones. tests/under_vllm/test_http_first_hour.py compares.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kit/src", "testbeds", "tests")]

from kvpact_testkit.demo.engine import session_members  # noqa: E402
from servers.http_server import users_environment  # noqa: E402
from servers.redis_server import free_ports, valkey_program  # noqa: E402

BLOCK = re.compile(r"(?P<head><!-- typed: (?P<name>\w+) -->\n```console\n)(?P<lines>.*?)(?P<tail>```)", re.DOTALL)
MARK = "typed and answered"
PORTS = ("8000", "6379")
AT_HOME = "/home/you"

SECONDS = 300.0
"""For one command; the longest waits until a server answers."""

LOOKS = ("kvpact status", "kvpact why", "kvpact tiers")
LOOK_SECONDS = 4.0
"""Pause before each of these: what a step has counted is shown within this time, and nobody types faster."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A command as it was typed, and what it printed."""

    command: str
    answer: str

    def lines(self) -> list[str]:
        """As the page shows them."""
        first, *others = self.command.splitlines()
        return [f"$ {first}", *(f"> {line}" for line in others), *self.answer.splitlines()]


class Shell:
    """A user's shell with job control, in a folder; its answers are what a terminal would show."""

    def __init__(self, folder: Path) -> None:
        self._ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self._folder = folder.resolve()
        commands = self._folder.parent / f"{self._folder.name}-bin"
        commands.mkdir()
        self._sockets = tempfile.TemporaryDirectory(prefix="kvpact-")  # a path of one has 107 characters at most
        (commands / "redis-server").symlink_to(valkey_program())
        for name in ("python", "python3"):  # of the environment, also where another one is first on the path
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            (commands / name).chmod(0o755)
        (self._folder / "kvpact").symlink_to(ROOT)
        environment = {name: text for name, text in os.environ.items() if not name.startswith("KVPACT_")} | {
            **(user := users_environment()),
            "PATH": f"{commands}:{user['PATH']}",
            **dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR"), self._sockets.name),  # no other engine of this user is seen
            "HOME": str(self._folder),
        }
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"], cwd=self._folder, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.type("set -m")

    def type(self, command: str) -> Typed:
        """Type a command and wait for its end. Raises TimeoutError."""
        if command.startswith(LOOKS):
            time.sleep(LOOK_SECONDS)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        text = command.replace("kvpact serve ./model", f"kvpact serve ./model --port {PORTS[0]}")
        for shown, port in self._ports.items():
            text = re.sub(rf"\b{shown}\b", port, text)
        overdue = threading.Timer(SECONDS, self.end)
        overdue.start()
        self._process.stdin.write(f"{text}\necho {MARK}\n")
        self._process.stdin.flush()
        answer = ""
        for line in self._process.stdout:
            before, mark, _ = line.partition(f"{MARK}\n")
            answer += before
            if mark:
                break
        else:
            raise TimeoutError(f"{command}: {answer}")
        overdue.cancel()
        for shown, port in self._ports.items():
            answer = re.sub(rf"\b{port}\b", shown, answer)
        return Typed(command, answer.replace(str(self._folder), AT_HOME).strip("\n"))

    def end(self) -> None:
        """Kill whatever was started."""
        for pid in [*session_members(self._process.pid)]:
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._sockets.cleanup()


def commands(lines: str) -> Iterator[str]:
    """The commands of a block, with the lines that go on after a backslash."""
    for found in re.findall(r"^\$ (.*(?:\n> .*)*)", lines, re.MULTILINE):
        yield found.replace("\n> ", "\n")


def play(page: str, folder: Path) -> dict[str, Sequence[Typed]]:
    """Type all blocks of the page in their order. Returns what was typed, by the name of its block."""
    shell = Shell(folder)
    try:
        return {
            block["name"]: [shell.type(command) for command in commands(block["lines"])]
            for block in BLOCK.finditer(page)
        }
    finally:
        shell.end()


def with_answers(page: str, typed: dict[str, Sequence[Typed]]) -> str:
    """The page with these answers in its blocks."""

    def block(found: re.Match[str]) -> str:
        lines = [f"{line.rstrip()}\n" for one in typed[found["name"]] for line in one.lines()]
        return "".join([found["head"], *lines, found["tail"]])

    return BLOCK.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="type there, and leave what was made")
    given = parser.parse_args()
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch, "home")
        folder.mkdir(parents=True)
        PAGE.write_text(with_answers(page, play(page, folder)))


if __name__ == "__main__":
    main()
