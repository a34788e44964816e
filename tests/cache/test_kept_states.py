"""Which states a full memory keeps of conversations: the last of each, also where memory has room for few.

An engine in steps as vLLM's (testbeds/state_engine.py) over the whole `PactCache`, without bytes. A unit is 16 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hybrid_models import HybridModel, ModelGroup
from kvpact.identity.groups import GroupKind, KVCacheGroup
from state_engine import OwnCache, StateEngine
from state_turns import Turn, in_order, pieces

UNIT = 16
PAGE = 1 << 20
MODEL = HybridModel(
    "one state beside full attention",
    (
        ModelGroup(KVCacheGroup(GroupKind.STATE, UNIT), PAGE),
        ModelGroup(KVCacheGroup(GroupKind.FULL, UNIT), PAGE),
    ),
    PAGE,
    None,
)


def conversation(number: int, turns: int, prompt: int, answer: int = 0, begin: Sequence[int] = ()) -> list[Turn]:
    """Prompts of `prompt` units more each, after `begin` and what was said before; names are the conversation's own."""
    made = []
    names = [*begin]
    for turn in range(turns):
        names = names + [1000 * number + 100 * turn + at for at in range(prompt)]
        made.append(Turn(0, number, turn, UNIT, [*names, 0], len(names) * UNIT + 1, answer * UNIT + 1))
        names = names + [1000 * number + 100 * turn + 50 + at for at in range(answer)]
    return made


def hits(engine: StateEngine, turns: Sequence[Turn]) -> list[int]:
    """Units of each turn that come from the cache, which is verified after each."""
    found = []
    for turn in turns:
        found.append(engine.serve(turn) // UNIT)
        engine.cache.check()
    return found


def test_of_each_conversation_the_last_state_stays() -> None:
    """One waits while another takes 13 turns: 32 blocks, and 16 states of which 2 are needed, in memory for 38."""
    waiting = conversation(1, 4, 2)
    engine = StateEngine(MODEL, 38 * PAGE)
    assert hits(engine, in_order([waiting[:3]])) == [0, 2, 4]
    assert hits(engine, in_order([conversation(2, 13, 2)])) == [*range(0, 26, 2)]
    assert hits(engine, waiting[3:]) == [6]


def test_the_answers_state_does_not_replace_the_prompts() -> None:
    """A prompt that comes without the answer hits the earlier prompt's end, although memory is full of other states."""
    asked = conversation(1, 1, 2, answer=3)[0]
    others = conversation(2, 9, 1)
    again = Turn(0, 1, 99, UNIT, [*asked.blocks[:2], 77, 78, 0], 4 * UNIT + 1, 1)
    engine = StateEngine(MODEL, 22 * PAGE)
    assert hits(engine, [*in_order([[asked]]), *in_order([others])]) == [0, *range(9)]
    assert hits(engine, [again]) == [2]


def test_a_state_where_prompts_part_stays() -> None:
    """Conversations that begin alike, one after the other, memory for little more than one: all hit the beginning."""
    begin = [1, 2]
    first = conversation(1, 1, 0, begin=begin)
    engine = StateEngine(MODEL, 24 * PAGE)
    hits(engine, in_order([first]))
    for number in range(2, 7):
        assert hits(engine, in_order([conversation(number, 6, 2, begin=begin)])) == [*range(2, 14, 2)]


@pytest.mark.parametrize("seed", range(4))
def test_with_memory_for_everything_hits_are_those_of_vllms_own_cache(seed: int) -> None:
    """Where steps end alike, also where prompts part."""
    chance = random.Random(seed)
    begins = [[9, 8][: number % 3] for number in range(8)]
    turns = in_order(
        conversation(number, chance.randrange(2, 6), chance.randrange(1, 5), chance.randrange(3), begins[number])
        for number in range(1, 8)
    )
    own = OwnCache(UNIT)
    engine = StateEngine(MODEL, 2000 * PAGE)
    parted = 0
    for turn, names in pieces(turns, UNIT):
        wanted = own.serve(turn, names)
        assert engine.serve(turn, own.junction) == wanted
        parted += own.junction > 0
    engine.cache.check()
    assert parted
