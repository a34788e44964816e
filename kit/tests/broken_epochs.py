"""Caches that take a reset for something else than it is, each in one way, and the checks that must say so.

All but two are `StoreCache`, a reference cache above a store that engines share, with one method made wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvpact.contract import EngineRequest, ExternalKVMatch, JobTally, SaveJob, StepWork
from kvpact.identity.epochs import Epoch, Epochs
from kvpact.identity.keys import BlockKey, BlockKeys, Namespace
from kvpact.tiers.executor import GetDone, Job, LookupDone, PutDone
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.cache.conformance import CacheContext, CacheFactory, CacheUnderTest
from kvpact_testkit.engine import ByteSegment, ReferenceCache
from kvpact_testkit.engine.reference_blocks import Entry, EntryKey
from kvpact_testkit.tier.dictionary_store import DictionaryStore, StoredBytes

BELIEVED_S = 60.0
"""So long a store is believed to hold what it held."""

PATIENCE_STEPS = 20

_records: dict[Path, StoredBytes] = {}


@dataclass(slots=True)
class Fetch:
    """Blocks of one request on their way from the store; without `slots` it is being asked."""

    keys: list[BlockKey]
    epoch: Epoch
    asked_at: int
    start: int = 0
    slots: tuple[int, ...] = ()


class StoreCache(ReferenceCache):
    """A `ReferenceCache` above a store. The epoch is in the root of every key; nothing is ever deleted."""

    def __init__(self, place: CacheContext) -> None:
        super().__init__(place.block_size, place.num_slots, num_ranks=place.num_ranks)
        self.segments = [ByteSegment(place.num_slots, place.slot_bytes) for _ in range(place.num_ranks)]
        store = DictionaryStore(_records.setdefault(place.shared_directory, {}), place.faults)
        namespace = Namespace({"weights": place.weights})
        self.queue = place.queue(SharedTier(store, namespace, place.num_ranks * place.slot_bytes))
        self.epochs = Epochs()
        self.clock = place.clock
        self.believed: dict[BlockKey, float] = {}
        self._tickets = count()
        self._fetches: dict[str, tuple[int, Fetch]] = {}
        self._brought: set[str] = set()
        self._chains: dict[int, list[BlockKey]] = {}
        self._puts: dict[Hashable, list[Entry]] = {}

    def epoch_of_keys(self) -> Epoch:
        """What stands in the root of the keys."""
        return self.epochs.current

    def may_fetch(self) -> bool:
        """Whether the store is asked for anything."""
        return True

    def may_write(self) -> bool:
        """Whether the store is written to."""
        return not self.epochs.current.is_drawn

    def _keys_of(self, request: EngineRequest) -> list[BlockKey]:
        if request.identity is None:
            return []
        if request.request_id not in self._keys:
            self._keys[request.request_id] = BlockKeys(
                b"store cache", self._block_size, request.identity, self.epoch_of_keys()
            )
        return self._keys[request.request_id].extend(request.token_ids)

    # Fetching

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        name, keys = request.request_id, self._keys_of(request)
        self._take_in()
        if keys and request.may_load and name not in self._brought and self.may_fetch():
            self._brought.add(name)
            fetch = Fetch(keys[: (len(request.token_ids) - 1) // self._block_size], self.epoch_of_keys(), self._step)
            self._fetches[name] = next(self._tickets), fetch
            self.queue.submit(Job(self._fetches[name][0], fetch.keys, before=(), kind=LookupDone))
        if name in self._fetches:
            op_id, fetch = self._fetches[name]
            if self._step - fetch.asked_at <= PATIENCE_STEPS:
                return None
            self.queue.cancel(op_id)
            self._take_in()
        return super().prepare_external_match(request, num_computed_tokens)

    def _take_in(self) -> None:
        for done in self.queue.poll():
            if isinstance(done, PutDone):
                for entry in self._puts.pop(done.op_id):
                    self._let_go(entry)
                continue
            name = next((name for name, (op_id, _) in self._fetches.items() if op_id == done.op_id), None)
            if name is None:
                continue
            fetch = self._fetches.pop(name)[1]
            if isinstance(done, LookupDone):
                self._begin_read(name, fetch, done.in_a_row)
            elif isinstance(done, GetDone):
                self._end_read(fetch, done.in_a_row)

    def _begin_read(self, name: str, fetch: Fetch, held: int) -> None:
        self.believed.update(dict.fromkeys(fetch.keys[:held], self.clock()))
        fetch.start = next((i for i, key in enumerate(fetch.keys) if EntryKey(key, 0) not in self.entries), held)
        if fetch.start < held and fetch.epoch == self.epoch_of_keys():
            fetch.slots = self._take_slots(held - fetch.start, {EntryKey(key, 0) for key in fetch.keys})
        if fetch.slots:
            views = [[segment.slot_view(slot) for segment in self.segments] for slot in fetch.slots]
            self._fetches[name] = next(self._tickets), fetch
            before, keys = fetch.keys[: fetch.start], fetch.keys[fetch.start : fetch.start + len(fetch.slots)]
            self.queue.submit(Job(self._fetches[name][0], keys, views, before=before))

    def _end_read(self, fetch: Fetch, arrived: int) -> None:
        for at, slot in enumerate(fetch.slots):
            name = EntryKey(fetch.keys[fetch.start + at], 0)
            if at < arrived and name not in self.entries and fetch.epoch == self.epoch_of_keys():
                self.entries[name] = Entry(slot, stored=True)
            else:
                self.free_slots.append(slot)

    # Writing

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        super().note_computed(request, num_computed_tokens, block_ids)
        keys = self._keys_of(request)
        for job_id, (job, _, _) in self._saves.by_id.items():
            if job.request_id == request.request_id and job_id not in self._chains:
                self._chains[job_id] = keys[: job.blocks.end]
        self._write(keys[: num_computed_tokens // self._block_size])

    def _settle_save(self, job: SaveJob, tally: JobTally, saved: list[tuple[EntryKey, Entry]]) -> None:
        super()._settle_save(job, tally, saved)
        self._write(self._chains.pop(job.job_id, []))

    def _write(self, keys: list[BlockKey]) -> None:
        """Offer the store what it is not believed to hold of `keys`."""
        held = [self.entries.get(EntryKey(key, 0)) for key in keys]
        stored = [entry for entry in held if entry is not None and entry.stored]
        if len(stored) < len(keys) or not self.may_write():
            return
        now = self.clock()
        if any(self.believed.get(key, -BELIEVED_S) <= now - BELIEVED_S for key in keys):
            self.believed.update(dict.fromkeys(keys, now))
            op_id = next(self._tickets)
            views = [[segment.slot_view(entry.slot) for segment in self.segments] for entry in stored]
            write = Job(op_id, tuple(keys), views, (), len(keys), PutDone, epoch=self.epoch_of_keys())
            if self.queue.submit(write):
                self._puts[op_id] = stored
                for entry in stored:
                    entry.holds += 1

    def end_step(self) -> StepWork:
        self._take_in()
        return super().end_step()

    @property
    def has_pending_work(self) -> bool:
        return bool(self._puts or self._fetches)

    def request_finished(self, request_id: str) -> None:
        super().request_finished(request_id)
        self._brought.discard(request_id)
        if request_id in self._fetches:
            self.queue.cancel(self._fetches[request_id][0])

    # Epochs

    def reset(self) -> None:
        self.epochs.reset()
        self.begin_epoch()

    def set_weights_version(self, version: str) -> None:
        self.epochs.name(version)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Nothing that is held or under way is of the weights that serve now."""
        super().reset()
        self._keys.clear()
        self._brought.clear()
        for op_id, _ in [*self._fetches.values()]:
            self.queue.cancel(op_id)
        self._chains.clear()


