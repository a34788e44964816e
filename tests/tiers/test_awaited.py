"""How tiers come to be used: tried again with pauses until they can be, whatever their kind, and told of once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dictionary_tier import DictionaryTier
from kvpact.errors import NoSuchTier, TierError, reason_of
from kvpact.identity.keys import Namespace
from kvpact.tiers import awaited
from kvpact.tiers.awaited import AwaitedTier, open_tiers
from kvpact.tiers.base import Tier, TierHealth
from kvpact.tiers.breaker import FIRST_PAUSE_S, JITTER, LONGEST_PAUSE_S, pauses
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from polling import until

PLACE = TierContext(Namespace({"model": "awaited", "block_size": "16"}), 4096)
URL = "dir:///mnt/not-mounted/kvpact?capacity=1MiB"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> Iterator[float]:
        while True:
            yield 0.001

    monkeypatch.setattr(awaited, "pauses", short)


def opened_by(monkeypatch: pytest.MonkeyPatch, open_tier: Callable[[], Tier]) -> AwaitedTier:
    monkeypatch.setattr(awaited, "open_tier", lambda url, place: open_tier())
    (tier,) = open_tiers([parse_tier_url(URL)], PLACE, 10.0)
    return tier


def new_tier() -> Tier:
    return DictionaryTier(PLACE.namespace, 4096, 8)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvpact-open-tier"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_h97_pauses_grow_to_seconds_and_no_longer() -> None:
    longest = [seconds for seconds, _ in zip(pauses(), range(20), strict=False)]
    assert FIRST_PAUSE_S <= longest[0] <= FIRST_PAUSE_S * (1 + JITTER)
    assert all(LONGEST_PAUSE_S <= seconds <= LONGEST_PAUSE_S * (1 + JITTER) for seconds in longest[3:])


def test_h97_it_is_told_once_and_costs_no_descriptor_and_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A real directory that is not there, tried a hundred times; then it is."""
    tries: list[int] = []

    def counted(*arguments: Any) -> Tier:
        tries.append(descriptors())
        return open_tier(*arguments)

    monkeypatch.setattr(awaited, "open_tier", counted)
    (tier,) = open_tiers([parse_tier_url(f"disk://{tmp_path}/no/kvpact?capacity=1MiB")], PLACE, 10.0)
    until(lambda: len(tries) > 100)
    assert len(threads()) == 1
    assert max(tries[50:]) <= tries[0]
    assert "does not exist; create it" in tier.health().reason
    for refuse in (tier.lookup, tier.delete):
        with pytest.raises(TierError, match=r"cannot be used yet: .* does not exist"):
            refuse([bytes(32)])
    (tmp_path / "no").mkdir()
    until(lambda: tier.there)
    assert tier.there is not None
    assert tier.there.health().ok
    until(lambda: not threads())
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    tier.close()


def test_h97_a_store_that_opens_and_does_not_answer_is_asked_again_not_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that connects when it is used first."""

    class Sick(DictionaryTier):
        asked, opened = 0, 0

        def health(self) -> TierHealth:
            Sick.asked += 1
            return TierHealth(Sick.asked > 5, "does not answer", readable=Sick.asked > 5)

    def open_sick() -> Tier:
        Sick.opened += 1
        return Sick(PLACE.namespace, 4096, 8)

    tier = opened_by(monkeypatch, open_sick)
    until(lambda: tier.there)
    assert (Sick.opened, Sick.asked) == (1, 6)


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.parametrize("error", [TierError("not yet"), OSError(5, "no I/O"), ZeroDivisionError("!"), Panic("panic")])
def test_h97_whatever_an_opener_raises_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    tries: list[int] = []

    def open_tier() -> Tier:
        tries.append(1)
        if len(tries) < 5:
            raise error
        return new_tier()

    tier = opened_by(monkeypatch, open_tier)
    assert reason_of(error) in tier.reason
    until(lambda: tier.there)
    assert len(tries) == 5


def test_what_a_person_must_correct_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def open_tier() -> Tier:
        tries.append(1)
        raise NoSuchTier("pip install it")

    tier = opened_by(monkeypatch, open_tier)
    until(lambda: not threads())
    assert (len(tries), tier.is_given_up, tier.there) == (1, True, None)


@pytest.mark.parametrize("is_late", [True, False])
def test_what_is_closed_while_it_is_opened_is_closed_by_whoever_opens_it(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    ended, go_on = [], threading.Event()

    class Closing(DictionaryTier):
        def close(self) -> None:
            ended.append(1)

    def open_tier() -> Tier:
        assert go_on.wait(10.0)
        return Closing(PLACE.namespace, 4096, 8)

    monkeypatch.setattr(awaited, "open_tier", lambda url, place: open_tier())
    tier = AwaitedTier(parse_tier_url(URL), PLACE)
    if not is_late:
        go_on.set()
        until(lambda: tier.there)
    tier.close()
    go_on.set()
    until(lambda: not threads())
    assert ended


def test_tiers_are_tried_at_once_and_one_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), []

    def hang(url: object, place: object) -> Tier:
        begun.append(time.monotonic())
        assert go_on.wait(10.0)
        return new_tier()

    monkeypatch.setattr(awaited, "open_tier", hang)
    tiers = open_tiers([parse_tier_url(URL)] * 3, PLACE, 0.01)
    until(lambda: len(begun) == 3)
    assert [tier.there for tier in tiers] == [None] * 3
    go_on.set()
    until(lambda: all(tier.there for tier in tiers))
