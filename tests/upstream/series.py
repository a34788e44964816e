"""The series of patches for vLLM on a release: which commits apply, their lines, their tests, and vLLM's own.

Usage: scripts/upstream [RELEASE] [--apply]. For each commit, in order: its lines; whether it applies alone, and after
those before it, else the hunks that do not; its own tests before and after it; and vLLM's own tests of the files that
it touches, before and after. With --apply nothing is run. Fetches the release's source distribution (47 MB, once).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from upstream_run import Outcomes, choice, run
from vllm_source import RELEASE, apply, fetch_source, patched, touched_by

SERIES = Path(__file__).parents[2] / "upstream" / "series"

SUBJECT = re.compile(r"^Subject: (?:\[PATCH[^]]*\] )?(.+(?:\n .+)*)$", re.MULTILINE)
"""A subject of `git format-patch`, which may go on in further lines."""

CHOICE = choice()


@dataclass(frozen=True, slots=True)
class Commit:
    """One patch of the series."""

    patch: Path

    @property
    def subject(self) -> str:
        """The first line of its message."""
        found = SUBJECT.search(self.patch.read_text(encoding="utf-8"))
        assert found is not None, self.patch
        return found[1].replace("\n", "")

    @property
    def files(self) -> tuple[str, ...]:
        """All files that it touches."""
        touched = touched_by(self.patch)
        return (*touched.changed, *touched.added)

    @property
    def own_tests(self) -> list[str]:
        """The test files that it adds or changes, and that are not among those of vLLM's that are run anyway."""
        named = (name for name in self.files if re.fullmatch(r"tests/.*/test_\w+\.py", name))
        return sorted(name for name in named if name not in (*CHOICE.proof, *CHOICE.soak))

    def broken(self, before: Outcomes, after: Outcomes) -> set[str]:
        """Tests of vLLM's that no longer pass, but those that it takes away by name."""
        taken = set(re.findall(r"^-(?:async )?def (test_\w+)", self.patch.read_text(encoding="utf-8"), re.MULTILINE))
        lost = before.named("passed") - after.named("passed")
        return {name for name in lost if name.partition("::")[2].partition("[")[0] not in taken}

    def added_lines(self, folder: str) -> int:
        """Lines that it adds to files below a folder, empty ones too."""
        parts = self.patch.read_text(encoding="utf-8").split("\ndiff --git ")[1:]
        chosen = (part for part in parts if part.startswith(f"a/{folder}/"))
        return sum(len(re.findall(r"^\+(?!\+\+ )", part, re.MULTILINE)) for part in chosen)

    def tests_of_touched(self, tree: Path) -> list[str]:
        """vLLM's own test files that import a file which it touches, of those that can be run here."""
        modules = [name.removesuffix(".py").replace("/", ".") for name in self.files if name.startswith("vllm/")]
        names = re.compile("|".join(re.escape(name.removesuffix(".__init__")) + r"\b" for name in modules))
        files = (*CHOICE.proof, *CHOICE.soak)
        return [name for name in files if names.search((tree / name).read_text(encoding="utf-8"))]


def series() -> list[Commit]:
    """The commits, in order."""
    return [Commit(patch) for patch in sorted(SERIES.glob("*.patch"))]


def hunks_that_do_not_apply(source: Path, before: Sequence[Commit], commit: Commit) -> list[str]:
    """FILE:LINE of each hunk, or FILE where the file is missing, on a tree that has as much of `before` as applies."""
    with patched(source) as tree:
        for name in {name for one in (*before, commit) for name in one.files if (tree / name).exists()}:
            (tree / name).unlink()  # a link to the file of all trees
            (tree / name).write_bytes((source / name).read_bytes())
        for earlier in before:
            apply(earlier.patch, tree, "--reject")
        said = apply(commit.patch, tree, "--reject")
    found = re.findall(r"^error: (?:patch failed: (\S+:\d+)|(\S+): .+)$", said, re.MULTILINE)
    return [hunk or file for hunk, file in found]


def outcomes_of(
    source: Path, before: Sequence[Commit], commit: Commit
) -> tuple[Outcomes, Outcomes, Outcomes, Outcomes]:
    """Its own tests before and after it, then vLLM's own before and after; on a tree with `before`."""
    theirs = commit.tests_of_touched(source)
    own = commit.own_tests
    with patched(source, *(one.patch for one in before), commit.patch) as tree:
        after = run(tree, [*theirs, *own], CHOICE.left_out)
        for name in commit.files:
            if name.startswith("vllm/"):
                (tree / name).unlink()
        with patched(source, *(one.patch for one in before)) as earlier:
            for name in (name for name in commit.files if name.startswith("vllm/") and (earlier / name).exists()):
                (tree / name).write_bytes((earlier / name).read_bytes())
            own_before = run(tree, own, CHOICE.left_out)
            theirs_before = run(earlier, theirs, CHOICE.left_out)
    return own_before, after.of(own), theirs_before, after.of(theirs)


def main() -> int:
    """Print the table; the number of commits that do not apply or whose tests fail."""
    parser = argparse.ArgumentParser(description="Apply and test the series on a release of vLLM.")
    parser.add_argument("release", nargs="?", default=RELEASE)
    parser.add_argument("--apply", action="store_true", help="only say what applies")
    arguments = parser.parse_args()
    source = fetch_source(arguments.release)
    print(f"vLLM {arguments.release}\n")
    print(
        "| commit | source lines | test lines | alone | in order | own tests before, after | vLLM's own before, after |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    commits = series()
    wrong = 0
    missing: list[str] = []
    for number, commit in enumerate(commits):
        alone = not hunks_that_do_not_apply(source, (), commit)
        refused = hunks_that_do_not_apply(source, commits[:number], commit)
        missing += [f"- {commit.subject}: {hunk}" for hunk in refused]
        cells = ["yes" if alone else "no", f"{len(refused)} hunks do not" if refused else "yes", "-", "-"]
        wrong += bool(refused)
        if not missing and not arguments.apply:
            own_before, own, before, after = outcomes_of(source, commits[:number], commit)
            cells[2:] = [f"{_passed(own_before)}, {_passed(own)}", f"{_passed(before)}, {_passed(after)}"]
            wrong += bool(str(own) or commit.broken(before, after))
        lines = (commit.subject, commit.added_lines("vllm"), commit.added_lines("tests"), *cells)
        print(f"| {' | '.join(map(str, lines))} |", flush=True)
    if missing:
        print("\nHunks that do not apply:\n", *missing, sep="\n")
    return wrong


def _passed(outcomes: Outcomes) -> str:
    run_at_all = [end for end, _ in outcomes.by_name.values() if end in ("passed", "failed")]
    return f"{run_at_all.count('passed')} of {len(run_at_all)}"


if __name__ == "__main__":
    sys.exit(main())
