"""kvpact's own cache for models of several KV cache groups, under the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import random_groups
from pact import SLOT_BYTES, pact_engine
from test_pact_cache import PRESETS, nothing_held
from workloads import Chance, assert_answers_as_without_a_cache, outputs_of, prompt

from dictionary_tier import DictionaryTier
from kvpact.cache.cache import PactCache
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.identity.keys import Namespace
from kvpact.metrics import MEMORY, series
from kvpact.tiers.base import Tier
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.engine import EngineConfig, EngineQuirks, JobBehavior, Request
from kvpact_testkit.engine.simulated_worker import Job
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor

FULL, WINDOW, CHUNK, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.STATE
SETS = (
    (KVCacheGroup(FULL, 16), KVCacheGroup(WINDOW, 16, 20)),
    (KVCacheGroup(WINDOW, 16, 40), KVCacheGroup(FULL, 16), KVCacheGroup(WINDOW, 16, 20)),
    (KVCacheGroup(WINDOW, 16, 40),),
    (KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 16)),
    (KVCacheGroup(WINDOW, 16, 40), KVCacheGroup(WINDOW, 16, 17)),
    (KVCacheGroup(FULL, 16), KVCacheGroup(CHUNK, 16, 40), KVCacheGroup(WINDOW, 8, 30)),
)


@pytest.mark.parametrize("groups", SETS)
def test_a_prompt_that_was_seen_is_loaded(groups: tuple[KVCacheGroup, ...]) -> None:
    engine = pact_engine(EngineConfig(groups=groups, prefix_caching=False))
    cache = cast(PactCache, engine.cache)
    for name in ("first", "second"):
        engine.add_request(Request(name, prompt(200), 4))
        engine.run()
    cache.check()
    assert outputs_of(engine)["first"] == outputs_of(engine)["second"]
    assert cache.observe()["used_tokens"] == 192
    nothing_held(cache)


@pytest.mark.parametrize(("span", "promised"), [(80, 192), (64, 0), (192, 0), (193, 192)])
@pytest.mark.parametrize("other", [(), (KVCacheGroup(CHUNK, 16, 32),)])
def test_between_two_chunks_of_all_layers_there_is_nothing_to_load(
    span: int, promised: int, other: tuple[KVCacheGroup, ...]
) -> None:
    """No layer reads a block of an earlier chunk: a match that ends there is of no blocks, and is not promised."""
    engine = pact_engine(EngineConfig(groups=(KVCacheGroup(CHUNK, 16, span), *other), prefix_caching=False))
    cache = cast(PactCache, engine.cache)
    for name in ("first", "second"):
        engine.add_request(Request(name, prompt(200), 4))
        engine.run()
    assert outputs_of(engine)["first"] == outputs_of(engine)["second"]
    assert cache.observe()["used_tokens"] == promised
    nothing_held(cache)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    groups=st.one_of(st.sampled_from(SETS), st.integers(0, 10_000).map(lambda seed: random_groups(seed, 16))),
    small=st.booleans(),
    prefix_caching=st.booleans(),
    upheaval=st.booleans(),
    failures=st.sampled_from((0.0, 0.3)),
    losses=st.sampled_from((0.0, 0.1)),
    classed=st.booleans(),
    save=st.sampled_from(("eager", "lazy")),
)
def test_with_groups_no_output_changes_and_nothing_is_held(
    preset: str,
    seed: int,
    groups: tuple[KVCacheGroup, ...],
    small: bool,
    prefix_caching: bool,
    upheaval: bool,
    failures: float,
    losses: float,
    classed: bool,
    save: str,
) -> None:
    config = EngineConfig(
        num_blocks=(14 if small else 60) * 2 * len(groups),
        num_ranks=1 + seed % 2,
        num_layers=1 + seed // 2 % 2,
        max_tokens_per_step=(48, 512)[seed % 2],
        prefix_caching=prefix_caching,
        policy=("fcfs", "priority")[seed % 2],
        block_size=GroupSet(groups).block_size,
        groups=groups,
    )
    classes = tuple(number % 3 for number in range(len(groups))) if classed else ()
    quirks: EngineQuirks = PRESETS[preset]
    chance = Chance(seed, failures, sync_may_fail=not quirks.trusts_sync_loads, losses=losses)
    engine = pact_engine(config, quirks, num_slots=104, conduct=chance, load_deadline=0.3, classes=classes, save=save)
    assert_answers_as_without_a_cache(engine, seed, upheaval=upheaval)
    engine.clock.now += 10.0  # what no engine told the cache runs out by itself
    engine.step()
    engine.step()
    engine.check_nothing_held()
    nothing_held(cast(PactCache, engine.cache))


@pytest.mark.parametrize(
    "groups",
    [
        (KVCacheGroup(FULL, 16, drops_last=True),),
        (KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 16)),
        (KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 32, drops_last=True)),
    ],
)
def test_h05_a_match_of_full_attention_may_be_cut_anywhere(groups: tuple[KVCacheGroup, ...]) -> None:
    """An engine that rounds a match to its own number of tokens, and counts on what it commits."""
    quirks = replace(PRESETS["vllm-0.32"], rounds_match_to_tokens=70)
    engine = pact_engine(EngineConfig(groups=groups, prefix_caching=False), quirks)
    cache = cast(PactCache, engine.cache)
    for name in ("first", "second"):
        engine.add_request(Request(name, prompt(200), 4))
        engine.run()
    assert outputs_of(engine)["first"] == outputs_of(engine)["second"]
    assert cache.observe()["used_tokens"] == 140
    nothing_held(cache)


DRAFTS = (
    (KVCacheGroup(FULL, 16, drops_last=True),),
    (KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 16, drops_last=True)),
    (KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 32, drops_last=True)),
    (KVCacheGroup(WINDOW, 16, 40, drops_last=True), KVCacheGroup(WINDOW, 16, 20)),
)


@pytest.mark.parametrize("groups", DRAFTS)
def test_two_prompts_that_part_behind_a_block_have_a_draft_block_each(groups: tuple[KVCacheGroup, ...]) -> None:
    """The engine verifies every byte: what a draft model keeps of a block's last token is right for one next token."""
    engine = pact_engine(EngineConfig(groups=groups, prefix_caching=False, max_tokens_per_step=64))
    cache = cast(PactCache, engine.cache)
    prompts = [[*prompt(128), *prompt(40, seed=seed)] for seed in (1, 2)]
    for number, tokens in enumerate(prompts * 2):
        engine.add_request(Request(str(number), tokens, 4))
        engine.run()
    parted = 128 - GroupSet(groups).alignment if any(group.kind is FULL for group in groups) else 0
    assert cache.observe()["used_tokens"] == parted + 2 * 160
    nothing_held(cache)


