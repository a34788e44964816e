"""Names of vLLM that kvpact uses and another release changed: python scripts/compat_changes.py RELEASE_OR_TREE

    python scripts/compat_changes.py 0.34.0
    python scripts/compat_changes.py ~/src/vllm --base 0.32.0

A release is fetched once into the cache folder; a tree is a folder with the package `vllm`. It is compared with --base,
by default the last supported release. The names are those of `kvpact.vllm.compat.uses`, what src/kvpact imports of
vLLM, and each attribute that `kvpact.vllm.compat` looks up. Sources are read, and nothing of them is imported. One line
for each change: `gone`, `arguments` with both forms, `body` where only the code behind a name differs, for a reader.
The exit status is 1 if a name is gone or takes other arguments.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvpact.errors import ConfigError
from kvpact.vllm.compat.uses import USES
from kvpact_testkit.vllm.releases import RELEASES, fetch_release

PRODUCT = Path(__file__).parents[1] / "src" / "kvpact"
COMPAT = PRODUCT / "vllm" / "compat"
DEPTH = 8
"""Imports of imports that are followed."""

LOOKUPS = ("getattr", "hasattr", "attrgetter")
GONE, ARGUMENTS, BODY = "gone", "arguments", "body"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One name that differs, `module:Class.name`, with both forms of its arguments if those do."""

    kind: str
    name: str
    forms: str = ""


class Sources:
    """The package `vllm` in a folder, as text."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if there is no such package."""
        if not (folder / "vllm" / "__init__.py").is_file():
            raise ConfigError(f"{folder} has no package vllm")
        self._folder = folder
        self.module = cache(self._module)

    def _module(self, name: str) -> ast.Module | None:
        path = self._folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def words(self) -> frozenset[str]:
        """Every identifier in it."""
        found: set[str] = set()
        for file in (self._folder / "vllm").rglob("*.py"):
            found.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
        return frozenset(found)

    def names(self, module: str) -> dict[str, ast.AST]:
        """The names that a module binds -> the definition, or the import."""
        found: dict[str, ast.AST] = {}
        for node in statements(self.module(module)):
            if isinstance(node, ast.ImportFrom):
                found |= {one.asname or one.name: node for one in node.names}
            elif isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                found[node.name] = node
            else:
                found |= dict.fromkeys(bound_by(node), node)
        return found

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """Module and definition of a name, or of the module below; imports of vLLM's own are followed."""
        if (below := self.module(f"{module}.{name}")) is not None:
            return f"{module}.{name}", below
        node = self.names(module).get(name)
        if isinstance(node, ast.ImportFrom) and depth < DEPTH:
            source = self._source(module, node)
            original = next(one.name for one in node.names if name in (one.asname, one.name))
            return self.find(source, original, depth + 1) if source.startswith("vllm") else (module, node)
        return None if node is None else (module, node)

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._folder.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - node.level + is_package], *filter(None, [node.module])])

    def members(self, place: str) -> dict[str, ast.AST] | None:
        """The members of `module:Class`, of `module:`, or what `module:function` sets; None if it is not there."""
        module, _, name = place.partition(":")
        if not name:
            found = {key: self.find(module, key) for key in self.names(module)}
            return {key: where[1] for key, where in found.items() if where} if self.module(module) else None
        owner = self.find(module, name)
        if owner is None:
            return None
        where, node = owner
        if not isinstance(node, ast.ClassDef):
            return dict(set_in(node))
        members: dict[str, ast.AST] = {}
        for base in reversed(node.bases):
            members |= self.members(f"{where}:{ast.unparse(base).partition('[')[0]}") or {}
        for part in node.body:
            if isinstance(part, FUNCTIONS):
                members |= {key: node for key, node in set_in(part) if part.name == "__init__" and key not in members}
                members[part.name] = part
            else:
                members |= dict.fromkeys(bound_by(part), part)
        return members

    def read(self, place: str, names: tuple[str, ...]) -> dict[str, ast.AST]:
        """Those of the names that are there, modules of a package among them."""
        members = self.members(place) or {}
        found = {name: members[name] for name in names if name in members}
        if not found and place.endswith(":"):
            modules = {name: self.module(f"{place[:-1]}.{name}") for name in names}
            found = {name: module for name, module in modules.items() if module is not None}
        return found


