"""Every wait, fence, order and limit in the device engine's code is needed: without it, some seed finds wrong bytes.

The mutants are made from the code itself, so that a wait that is added later has one as well.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import device_plays as plays
from device_beds import HYBRIDS, LAYOUTS, SIZED, Bed
from kvpact_testkit.device import hostile_driver

FOLDER = Path(__file__).parents[3] / "src/kvpact/worker/device"
MODULES = ("entries", "engine")
"""What orders copies."""

SEEDS = 24
STEPS = 25
MAX_ENTRIES = 16
"""Of a batch, so that these plays reach it."""

REPLACEMENTS = {
    "stream_wait": "None",
    "record": "{owner}.record({owner}.create_stream())",
    "is_done": "True",
}
"""Method of a device -> what stands in its place in a mutant."""

OTHERS = {
    "device.save": "device.load",
    "self.cuts": "False",
    "self.engine.order(self)": "None",
    "MAX_BATCH_ENTRIES": "1 << 30",
    "most // len(queues)": "1 << 30",
    "queue.open[0] is transfer": "True",
    "min(waiting, key=self._entries_left)": "waiting[0]",
    "self.copies // 2": "self.copies",
}
"""Expression -> what stands in its place."""

NEED_NO_MUTANT = {
    "self._is_at_rest()": "after a refusal; see test_engine.py",
    "self.order(transfer)": "after a cancellation; see test_engine.py",
}
"""Expression -> why these plays cannot see that it is missing."""


class Sites(ast.NodeTransformer):
    """Finds the sites of a module, in order, and replaces the one that is `chosen`."""

    def __init__(self, module: str, chosen: int = -1) -> None:
        self.module, self.chosen = module, chosen
        self.found: list[str] = []

    def _site(self, node: ast.expr, replacement: str) -> ast.expr:
        self.found.append(f"{self.module}:{node.lineno}: {ast.unparse(node)} -> {replacement}")
        mutant = ast.parse(replacement, mode="eval").body
        return ast.copy_location(mutant, node) if len(self.found) - 1 == self.chosen else node

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            source = ast.unparse(node)
            if source in NEED_NO_MUTANT:
                return node
            if source in OTHERS:
                return self._site(node, OTHERS[source])
        visited: ast.AST = super().visit(node)
        return visited

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute):
            owner, method = ast.unparse(node.func.value), node.func.attr
            if owner == "self._device" and method in REPLACEMENTS:
                return self._site(node, REPLACEMENTS[method].format(owner=owner))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._site(node, "True") if "pinned_bytes" in ast.unparse(node) else self.generic_visit(node)


def sites() -> list[tuple[str, int, str]]:
    """(module, number in it, what is replaced by what)."""
    found = []
    for module in MODULES:
        visitor = Sites(module)
        visitor.visit(ast.parse((FOLDER / f"{module}.py").read_text()))
        found += [(module, number, site) for number, site in enumerate(visitor.found)]
    return found


class Mutant:
    """The package with one site replaced, under another name."""

    def __init__(self, folder: Path, name: str, module: str, chosen: int) -> None:
        package = folder / name
        package.mkdir()
        (package / "__init__.py").touch()
        for other in MODULES:
            tree: ast.AST = ast.parse((FOLDER / f"{other}.py").read_text())
            if other == module:
                tree = Sites(module, chosen).visit(tree)
            source = ast.unparse(ast.fix_missing_locations(tree))
            for one in MODULES:
                source = source.replace(f"kvpact.worker.device.{one} ", f"{name}.{one} ")
            (package / f"{other}.py").write_text(source)
        sys.path.insert(0, str(folder))
        try:
            self.engine = importlib.import_module(f"{name}.engine")
        finally:
            sys.path.remove(str(folder))
        vars(self.engine)["MAX_BATCH_ENTRIES"] = MAX_ENTRIES

    def problem(self, seed: int) -> str:
        """What the play of this seed finds; "" for nothing."""
        layouts = [*LAYOUTS, *HYBRIDS, *SIZED]
        bed = Bed(layouts[seed // 2 % len(layouts)], seed, self.engine)
        try:
            found = bed.play(seed, STEPS) or bed.end_abruptly(seed)
        except Exception as error:
            return repr(error)
        return found[0] if found else ""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_driver, "FOREVER_SECONDS", 1.0)
    monkeypatch.setattr(hostile_driver, "MAX_BATCH_ENTRIES", MAX_ENTRIES)
    monkeypatch.setattr(plays, "END_SECONDS", 2.0)


def test_there_are_mutants_of_every_kind() -> None:
    found = " ".join(site for _, _, site in sites())
    for kind in (*REPLACEMENTS, *OTHERS, "pinned_bytes"):
        assert kind in found
    assert len(sites()) >= 10


def test_the_code_as_it_is_passes(tmp_path: Path) -> None:
    same = Mutant(tmp_path, "mutant_none", "engine", -1)
    assert [problem for seed in range(SEEDS) if (problem := same.problem(seed))] == []


@pytest.mark.parametrize(("module", "number", "site"), sites(), ids=[site for _, _, site in sites()])
def test_each_mutant_is_found(module: str, number: int, site: str, tmp_path: Path) -> None:
    mutant = Mutant(tmp_path, f"mutant_{module}_{number}", module, number)
    for seed in range(SEEDS):
        if problem := mutant.problem(seed):
            print(f"{site}: seed {seed}: {problem}")
            return
    pytest.fail(f"{site}: {SEEDS} seeds find nothing")