@pytest.mark.parametrize(
    ("groups", "blocks"), [(DRAFTS[0], (5, 6, 7, 8)), (DRAFTS[1], (10, 12, 14, 16)), (DRAFTS[2], (7, 9, 10, 12))]
)
def test_a_draft_block_is_saved_once_the_next_token_is_known(
    groups: tuple[KVCacheGroup, ...], blocks: tuple[int, ...]
) -> None:
    """The sixth block of the prompt, and those of decoded tokens, get their names with the first token after them."""
    engine = pact_engine(EngineConfig(groups=groups, prefix_caching=False))
    cache = cast(PactCache, engine.cache)
    request = engine.add_request(Request("first", prompt(96), 40))
    held = {0: 0}
    while engine.has_work:
        engine.step()
        now = int(cache.observe()[series("held_blocks", MEMORY)])
        if now > max(held.values()):
            held[len(request.token_ids)] = now
    assert held == {0: 0} | dict(zip((97, 98, 114, 130), blocks, strict=True))
    nothing_held(cache)


Conduct = Callable[[int, Job], JobBehavior] | None
"""See `SimulatedWorker`."""


class Life:
    """One engine above a tier whose content outlives it, or above none yet."""

    def __init__(
        self, tier: Tier | None, groups: tuple[KVCacheGroup, ...], admit: str = "always", conduct: Conduct = None
    ) -> None:
        self.queue = SteppedExecutor(tier, 1 << 30) if tier is not None else None
        config = EngineConfig(groups=groups, prefix_caching=False, num_blocks=1000)
        tiers = [self.queue] if self.queue is not None else []
        self.engine = pact_engine(config, tiers=tiers, num_slots=200, weights_version="1", admit=admit, conduct=conduct)
        self.cache = cast(PactCache, self.engine.cache)

    def ask(self, name: str, tokens: list[int]) -> list[int]:
        self.engine.add_request(Request(name, tokens, 4))
        while self.engine.has_work:
            self._step()
        for _ in range(5):
            self._step()
        self.cache.check()
        return outputs_of(self.engine)[name]

    def _step(self) -> None:
        self.engine.step()
        if self.queue is not None:
            self.queue.advance()

    def end(self) -> None:
        nothing_held(self.cache)
        self.cache.shutdown()


def tiers(kind: str) -> list[Tier]:
    """Two tiers of one content, for two lives."""
    namespace, store = Namespace({"model": "oracle"}), DictionaryStore()
    if kind == "shared":
        return [SharedTier(DictionaryStore(store.records), namespace, SLOT_BYTES) for _ in range(2)]
    first = DictionaryTier(namespace, SLOT_BYTES, 1000)
    return [first, DictionaryTier(namespace, SLOT_BYTES, 1000, first.records)]


@pytest.mark.parametrize("groups", SETS + DRAFTS)
@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_after_a_restart_all_groups_are_read_from_a_tier(kind: str, groups: tuple[KVCacheGroup, ...]) -> None:
    before, after = (Life(tier, groups) for tier in tiers(kind))
    tokens = prompt(200)
    expected = before.ask("first", tokens)
    longer = before.ask("longer", [*tokens, *expected, *prompt(50, seed=1)])
    before.end()
    assert after.ask("again", tokens) == expected
    assert after.cache.observe()["used_tokens"] == 192
    assert after.ask("longer again", [*tokens, *expected, *prompt(50, seed=1)]) == longer
    alignment = GroupSet(groups).alignment
    assert after.cache.observe()["used_tokens"] == 192 + 253 // alignment * alignment
    after.end()