def statements(node: ast.AST | None) -> Iterator[ast.AST]:
    """The statements of a module, also those under a condition."""
    for part in ast.iter_child_nodes(node) if node else ():
        if isinstance(part, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from statements(part)
        else:
            yield part


def bound_by(node: ast.AST) -> list[str]:
    """The names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def set_in(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The attributes that a function sets, of whatever."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr, ast.Pass()


def used() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What kvpact uses: `module:Class` or `module:`, and a name in it, or several of which one is enough."""
    for use in USES:
        for names in use.names.split():
            yield use.place, tuple(one.partition("(")[0] for one in names.split("|"))
    for file in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from ((f"{node.module}:", (one.name,)) for one in node.names)


def looked_up() -> frozenset[str]:
    """The attributes that `kvpact.vllm.compat` reads or asks for by name and does not define, whosever they are."""
    found: set[str] = set()
    own: set[str] = set()
    for file in COMPAT.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, FUNCTIONS):
                own.add(node.name)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKUPS:
                found |= {
                    one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
                }
    return frozenset(found - own)


def text_of(node: ast.AST) -> str:
    """A function's code without its docstring."""
    body = list(getattr(node, "body", ()))
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return "\n".join(map(ast.unparse, body))


def compare(name: str, old: ast.AST, new: ast.AST | None) -> Iterator[Change]:
    """The change of one name."""
    if new is None:
        yield Change(GONE, name)
    elif isinstance(old, FUNCTIONS) and isinstance(new, FUNCTIONS):
        before, after = ast.unparse(old.args), ast.unparse(new.args)
        if before != after:
            yield Change(ARGUMENTS, name, f"({before}) -> ({after})")
        elif text_of(old) != text_of(new):
            yield Change(BODY, name)
    elif type(old) is not type(new):
        yield Change(BODY, name)


def changes(base: Sources, other: Sources) -> tuple[list[Change], int]:
    """Everything that differs, in order, and the number of names compared: those that the base has."""
    found: set[Change] = set()
    compared = 0
    for place, names in set(used()):
        before, after = base.read(place, names), other.read(place, names)
        compared += len(before)
        kept = before.keys() & after.keys()
        for name in kept or before:  # of several, one is enough
            found.update(compare(f"{place}{'' if place.endswith(':') else '.'}{name}", before[name], after.get(name)))
    of_vllm = looked_up() & base.words()
    found |= {Change(GONE, name, "in no file") for name in of_vllm - other.words()}
    order = (GONE, ARGUMENTS, BODY)
    return sorted(found, key=lambda one: (order.index(one.kind), one.name)), compared + len(of_vllm)


def sources_of(given: str) -> Sources:
    """A tree, or a release that is fetched. Raises ConfigError if neither is there."""
    return Sources(Path(given) if Path(given).is_dir() else fetch_release(given))


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", metavar="RELEASE_OR_TREE")
    parser.add_argument("--base", metavar="RELEASE_OR_TREE", default=list(RELEASES)[-1])
    given = parser.parse_args(arguments)
    try:
        found, compared = changes(sources_of(given.base), sources_of(given.release))
    except ConfigError as error:
        print(f"compat_changes: {error}", file=sys.stderr)
        return 2
    for change in found:
        print(f"{change.kind:<9}  {change.name}{f'  {change.forms}' if change.forms else ''}")
    counts = Counter(change.kind for change in found)
    print(
        f"{given.release} against {given.base}: {compared} names, {counts[GONE]} gone, {counts[ARGUMENTS]} with other "
        f"arguments, {counts[BODY]} with another body"
    )
    return 1 if counts[GONE] or counts[ARGUMENTS] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
