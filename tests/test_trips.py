"""What runs in the scheduler's half: for one kind of model alone, and on the way of each call. May only fall."""

from __future__ import annotations

import ast

from documents import ROOT, load_script

TRIPS = load_script("scripts/trips.py")

NEEDS = ROOT / "src" / "kvpact" / "cache" / "needs"

NEEDS_MAY_IMPORT = ("kvpact.cache.needs.", "kvpact.identity.", "kvpact.ranges", "kvpact.contract", "kvpact.errors")
"""Of kvpact: neither index nor tiers, clock or metrics."""


def test_no_figure_is_above_its_limit() -> None:
    """`LIMITS` of the script has the targets beside them."""
    found = TRIPS.figures()
    above = {name: (found[name], limit) for name, (limit, _) in TRIPS.LIMITS.items() if found[name] > limit}
    assert above == {}, "see `python scripts/trips.py -v`"


def test_no_limit_is_below_its_target() -> None:
    assert [name for name, (limit, target) in TRIPS.LIMITS.items() if limit < target] == []


def test_calls_for_many_blocks_make_hardly_more_calls() -> None:
    """No Python call for each block of a linked run."""
    few = TRIPS.trips(TRIPS.BLOCKS)
    for name, trip in TRIPS.trips(TRIPS.MANY_BLOCKS).items():
        assert trip.stays <= few[name].stays + TRIPS.GROWTH, name
        assert trip.calls <= few[name].calls + TRIPS.GROWTH, name


def test_needs_knows_neither_index_nor_tiers() -> None:
    found = set()
    for module in NEEDS.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    of_kvpact = {name for name in found if name.partition(".")[0] == "kvpact"}
    assert {name for name in of_kvpact if not name.startswith(NEEDS_MAY_IMPORT)} == set()
    assert found.isdisjoint({"time", "logging", "prometheus_client"})
