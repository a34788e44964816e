"""Runs a Dockerfile's steps on a folder with a Debian in it, where no Docker is.

    python scripts/run_dockerfile.py [--bind PATH]... [--env NAME=VALUE]... [--then COMMAND] FILE CONTEXT ROOT

ROOT stands for the image that FROM names, such as what `debootstrap --variant=minbase
--include=ca-certificates,python3-venv bookworm ROOT` makes, and is changed. RUN lines run there by chroot, with this
machine's network, /dev and /proc. `--bind` shows a folder of this machine there, such as a package mirror's, and hides
what the image has at that path. `--env` sets a variable, such as PIP_FIND_LINKS. `--then` runs one more line as the
image's user, with its environment.

Needs root. What is mounted is gone with the command. The instructions are those that deploy/ uses; others are refused.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SAID = ("CMD", "ENTRYPOINT", "EXPOSE", "FROM", "LABEL")
"""Instructions that change no file."""


class Refused(Exception):
    """The file has something that this script does not do; the message says what."""


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction in capitals, and what follows it as one line, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            instruction, _, rest = line.strip().partition(" ")
            yield instruction.upper(), re.sub(r"\s+", " ", rest.strip())


class Image:
    """A folder that becomes an image, and what later steps take over from earlier ones."""

    def __init__(self, root: Path, context: Path, binds: Sequence[str] = ()) -> None:
        self.root, self.context, self.binds = root, context, binds
        self.environment = {"PATH": PATH}
        self.user, self.folder = "0", "/"

    def take(self, instruction: str, rest: str) -> None:
        """Do one step. Raises Refused, and CalledProcessError if a RUN line fails."""
        if instruction == "RUN":
            if rest.startswith("--"):
                raise Refused(f"RUN {rest}: options of RUN are not known here")
            self.run(rest)
        elif instruction == "ENV":
            self.environment |= dict(word.split("=", 1) for word in shlex.split(rest))
        elif instruction == "COPY":
            self.copy(rest)
        elif instruction == "USER":
            self.user = rest
        elif instruction == "WORKDIR":
            self.folder = rest
        elif instruction not in SAID:
            raise Refused(f"{instruction} is not known here; known: RUN, COPY, ENV, USER, WORKDIR, {', '.join(SAID)}")

    def copy(self, rest: str) -> None:
        """Copy files of the context, which patterns may name, into a folder of the image."""
        *patterns, target = rest.split()
        found = [path for pattern in patterns for path in sorted(self.context.glob(pattern))]
        if not found or not target.endswith("/"):
            raise Refused(f"COPY {rest}: {self.context} has no such file" if not found else f"COPY {rest}: end it by /")
        folder = self.root / target.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copy(path, folder)

    def run(self, line: str) -> None:
        """Run a shell's line in the image, as its user."""
        subprocess.run(["unshare", "--mount", "sh", "-euc", self.program(line)], check=True)

    def program(self, line: str) -> str:
        """What a shell with mounts of its own runs: it mounts, and becomes the line in the image."""
        root = shlex.quote(str(self.root))
        shown = ["/dev", "/proc", "/etc/resolv.conf", *self.binds]
        mounts = []
        for path in shown:
            kind = "mkdir -p" if Path(path).is_dir() else "touch"
            inside = f"{root}{shlex.quote(path)}"
            mounts.append(f"mkdir -p {root}{shlex.quote(str(Path(path).parent))}; {kind} {inside}")
            mounts.append(f"mount --rbind {shlex.quote(path)} {inside}")
        user, _, group = self.user.partition(":")
        given = [f"{name}={value}" for name, value in self.environment.items()]
        command = ["chroot", f"--userspec={user}:{group or user}", str(self.root), "env", "-i", *given]
        command += ["sh", "-euc", f"mkdir -p {self.folder} && cd {self.folder} && {line}"]
        return "; ".join([*mounts, "exec " + shlex.join(command)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("file", "context", "root"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--bind", action="append", default=[], metavar="PATH")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--then", metavar="COMMAND")
    given = parser.parse_args()
    image = Image(given.root.absolute(), given.context, given.bind)
    image.environment |= dict(word.split("=", 1) for word in given.env)
    try:
        for instruction, rest in steps(given.file.read_text()):
            began = time.monotonic()
            image.take(instruction, rest)
            print(f"[{time.monotonic() - began:5.1f} s] {instruction} {rest}", flush=True)
        if given.then:
            image.run(given.then)
    except Refused as refused:
        sys.exit(f"{given.file}: {refused}")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"{given.file}: exit code {failed.returncode}, see above")


if __name__ == "__main__":
    main()
