"""The map in docs/design.md holds: a module imports from its own floor or from below, without a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvpact

SOURCE = Path(kvpact.__file__).parent

FLOORS = {
    0: [
        "errors",
        "blocks",
        "contract",
        "config",
        "tier_urls",
        "metrics",
        "weights",
        "background",
        "epochs",
        "own_files",
    ],
    1: [
        "ledger",
        "lifecycle",
        "tags",
        "index",
        "policies",
        "prefault",
        "arena",
        "notices",
        "loaded_adapters",
        "costs",
        "holds",
        "tiers",
    ],
    2: ["staging", "step_match", "idle_steps", "cache", "copies", "overdue", "lazy", "saves", "paged", "transfer"],
    3: ["vllm", "engine"],
    4: ["testkit", "replay", "demo", "cli"],
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}

CORE_MAY_NOT_IMPORT = {"torch", "vllm", "transformers", "typer", "rich", "pickle", "marshal", "shelve", "dill"}


REACHES_ITS_STORE = {"tiers.mooncake": {"socket", "http.client"}}
"""A tier talks to the store whose address its user gave; the others do so through that store's client."""


def imports_of(path: Path) -> set[str]:
    """Every module that the file names in an import statement, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def modules() -> dict[str, Path]:
    """Dotted name below kvpact -> file."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in paths if path.parent != SOURCE / ""
    } | {path.stem: path for path in SOURCE.glob("*.py") if path.stem != "__init__"}


def test_every_module_has_a_floor_and_imports_none_above_it() -> None:
    for name, path in modules().items():
        part = name.split(".")[0]
        assert part in FLOOR, f"{name} has no floor in the map"
        for imported in imports_of(path):
            package, _, rest = imported.partition(".")
            if package == "kvpact" and rest:
                below = rest.split(".")[0]
                assert FLOOR[below] <= FLOOR[part], f"{name} (floor {FLOOR[part]}) imports {imported}"


def test_no_circle_of_imports_on_a_floor() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        part = name.split(".")[0]
        parts = {imported.split(".")[1] for imported in imports_of(path) if imported.startswith("kvpact.")}
        graph.setdefault(part, set()).update(parts - {part})
    assert list(TopologicalSorter(graph).static_order())


def test_h80_the_core_imports_no_engine_and_nothing_that_unpickles() -> None:
    for name, path in modules().items():
        if FLOOR[name.split(".")[0]] <= 2:
            packages = {imported.split(".")[0] for imported in imports_of(path)}
            assert not packages & CORE_MAY_NOT_IMPORT, f"{name} imports {packages & CORE_MAY_NOT_IMPORT}"
    for name, path in modules().items():
        assert not {"pickle", "marshal", "shelve", "dill"} & imports_of(path), f"{name} can unpickle"


def test_h82_nothing_here_can_send_anything_to_anybody() -> None:
    """Usage data, telemetry, update checks: no module has the means, so none can be on by default."""
    means = {"socket", "ssl", "http", "urllib.request", "requests", "httpx", "aiohttp", "urllib3", "ftplib", "smtplib"}
    for name, path in modules().items():
        found = {imported for imported in imports_of(path) if imported in means or imported.split(".")[0] in means}
        found -= REACHES_ITS_STORE.get(name, set())
        assert not found, f"{name} imports {found}"
