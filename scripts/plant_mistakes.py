"""Mistakes planted in copies of the product, and the tests that find them: python scripts/plant_mistakes.py.

Forty sites are chosen with a fixed seed in the folders of `FOLDERS`; each is run against the test files that import its
module and then `MORE`, until one fails. `--tests` names another checkout, whose tests are run over this one's product:
what its tests find and these do not was lost with a test. Only copies are written; the engines' tests are left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("vllm", "tiers", "cli")
SEED = 51
MISTAKES = 40
FILES = 5
"""Test files that import a mistake's module, of which it is shown to at most so many: those that name it most often."""

MORE = {
    "cli": ["tests/cli/test_cli.py", "tests/cli/test_cli_stores.py", "tests/cli/test_cli_status.py"],
    "tiers/disk": ["tests/tiers/test_disk_tier.py", "tests/tiers/test_slab_reading.py"],
    "tiers": ["tests/tiers/test_directory_tier.py", "tests/tiers/test_executor.py"],
    "vllm/offload": ["tests/under_vllm/test_offload_tier.py"],
    "vllm": [
        "tests/under_vllm/test_engine_hooks.py", "tests/under_vllm/test_engine_configuration.py",
        "tests/under_vllm/test_hit_counts.py",
    ],
}  # fmt: skip
"""Test files of a folder's parts together, by the folder."""

LIMIT_S = 900.0

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    one: other
    for pair in [
        (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot),
        (ast.Add, ast.Sub), (ast.And, ast.Or),
    ]
    for one, other in (pair, pair[::-1])
}  # fmt: skip


class Mistake(NamedTuple):
    """A change of one node of a parsed file, and its name for people."""

    line: int
    name: str
    plant: Callable[[], None]


def mistakes(tree: ast.Module) -> Iterator[Mistake]:
    """All that can be planted in the functions of `tree`, in the order of `ast.walk`; one at a time."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from _mistakes_of(node)


def _mistakes_of(node: ast.AST) -> Iterator[Mistake]:
    line = getattr(node, "lineno", 0)

    def change(name: str, field: str, value: object) -> Mistake:
        return Mistake(line, name, lambda: setattr(node, field, value))

    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield change(f"{type(op).__name__} -> {SWAPPED[type(op)].__name__}", "ops", [SWAPPED[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            yield change(f"{type(op).__name__} -> {SWAPPED[type(op)].__name__}", "op", SWAPPED[type(op)]())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield change("condition negated", "test", ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield change(f"{value} -> {value + 1}", "value", value + 1)
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield change("None returned", "value", ast.Constant(None))
    for field in ("body", "orelse", "finalbody"):
        found = getattr(node, field, None)
        statements = found if isinstance(found, list) else []  # a lambda's body is none
        for place, statement in enumerate(statements):
            if _does_something(statement):
                drop = partial(statements.__setitem__, place, ast.Pass())
                yield Mistake(statement.lineno, f"dropped: {ast.unparse(statement)[:60]}", drop)


def _does_something(statement: ast.AST) -> bool:
    """Whether a statement calls something but the log, or sets an attribute or an item."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return False
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def chosen(source: Path, seed: int, count: int) -> list[tuple[Path, int]]:
    """File below `source`, and place among its mistakes, of each mistake that is planted."""
    files = [path for folder in FOLDERS for path in sorted((source / "kvpact" / folder).rglob("*.py"))]
    places = [(path, place) for path in files for place, _ in enumerate(mistakes(ast.parse(path.read_text())))]
    return [(path.relative_to(source), place) for path, place in sorted(Random(seed).sample(places, count))]


def tests_of(module: Path, checkout: Path) -> list[Path]:
    """Test files that a mistake in a module, which is a path below src, is shown to, one after another."""
    words = re.compile(rf"\b{re.escape('.'.join(module.with_suffix('').parts).removesuffix('.__init__'))}\b")
    beside = re.compile(rf"from {re.escape('.'.join(module.parent.parts))} import .*\b{module.stem}\b")
    engines = (checkout / "conftest.py").read_text()
    found = []
    for path in sorted([*(checkout / "tests").rglob("test_*.py"), *(checkout / "kit/tests").rglob("test_*.py")]):
        named = len(words.findall(text := path.read_text())) + len(beside.findall(text))
        if named and str(path.relative_to(checkout)) not in engines and path.name != "test_house.py":
            found.append((-named - 3 * (module.stem in path.stem), path))
    more = next(files for folder, files in MORE.items() if str(module).startswith(f"kvpact/{folder}/"))
    there = [path for path in (checkout / file for file in more) if path.exists()]
    return [*dict.fromkeys([path for _, path in sorted(found)[:FILES]] + there)]


def first_failure(source: Path, tests: list[str], checkout: Path, left_out: list[str]) -> str:
    """The first test that fails over the product in `source`; "" if all pass, "time" if they do not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", *tests]
    command += [word for test in left_out for word in ("--deselect", test)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    try:
        ended = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "time"
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines]
    return "" if ended.returncode in (0, 5) else failed[0] if failed else tests[0]


def verdict(source: Path, tests: list[Path], checkout: Path) -> str:
    """The test that finds a mistake: it fails over the product in `source`, and passes over the right one."""
    names = [str(path.relative_to(checkout)) for path in tests]
    left_out: list[str] = []
    while (failed := first_failure(source, names, checkout, left_out)) not in ("", "time"):
        if failed in left_out or not first_failure(ROOT / "src", [failed], checkout, []):
            return failed
        left_out.append(failed)
    return failed


def main() -> None:
    """Plant each mistake, run its tests, print which of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout whose tests are run")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=MISTAKES)
    parser.add_argument("--only", default="", help="plant only in files whose path contains this")
    parser.add_argument("--list", action="store_true", help="name mistakes and tests, and run nothing")
    options = parser.parse_args()
    os.nice(5)
    verdicts = []
    for module, place in chosen(ROOT / "src", options.seed, options.count):
        tree = ast.parse((ROOT / "src" / module).read_text())
        mistake = list(mistakes(tree))[place]
        title = f"{module}:{mistake.line}: {mistake.name}"
        tests = tests_of(module, options.tests)
        if options.only not in title:
            continue
        if options.list:
            print(f"{title}: {' '.join(path.stem for path in tests)}")
            continue
        with TemporaryDirectory(prefix="kvpact-mistake") as directory:
            Path(directory).chmod(0o755)  # other users, whom some tests play, read it too
            copy = Path(shutil.copytree(ROOT / "src", Path(directory) / "src"))
            mistake.plant()
            (copy / module).write_text(ast.unparse(ast.fix_missing_locations(tree)))
            verdicts.append(verdict(copy, tests, options.tests))
        print(f"{title}: {verdicts[-1] or 'NOT FOUND'}", flush=True)
    print(f"{sum(map(bool, verdicts))} of {len(verdicts)} found")


if __name__ == "__main__":
    main()
