"""H112: what holds with one KV cache group holds with several."""

from __future__ import annotations

import pytest
from pact import SLOT_BYTES
from test_pact_groups import FULL, WINDOW, Life
from workloads import prompt

from kvpact.identity.groups import KVCacheGroup
from kvpact.identity.keys import Namespace
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.engine import JobBehavior
from kvpact_testkit.engine.simulated_worker import Job
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor

ONE = (KVCacheGroup(FULL, 16),)
TWO = (KVCacheGroup(FULL, 16), KVCacheGroup(WINDOW, 16, 20))
TOKENS = prompt(200)


def shared_by(store: DictionaryStore) -> SharedTier:
    """Another engine's tier over the same records."""
    return SharedTier(DictionaryStore(store.records), Namespace({"model": "oracle"}), SLOT_BYTES)


def found_after_a_restart(store: DictionaryStore, groups: tuple[KVCacheGroup, ...]) -> int:
    """Tokens of the prompt that an engine finds which only has the store."""
    after = Life(shared_by(store), groups)
    after.ask("again", TOKENS)
    after.end()
    return after.engine.finished["again"].num_cached_tokens


@pytest.mark.parametrize("groups", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two")])
def test_h112_what_is_used_once_is_not_written_where_only_a_second_use_is_admitted(
    groups: tuple[KVCacheGroup, ...],
) -> None:
    store = DictionaryStore()
    life = Life(shared_by(store), groups, admit="second-use")
    life.ask("first", TOKENS)
    assert len(store.records) == 0
    life.ask("second", TOKENS)
    life.end()
    assert found_after_a_restart(store, groups) == 192


@pytest.mark.parametrize("groups", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two")])
def test_h112_a_store_that_lost_its_content_is_given_all_of_it_again(groups: tuple[KVCacheGroup, ...]) -> None:
    store = DictionaryStore()
    life = Life(shared_by(store), groups)
    life.ask("first", TOKENS)
    store.records.clear()
    for number in range(2):
        life.engine.clock.now += 100.0  # what was found in a store counts as there for a minute
        life.ask(f"again {number}", TOKENS)
    life.end()
    assert found_after_a_restart(store, groups) == 192


@pytest.mark.parametrize("groups", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two")])
def test_h112_tiers_that_are_opened_late_get_all_that_memory_holds(groups: tuple[KVCacheGroup, ...]) -> None:
    """They stand in memory before there is a tier; the backlog wrote other groups' blocks where nobody asks."""
    store = DictionaryStore()
    life = Life(None, groups)
    life.ask("first", TOKENS)
    life.queue = SteppedExecutor(shared_by(store), 1 << 30)
    life.cache.open_tiers([life.queue])
    life.ask("other", prompt(40, seed=3))
    life.end()
    assert found_after_a_restart(store, groups) == 192


@pytest.mark.parametrize("late_group", [0, 1])
def test_h112_a_save_that_is_reported_before_that_of_its_chain_reaches_the_tiers(late_group: int) -> None:
    def conduct(rank: int, job: Job) -> JobBehavior:
        return JobBehavior(report_after_steps=3 if job.group_id == late_group else 0)

    store = DictionaryStore()
    life = Life(shared_by(store), TWO, conduct=conduct)
    life.ask("first", TOKENS)
    life.end()
    assert found_after_a_restart(store, TWO) == 192
