"""The fenced blocks of README.md and docs, and a folder in which they are run as a reader runs them.

Owns how a block is found, how its placeholders are filled in, and the environment of its commands.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[1]

PACKAGES: Final = (ROOT / "src" / "kvpact", ROOT / "kit" / "src" / "kvpact_testkit")
"""The code of the two distributions."""

HOMES: Final = (PACKAGES[0], PACKAGES[1].parent)
"""Where a page's `file.py` may be: in the product, or in the kit as `kvpact_testkit/file.py`."""

CODE: Final = ("sh", "python", "toml")
"""Languages of blocks that a reader runs, or puts into a file; others show what was printed, a picture, a query."""

PLACEHOLDERS: Final = (
    "MODEL",
    "disk:///var/cache/kvpact?capacity=200GiB",
    "disk://$HOME/kvpact?capacity=200GiB",
    "/var/cache/kvpact",
    "redis://user:password@cache:6379/0",
    "redis://cache:6379/0",
    "8GiB",
    "URL",
    "NAME",
)
"""What a reader replaces by something of his own; the first that fits is taken, so the longer ones stand first."""

_PLACEHOLDER: Final = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in PLACEHOLDERS))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    path: str
    """Of the document, relative to the repository."""
    line: int
    """Of its fence, counted from 1."""
    language: str
    text: str
    file: str
    """The file that the reader is to write it to, from the comment `<!-- name.py -->` above it; "" for none."""

    @property
    def is_code(self) -> bool:
        return self.language in CODE

    @property
    def name(self) -> str:
        """For a person: where it is, and its first line."""
        return f"{self.path}:{self.line} ({self.file or self.text.splitlines()[0][:60]})"


def documents() -> list[Path]:
    """The README and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def document_blocks(path: Path | str) -> list[Block]:
    """All fenced blocks of one document, in order; `path` may be relative to the repository."""
    document = ROOT / path
    return list(_blocks(str(document.relative_to(ROOT)), document.read_text(encoding="utf-8").splitlines()))


def block_with(path: str, text: str) -> Block:
    """The one code block of a document that holds `text`."""
    [found] = [block for block in document_blocks(path) if block.is_code and text in block.text]
    return found


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """`text` with every placeholder replaced by its value. KeyError names a placeholder that has none."""
    return _PLACEHOLDER.sub(lambda found: values[found[0]], text)


def _blocks(path: str, lines: list[str]) -> Iterator[Block]:
    begin, fence, above = 0, "", ""
    for number, line in enumerate(lines, start=1):
        mark = re.match(r"\s*(```+)\s*(\w*)\s*$", line)
        if mark is None:
            above = above if fence or not line.strip() else line
        elif not fence:
            begin, fence, language = number, mark[1], mark[2]
            named = re.fullmatch(r"<!-- ([\w.]+\.\w+) -->", above)
        elif mark[1] == fence and not mark[2]:
            text = "\n".join(lines[begin : number - 1]) + "\n"
            yield Block(path, begin, language, text, named[1] if named else "")
            fence = above = ""
    assert not fence, f"{path}:{begin}: this fence is not closed"


class Reader:
    """A folder where commands of this environment, `kvpact` and `python`, come first, and kvpact has no settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, arguments in (("kvpact", "-c 'from kvpact.cli.app import main; main()'"), ("python", "")):
            command = folder / "bin" / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            command.chmod(0o755)

    def write_files(self, page: str) -> None:
        """Write the files that a guide has its readers write."""
        for block in document_blocks(page):
            if block.file:
                (self.folder / block.file).write_text(block.text)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, however it ends."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPACT_")}
        ours = {
            "PATH": f"{self.folder / 'bin'}:{kept['PATH']}",
            "PYTHONPATH": f"{self.folder}:{PACKAGES[0].parent}",
            "PYTEST_ADDOPTS": "",
            "COLUMNS": "200",
        }
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**kept, **ours, **environment},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def shell(self, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a block's commands, each of which must succeed."""
        ran = self.run("sh", "-eu", "-c", text, **environment)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran

    def python(self, program: str) -> str:
        """Run a program, which must succeed; returns what it prints."""
        (self.folder / "program.py").write_text(program)
        return self.shell("python program.py").stdout


def load_script(path: str) -> ModuleType:
    """The module of a script of this repository, which no package holds."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where a dataclass looks for its module
    specification.loader.exec_module(module)
    return module
