"""Random plays of four engines that lease from each other, each event one play, against the model of `pool_indexes`.

Events of an owner also come in the midst of a neighbour's lease, before and after its lock; and leases in the midst of
an owner's eviction, before and after it asks. So the orders of two engines' steps are played without a second process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from kvpact.cache.plan import PlanState
from kvpact.index import neighbour as neighbour_module
from kvpact.index import row_locks
from kvpact.index.classed_slots import ClassedSlots
from pool_indexes import CHAINS, DEPTH, ENGINES, KEYS, Engine, Key, Met, Model


class Plays:
    """Random events of four engines; each is one play. Deterministic for a seed."""

    def __init__(self, seed: int, *, classed: bool) -> None:
        self.model = Model(seed, classed=classed)
        self.random = self.model.random
        self.seen = self.model.seen
        self._busy = set[Engine]()
        self._asked: list[Met] = []
        self._claiming: Engine | None = None
        self.engines: list[Engine] = []
        self.engines += [Engine(self.model, self.engines, self._during_claim) for _ in range(ENGINES)]
        for engine in self.engines:
            engine.start()
        self._owner_events: list[tuple[int, Callable[[Engine], None]]] = [
            (30, self._save), (20, self._end_write), (4, self._drop), (4, Engine.evict_ahead), (3, Engine.resize),
            (1, Engine.refuse), (1, Engine.reset), (12, Engine.end_step),
        ]  # fmt: skip
        self._weights = [weight for weight, _ in self._owner_events]

    # Events

    def _chain(self, engine: Engine) -> list[Key]:
        chain = self.random.choice(CHAINS[engine.epoch])
        return chain[: self.random.randrange(1, DEPTH + 1)]

    def _save(self, engine: Engine) -> None:
        sides = self.model.classed and self.random.random() < 0.4
        (engine.save_sides if sides else engine.save)(self._chain(engine))
        if engine.writes and self.random.random() < 0.6:
            engine.end_write(is_good=True)

    def _end_write(self, engine: Engine) -> None:
        if engine.writes:
            engine.end_write(is_good=self.random.random() < 0.85)

    def _drop(self, engine: Engine) -> None:
        key = self.random.choice(self._chain(engine))
        engine.give_up(engine.index.drop(key))

    @contextmanager
    def _alone(self, engine: Engine) -> Iterator[None]:
        self._busy.add(engine)
        try:
            yield
        finally:
            self._busy.discard(engine)

    def _own(self, engine: Engine) -> None:
        """An event of an owner."""
        with self._alone(engine):
            ((_, event),) = self.random.choices(self._owner_events, self._weights)
            event(engine)

    def _load(self, engine: Engine, owner: Engine | None = None) -> None:
        """An event of an engine that loads."""
        with self._alone(engine):
            random = self.random
            name = f"r{random.randrange(6)}"
            promise = engine.promises.get(name)
            if promise is not None and owner is None and random.random() < 0.7:
                if promise.plan.state is PlanState.LOADING:
                    engine.settle(name, random.randrange(40))
                elif random.random() < 0.7:
                    engine.commit(name)
                else:
                    engine.abort(name)
                return
            others = [other for other in engine.met if other not in self._busy or other is owner]
            if owner is None and others:
                owner = random.choice(others)
            if owner in engine.met:
                met = engine.met[owner]
                self._asked.append(met)
                engine.prepare(met, self._chain(owner if random.random() < 0.5 else engine), name)
                self._asked.pop()

    def _during_claim(self, owner: Engine, rows: range) -> None:
        """In the midst of an owner's eviction others lease; none gets a row that is leaving."""
        free = [each for each in self.engines if each not in self._busy and owner in each.met]
        if not free or self.random.random() > 0.2:
            return
        before = self._claiming
        self._claiming = owner
        self._load(self.random.choice(free), owner)
        self._claiming = before
        self.seen["leases during a claim"] += 1

    def _lease(self, descriptor: int, rows: range) -> bool:
        """In the midst of a lease its owner goes on."""
        self._meanwhile()
        granted = row_locks.lease(descriptor, rows)
        self._meanwhile()
        met = self._asked[-1]
        owner = met.owner
        known = owner.kept if owner is not self._claiming else KEYS  # there it may just be listing some
        met.kept.append({key for key in known if owner.index.is_held(key)})
        return granted

    def _meanwhile(self) -> None:
        owner = self._asked[-1].owner
        if owner not in self._busy and self.random.random() < 0.15:
            self._own(owner)
            self.seen["events during a lease"] += 1

    def play(self) -> None:
        """One event."""
        random = self.random
        engine = random.choice(self.engines)
        chance = random.random()
        if chance < 0.45:
            self._own(engine)
        elif chance < 0.96:
            self._load(engine)
        elif chance < 0.99:
            other = random.choice(self.engines)
            if random.random() < 0.3:
                engine.leave(other)
            else:
                engine.meet(other)
        elif random.random() < 0.2:
            engine.die()
            engine.start()
            self.seen["restarts"] += 1
        self.seen["waiting rows"] += bool(engine.index.waiting_slots)

    def run(self, plays: int, every: int = 100) -> None:
        """Play so many events, with a look at all accounts after `every` ones, and come to rest."""
        with mock.patch.object(neighbour_module, "lease", self._lease):
            for engine in self.engines:
                for other in self.engines:
                    engine.meet(other)
            for number in range(plays):
                self.play()
                if not (number + 1) % every:
                    for engine in self.engines:
                        engine.check()
                        self.seen["moved"] += isinstance(engine.space, ClassedSlots) and engine.space.moved
            self._rest()

    def _rest(self) -> None:
        for engine in self.engines:
            for name, promise in [*engine.promises.items()]:
                if promise.plan.state is PlanState.LOADING:
                    engine.settle(name, DEPTH)
                else:
                    engine.abort(name)
            while engine.writes:
                engine.end_write(is_good=True)
            for other in self.engines:
                engine.leave(other)
        for engine in self.engines:
            for _ in range(engine.space.num_rows):
                engine.index.claim_again()
            engine.check()
            assert engine.locks.leased(range(engine.space.num_rows)) is None, "a lease is left at rest"
            assert not engine.ledger.totals.leases_held
            assert not engine.index.waiting_slots, "a slot waits for nobody"
            engine.locks.close()
