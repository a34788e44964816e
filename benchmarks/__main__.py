"""`python -m benchmarks NAME [--output FILE]`: finds a benchmark, runs it, prints its rows. Measures nothing itself."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.table import table

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this folder, as its text describes it: nothing is imported to make the list."""

    name: str
    path: Path
    summary: str
    has_rows: bool
    has_main: bool


def benchmarks() -> dict[str, Benchmark]:
    """All benchmarks by name."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if functions & {"rows", "main"}:
            name = path.stem
            for node in tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAME":
                    name = str(ast.literal_eval(node.value))
            summary = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
            found[name] = Benchmark(name, path, summary, "rows" in functions, "main" in functions)
    return found


class OneLine(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with the message alone."""
        refuse(f"{self.prog}: {message}")


def refuse(message: str) -> NoReturn:
    """End with one line: the user can change what is wrong."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas between them, not {text!r}") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def options(benchmark: Benchmark, rows: Callable[..., Any], arguments: Sequence[str]) -> dict[str, Any]:
    """What the command line says for the parameters of `rows`, each of which has a default of its type."""
    parser = OneLine(prog=benchmark.name, description=benchmark.summary)
    for parameter in inspect.signature(rows).parameters.values():
        flag, default = f"--{parameter.name.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, default=default, action=argparse.BooleanOptionalAction)
        elif isinstance(default, list | tuple):
            kind: Callable[[str], object] = _numbers if all(isinstance(one, int) for one in default) else _words
            parser.add_argument(flag, default=default, type=kind, metavar="A,B,...")
        elif default is not inspect.Parameter.empty:
            kind = Path if default is None else type(default)
            parser.add_argument(flag, default=default, type=kind, help=f"default: {default}")
    return vars(parser.parse_args(arguments))


@contextlib.contextmanager
def standard_output_kept() -> Iterator[int]:
    """Within, all that is printed goes to standard error, a child's words too; yields where standard output was."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield kept
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run(benchmark: Benchmark, arguments: Sequence[str], target: str | None) -> int:
    """Run it; with `target`, write its rows there as JSON ("-": on standard output, and nothing else)."""
    if not benchmark.has_rows:
        if target is not None:
            refuse(f"{benchmark.name} prints a page, not rows: run it without --output")
        return subprocess.run([sys.executable, str(benchmark.path), *arguments], check=False).returncode
    if target not in (None, "-"):
        try:
            Path(target).open("a", encoding="utf-8").close()
        except OSError as error:
            refuse(f"--output: {target} cannot be written: {error.strerror}")
    try:
        module = importlib.import_module(f"benchmarks.{benchmark.path.stem}")
        if target is None and benchmark.has_main:
            sys.argv = [str(benchmark.path), *arguments]
            return int(module.main() or 0)
        wanted = options(benchmark, module.rows, arguments)
        if target == "-":
            with standard_output_kept() as output:
                found = list(module.rows(**wanted))
                os.write(output, f"{json.dumps(found, indent=1)}\n".encode())
            return 0
        found = list(module.rows(**wanted))
    except ModuleNotFoundError as error:
        refuse(f"{benchmark.name} needs the package {error.name!r}, which is not installed here")
    print(f"{benchmark.name}: {benchmark.summary}\n\n{table(found)}")
    if target is not None:
        Path(target).write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str]) -> int:
    """The list without a name, else the benchmark."""
    known = benchmarks()
    if not arguments:
        width = max(map(len, known))
        print("python -m benchmarks NAME [--output FILE] [--help]\n")
        for benchmark in known.values():
            print(f"{benchmark.name:{width}}  {benchmark.summary}")
        return 0
    parser = OneLine(prog="python -m benchmarks", add_help=False, allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--output", metavar="FILE")
    wanted, others = parser.parse_known_args(arguments)
    if wanted.name not in known:
        refuse(f"there is no benchmark {wanted.name!r}; there are {', '.join(known)}")
    return run(known[wanted.name], others, wanted.output)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
