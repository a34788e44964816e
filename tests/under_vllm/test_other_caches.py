"""Another author's cache under vLLM's real scheduler, with kvpact's own workers and arena, by `"cache"` alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.contract import CacheSpec, ExternalCache
from kvpact.errors import ConfigError
from kvpact.identity.notices import NoticeWriter
from kvpact_testkit.vllm.faulty_copies import FaultyEngine
from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
MINIMAL = "minimal_cache:MinimalCache"
STORED, BLOCKS = make_prompt(1, 6), 6


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlayedEngine]]:
    """Starts an engine with the example's cache, or another one."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    engines: list[PlayedEngine] = []

    def start(**settings: Any) -> PlayedEngine:
        engines.append(PlayedEngine(tmp_path, **{"cache": MINIMAL, **settings}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def cached_blocks(engine: PlayedEngine, prompt: list[int], **arguments: Any) -> int:
    """How many blocks of a prompt are not computed, with the engine's own cache emptied; the answer must be right."""
    engine.forget()
    played = engine.generate(prompt, **arguments)
    assert played.said == answer(prompt, 3)
    return played.cached_tokens // BLOCK


def test_a_cache_of_another_author_serves_hits(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    assert type(engine.connector.scheduler_side.cache).__module__ == "minimal_cache"
    assert cached_blocks(engine, STORED) == 0
    assert cached_blocks(engine, STORED) == BLOCKS
    assert cached_blocks(engine, make_prompt(2, 6, stem=STORED[: 3 * BLOCK])) == 3
    assert engine.external_hits == (BLOCKS + 3) * BLOCK


def test_h24_identity_applies_to_another_authors_cache(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    assert cached_blocks(engine, STORED, cache_salt="one tenant") == 0
    assert cached_blocks(engine, STORED, cache_salt="another tenant") == 0
    assert cached_blocks(engine, STORED, cache_salt="one tenant") == BLOCKS


def test_p13_weights_that_change_end_what_another_authors_cache_serves(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    cached_blocks(engine, STORED)
    notices = engine.worker.cache_worker.notices
    assert isinstance(notices, NoticeWriter)
    notices.weights_change()
    assert cached_blocks(engine, STORED) == 0
    assert cached_blocks(engine, STORED) == BLOCKS


def test_p9_blocks_that_fail_to_load_are_computed_and_the_cache_serves_on(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    cached_blocks(engine, STORED)
    transfers = engine.worker.cache_worker.transfers
    assert transfers is not None
    whole = transfers.engine
    transfers.engine = FaultyEngine(whole, lambda job, block: True)
    cached_blocks(engine, STORED)
    transfers.engine = whole
    cached_blocks(engine, STORED)
    assert cached_blocks(engine, STORED) == BLOCKS


def test_p13_what_was_on_its_way_when_the_weights_changed_is_computed_again(start: Callable[..., PlayedEngine]) -> None:
    """The example's cache recalls nothing: that a load was committed before, the adapter knows."""
    engine = start()
    cached_blocks(engine, STORED)
    engine.forget()
    before = engine.computed_tokens
    played = engine.add(STORED)
    engine.step(before_update=engine.connector.reset_cache)
    engine.run()
    assert played.said == answer(STORED, 3)
    assert engine.computed_tokens - before >= len(STORED)


def test_a_step_that_fails_orders_nothing_later(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    cached_blocks(engine, STORED)
    mounted = engine.connector.scheduler_side.mounted
    assert mounted is not None
    use, times = mounted.use_late_tiers, iter([True])

    def fail_once() -> None:
        if next(times, False):
            raise RuntimeError("injected")
        use()

    engine.forget()
    played = engine.add(STORED)
    mounted.use_late_tiers = fail_once  # type: ignore[method-assign]
    engine.run()
    assert played.said == answer(STORED, 3)
    assert cached_blocks(engine, STORED) == BLOCKS


class NoCache:
    """No `ExternalCache`."""

    def __init__(self, spec: CacheSpec) -> None:
        assert not isinstance(self, ExternalCache)


def broken_cache(spec: CacheSpec) -> ExternalCache:
    """Another author's defect."""
    raise ZeroDivisionError("no slots")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "minimal_cache"}, "a module and a class or function in it are needed"),
        ({"cache": "no_such_module:MinimalCache"}, "No module named 'no_such_module'; name a module"),
        ({"cache": "minimal_cache:NoCache"}, "has no attribute 'NoCache'; name a module"),
        ({"cache": f"{__name__}:NoCache"}, "made a NoCache; a kvpact.contract.ExternalCache is needed"),
        ({"cache": f"{__name__}:broken_cache"}, "makes no cache: ZeroDivisionError: no slots"),
        ({"cache": f"{__name__}:BLOCKS"}, "is a int; a class or function is needed"),
        ({"tiers": ["disk:///nowhere?capacity=1GiB"]}, "excludes other settings: tiers"),
        ({"match_at": "step"}, "excludes other settings: tiers"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_mounted_stops_the_start(
    start: Callable[..., PlayedEngine], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**settings)