class LosesTheSecondReset(StoreCache):
    """A reset that comes while another is still being dealt with is taken for the same one."""

    def __init__(self, place: CacheContext) -> None:
        super().__init__(place)
        self.reset_at = -1

    def reset(self) -> None:
        if self.reset_at < 0 or self._step - self.reset_at > 8:
            super().reset()
        self.reset_at = self._step


class SavesWhatRunsOn(ReferenceCache):
    """Blocks are saved whenever they were computed."""

    def _note_filled(self, request_id: str, groups: Sequence[Sequence[int]], num_computed_tokens: int) -> int:
        super()._note_filled(request_id, groups, num_computed_tokens)
        return 1 << 20


class KeepsWhatIsUnderWay(ReferenceCache):
    """What is being saved at a reset is stored when it lands."""

    def reset(self) -> None:
        under_way = {name: entry for name, entry in self.entries.items() if not entry.stored}
        super().reset()
        self.entries.update(under_way)


class ClearsItsStore(StoreCache):
    """A reset is an order to the store to empty itself, which counts as carried out."""

    def epoch_of_keys(self) -> Epoch:
        return Epoch()

    def may_write(self) -> bool:
        return True

    def reset(self) -> None:
        super().reset()
        self.believed.clear()
        self.queue.submit_control(object(), lambda tier: tier.clear())


