"""`kvpact tiers`, `inspect`, `verify` and `gc` on kinds of tier that other packages add."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator

import pytest

from dictionary_tier import DictionaryTier
from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import Tier, TierHealth, chained
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import TierURL, parse_tier_url
from kvpact_command import kvpact, refusal
from kvpact_testkit.sample_blocks import document, filled_buffers
from kvpact_testkit.tier.dictionary_store import DictionaryStore

LLAMA = Namespace({"weights": "hub:0a1b2c3d"}, "llama")
DOCUMENT = document("operators", 6)
STORES: dict[str, DictionaryStore] = {}
FOR_TOOLS: list[bool] = []


class IllTier(DictionaryTier):
    """A tier that knows that it does not work."""

    def health(self) -> TierHealth:
        return TierHealth(False, "its disk is gone")


def open_shared(url: TierURL, place: TierContext) -> Tier:
    """A tier as docs/write-a-tier.md makes one over a store."""
    FOR_TOOLS.append(place.for_tool)
    store = STORES.setdefault(url.host, DictionaryStore())
    return SharedTier(store, place.namespace, place.slot_bytes, seal=place.seal)


def open_plain(url: TierURL, place: TierContext) -> Tier:
    """A tier of one model, or one that does not open."""
    if url.host == "raises":
        raise RuntimeError("cannot think")
    if url.host == "absent":
        raise TierError("nobody answers at absent")
    return (IllTier if url.host == "ill" else DictionaryTier)(place.namespace, place.slot_bytes, 64)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with both kinds."""
    entries = [
        importlib.metadata.EntryPoint(name, f"{__name__}:open_{name}", "kvpact.tiers") for name in ("shared", "plain")
    ]

    def entry_points(*, group: str, name: str = "") -> list[importlib.metadata.EntryPoint]:
        return [entry for entry in entries if name in ("", entry.name) and group == "kvpact.tiers"]

    monkeypatch.setattr("kvpact.tiers.registry.entry_points", entry_points)
    monkeypatch.setattr("kvpact.tiers.urls.entry_points", entry_points)
    yield
    STORES.clear()
    FOR_TOOLS.clear()


def fill() -> None:
    tier = open_tier(parse_tier_url("shared://here"), TierContext(LLAMA, 8192))
    assert all(tier.put(chained(DOCUMENT.keys, filled_buffers(DOCUMENT.keys, 8192, 2))))
    assert FOR_TOOLS == [False]


def test_a_store_of_another_package_is_looked_into_like_kvpacts_own() -> None:
    fill()
    (group,) = json.loads(kvpact("inspect", "shared://here", "--json").stdout)["namespaces"]
    assert (group["blocks"], group["fields"]["model"]) == (6, "llama")
    report = json.loads(kvpact("verify", "shared://here", "--json").stdout)
    assert (report["records"], report["sound"], report["damaged"]) == (6, 6, [])
    (row,) = json.loads(kvpact("tiers", "shared://here", "--json").stdout)["now"]
    assert row["state"] == "works"
    assert FOR_TOOLS == [False, True, True, True]


def test_verify_finds_what_is_damaged_in_a_store_of_another_package() -> None:
    fill()
    store = STORES["here"]
    name = next(record.name for record in store.names() if not record.name.endswith("namespace"))
    raw = bytearray(store.size(name) or 0)
    assert store.read([name], [[memoryview(raw)]]) == [True]
    raw[-1] ^= 1
    store.write([name], [[bytes(raw)]])
    result = kvpact("verify", "shared://here")
    assert result.exit_code == 1
    assert "payload does not match its checksum" in result.stdout


def test_gc_removes_from_a_store_of_another_package() -> None:
    fill()
    assert kvpact("gc", "shared://here", "--yes", "--namespace", LLAMA.name).stdout == "removed 7 records\n"
    assert [*STORES["here"].names()] == []


def test_tiers_asks_any_tier_of_another_package() -> None:
    result = kvpact("tiers", "plain://well", "plain://ill", "plain://raises", "plain://absent", "--json")
    rows = json.loads(result.stdout)["now"]
    assert result.exit_code == 1
    assert [row["state"] for row in rows] == [
        "works",
        "its disk is gone",
        "plain://raises: RuntimeError: cannot think",
        "nobody answers at absent",
    ]
    assert [type(row["lookup_seconds"]) for row in rows[:2]] == [float, float]
    assert rows[0]["used_bytes"] is None


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("gc", "--yes", "--namespace", "0123abcd")])
def test_a_tier_that_shows_a_command_nothing_is_refused_with_the_reason(command: tuple[str, ...]) -> None:
    said = refusal(*command, "plain://well")
    assert said.startswith("plain://well: a DictionaryTier is opened for one model, and shows a command no blocks")
    assert refusal(*command, "plain://raises") == "plain://raises: RuntimeError: cannot think"
