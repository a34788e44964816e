"""The models of policies for hybrid models' blocks, counted by hand, and what they say of a cut of a real trace."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hybrid_models import FOLDER, read_model
from hybrid_replay import (
    PolicyCache,
    Prompt,
    Save,
    Shape,
    Totals,
    full_shape,
    payload_shape,
    physical_shape,
    read_trace,
    replay,
)
from kvpact.identity.groups import GroupKind, KVCacheGroup

CHAIN = KVCacheGroup(GroupKind.FULL, 512)
TWO_ROWS = KVCacheGroup(GroupKind.WINDOW, 512, 1024)
WINDOWED = Shape((CHAIN, TWO_ROWS), (10, 3))
STATES = Shape((CHAIN, KVCacheGroup(GroupKind.STATE, 512)), (10, 7))
TRACE = FOLDER.parent / "conversation_trace_600.jsonl"


def prompt(*rows: int) -> Prompt:
    """A prompt of these whole rows and one token more."""
    return len(rows) * 512 + 1, list(rows)


def hits(cache: PolicyCache, *prompts: Prompt) -> list[int]:
    """Rows of the match of each prompt; the cache is checked after each."""
    found = []
    for one in prompts:
        found.append(cache.serve(one)[0])
        cache.check()
    return found


@pytest.mark.parametrize("save", Save)
def test_a_prompt_that_goes_on_from_another_hits_all_of_it(save: Save) -> None:
    """And loads the chain and the window's two rows; the last token of a prompt is never matched."""
    cache = PolicyCache(WINDOWED, 1000, save)
    assert hits(cache, prompt(1, 2, 3)) == [0]
    assert cache.serve(prompt(1, 2, 3, 4))[:2] == (3, 3 * 10 + 2 * 3)
    assert cache.serve((3 * 512, [1, 2, 3]))[0] < 3


@pytest.mark.parametrize(("save", "saved"), [(Save.ALL, 52), (Save.COLD, 52), (Save.ENDS, 46), (Save.TAILS, 46)])
def test_a_policy_saves_what_it_says(save: Save, saved: int) -> None:
    """Four rows of the chain, and the window's four rows or its last two."""
    assert PolicyCache(WINDOWED, 1000, save).serve(prompt(1, 2, 3, 4))[2] == saved


@pytest.mark.parametrize(("budget", "saved"), [(92, 46), (100, 46), (101, 49)])
def test_cold_entries_take_only_free_memory_where_asked(budget: int, saved: int) -> None:
    """Two prompts of 46 bytes and two cold entries of 3 each: the second takes the place of the first's cold ones."""
    cache = PolicyCache(WINDOWED, budget, Save.FREE)
    assert cache.serve(prompt(1, 2, 3, 4))[2] == 52
    assert cache.serve(prompt(5, 6, 7, 8))[2] == saved
    assert hits(cache, prompt(1, 2, 3, 4, 9)) == [4]


def test_a_branch_point_is_saved_by_the_prompt_that_meets_it() -> None:
    """The first prompt leaves the chain without the window at row 2; the second computes it; the third hits it."""
    prompts = (prompt(1, 2, 3, 4), prompt(1, 2, 5, 6), prompt(1, 2, 7, 8))
    assert hits(PolicyCache(WINDOWED, 1000, Save.ENDS), *prompts) == [0, 0, 0]
    assert hits(PolicyCache(WINDOWED, 1000, Save.TAILS), *prompts) == [0, 0, 2]
    assert hits(PolicyCache(WINDOWED, 1000, Save.ALL), *prompts) == [0, 2, 2]


def test_states_are_where_the_engine_kept_one() -> None:
    """At the end of each 16 rows of a step, and of the prompt: a branch anywhere else hits the state before it."""
    first = prompt(*range(20))
    cache = PolicyCache(STATES, 10_000, Save.ALL)
    assert hits(cache, first, prompt(*range(18), 100), prompt(*range(20), 101)) == [0, 16, 20]


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    """Memory for two prompts: the third takes the place of the first, whose beginning it shares."""
    cache = PolicyCache(Shape((CHAIN,), (10,)), 50, Save.ALL)
    assert hits(cache, prompt(1, 2, 3), prompt(4, 5), prompt(1, 6), prompt(4, 5, 7), prompt(1, 2)) == [0, 0, 1, 2, 1]


def test_a_row_takes_its_sides_along() -> None:
    """Else bytes would be held that no match can use; `check` sees it."""
    cache = PolicyCache(WINDOWED, 40, Save.ALL)
    hits(cache, prompt(1, 2, 3), prompt(4, 5, 6), prompt(7, 8, 9))
    assert cache.held_bytes <= 40


@pytest.mark.parametrize("save", Save)
def test_of_a_prompt_that_does_not_fit_the_beginning_is_saved(save: Save) -> None:
    """So that it can be hit again: the budget holds 5 rows with all their sides, or 6 with their tails."""
    cache = PolicyCache(WINDOWED, 76, save)
    assert hits(cache, prompt(*range(9)), prompt(*range(9))) == [0, 5 if save is Save.ALL else 6]


def replayed(shape: Shape | None, budget_gib: int, save: Save) -> Totals:
    """The cut of the trace."""
    assert shape is not None
    cache = PolicyCache(shape, budget_gib << 30, save)
    totals = replay(cache, read_trace(TRACE))
    cache.check()
    return totals


def test_with_unlimited_memory_all_that_repeats_is_hit() -> None:
    """Counted without a cache: the rows of each prompt that an earlier one began with too."""
    seen: set[int] = set()
    expected = 0
    for tokens, rows in read_trace(TRACE):
        most = (tokens - 1) // 512
        expected += 512 * next((row for row in range(most) if rows[row] not in seen), most)
        seen.update(rows[: tokens // 512])
    assert replayed(payload_shape(read_model("gemma-3-27b")), 1 << 20, Save.ALL).hit_tokens == expected > 0


def test_keeping_tails_hits_twice_as_much_of_gemma_at_a_quarter_of_the_copies() -> None:
    """256 GiB for 600 prompts, of which full attention would take 1.7 TiB."""
    model = read_model("gemma-3-27b")
    ours = replayed(payload_shape(model), 256, Save.FREE)
    for other in (physical_shape(model), full_shape(model)):
        theirs = replayed(other, 256, Save.ALL)
        assert ours.hit_tokens > 1.8 * theirs.hit_tokens
        assert ours.saved < theirs.saved / 3


def test_more_memory_is_no_worse() -> None:
    """For the policy that is recommended, on this cut."""
    shape = payload_shape(read_model("gemma-3-27b"))
    found = [replayed(shape, gib, Save.FREE).hit_tokens for gib in (16, 64, 256, 1024)]
    assert all(less <= more for less, more in pairwise(found))