class StoresUnderTheOldName(StoreCache):
    """After a reset the store is not read any more, but it is written to, by the names of the old weights."""

    def epoch_of_keys(self) -> Epoch:
        return Epoch()

    def may_fetch(self) -> bool:
        return not self.epochs.current.is_drawn

    def may_write(self) -> bool:
        return True


class BelievesEveryWord(StoreCache):
    """A word for the weights counts whenever it is said."""

    def set_weights_version(self, version: str) -> None:
        self.epochs.current = Epoch.of_word(version)
        self.begin_epoch()


class ForgetsTheOldWord(StoreCache):
    """The word from before a reset is believed again."""

    def reset(self) -> None:
        super().reset()
        self.epochs = Epochs()
        self.epochs.reset()


class HearsNoWord(StoreCache):
    """A word is taken, and the epoch stays the drawn one."""

    def epoch_of_keys(self) -> Epoch:
        return self.drawn if self.epochs.generation > 1 else Epoch()

    def reset(self) -> None:
        self.drawn = Epoch.draw()
        super().reset()


class SharesWithoutAWord(StoreCache):
    """After a reset all engines are in the same epoch, whatever weights they have."""

    def epoch_of_keys(self) -> Epoch:
        return Epoch.of_word("reset") if self.epochs.generation > 1 else Epoch()

    def may_write(self) -> bool:
        return True


class EmptiesTheStore(StoreCache):
    """A reset tidies up in the store, which is not its own."""

    def reset(self) -> None:
        super().reset()
        self.queue.submit_control(object(), lambda tier: tier.clear())


class BelievesForEver(StoreCache):
    """What was once in the store is never written again."""

    def _write(self, keys: list[BlockKey]) -> None:
        before = dict(self.believed)
        self.believed.update(dict.fromkeys(self.believed, self.clock()))
        super()._write(keys)
        self.believed.update(before)


def store_cache(kind: type[StoreCache]) -> CacheFactory:
    """A factory of one of the caches above."""

    def factory(place: CacheContext) -> CacheUnderTest:
        cache = kind(place)
        return CacheUnderTest(cache, [segment.slot_view for segment in cache.segments])

    return factory


BROKEN_EPOCHS: dict[type[ReferenceCache], tuple[str, str]] = {
    LosesTheSecondReset: ("H35", "test_h35_two_resets_in_a_row_and_something_is_stored_between_them"),
    SavesWhatRunsOn: ("H38", "test_h38_what_running_requests_computed_before_a_reset_is_never_served_to_others"),
    KeepsWhatIsUnderWay: ("H69", "test_p13_a_reset_while_loads_saves_and_writes_are_under_way"),
    ClearsItsStore: ("H36", "test_h36_a_store_that_refuses_or_hangs_during_a_reset_and_comes_back"),
    StoresUnderTheOldName: ("H37", "test_h37_what_was_stored_after_a_reset_is_not_served_after_a_restart"),
    BelievesEveryWord: ("P13", "test_p13_a_word_for_the_weights_is_believed_after_a_reset_and_once"),
    ForgetsTheOldWord: ("P13", "test_p13_a_word_for_the_weights_is_believed_after_a_reset_and_once"),
    HearsNoWord: ("P13", "test_p13_two_engines_with_one_word_share_again"),
    SharesWithoutAWord: ("P13", "test_p13_two_engines_with_one_word_share_again"),
    EmptiesTheStore: ("H46", "test_h46_one_engines_reset_takes_nothing_from_the_others"),
    BelievesForEver: ("H46", "test_h46_a_store_that_lost_its_blocks_gets_them_again"),
}
"""What each breaks, and the check that must see it."""
