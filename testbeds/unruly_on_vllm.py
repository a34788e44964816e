"""A connector for vLLM's schedulers that breaks every rule that one can break, by chance, and plays with it.

It forgets, raises, asks for time, gives another match to each question, and lies about its counts. It loads what it
says it loads as far as it has it, so that what its workers are told is sound; its answers need not be right.

Usage: python -m unruly_on_vllm FIRST_SEED PLAYS; prints what they came to, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.simple_connector import SimpleConnector
from leasing import Account, Lease

FORMS = ("pact", "commit without a number", "query result", "abort by request", "match")
SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"
BLOCK = 16


class Unruly(SimpleConnector):
    """`kv_connector_extra_config`: `form`, one of `FORMS`, and the `seed` of its moods."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = vllm_config.kv_transfer_config.get_from_extra_config
        self.form, self.random = option("form", FORMS[0]), Random(option("seed", 0))
        self.account = Account()
        self.last: dict[str, Lease] = {}
        self.asks_every_step = self.form == "abort by request" and self.random.random() < 0.3
        if self.form == "query result":
            hooks: dict[str, Callable[..., Any]] = {"update_state_after_alloc": self._update_with_result}
        elif self.form == "match":
            hooks = {"update_state_after_alloc": self._update_with_match}
        elif self.form == "abort by request":
            hooks = {"abort_external_match": self._abort_by_request}
        else:
            hooks = {
                "prepare_external_match": self._prepare,
                "abort_external_match": self._abort,
                "commit_external_match": self._commit if self.form == "pact" else self._commit_all,
                "confirm_external_match": self._confirm,
            }
        self.__dict__.update(hooks)

    def _mood(self, *moods: str) -> str:
        """Well in half of all cases."""
        mood = self.random.choice(("well",) * len(moods) + moods)
        if mood == "raises":
            raise RuntimeError("in a bad mood")
        return mood

    # Lookups

    def _prepare(self, request: Any, num_computed_tokens: int) -> Any:
        mood = self._mood("raises", "time", "nothing", "words", "huge", "negative", "no plan", "same")
        tokens, asynchronous = SimpleConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        last = self.last.get(request.request_id)
        held = last in self.account.open.get(request.request_id, ())
        if mood == "time":
            return None
        if mood in ("words", "negative"):
            last = self.account.take(request, num_computed_tokens) if self.form != "abort by request" else None
            return ExternalKVMatch("many" if mood == "words" else -BLOCK, asynchronous, last)  # type: ignore[arg-type]
        if not tokens or mood == "nothing":
            return ExternalKVMatch(0)
        if mood == "no plan" and self.form in FORMS[:2]:
            return ExternalKVMatch(tokens, asynchronous)
        if not (held and mood == "same"):
            last = self.last[request.request_id] = self.account.take(request, num_computed_tokens)
        return ExternalKVMatch(10**9 if mood == "huge" else tokens, asynchronous, last)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if self.asks_every_step and self.account.open.get(request.request_id):
            return SimpleConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        found = self._prepare(request, num_computed_tokens)
        if self.form == "match":
            return found
        if found is None:
            return None, False
        answer = found.num_tokens, found.load_kv_async, found.query_result
        return answer if self.form == "query result" else answer[:2]

    # Commits

    def _confirm(self, request: Any, match: Any, num_tokens: int) -> Any:
        mood = self._mood("raises", "fewer", "words")
        return {"well": num_tokens, "fewer": num_tokens - BLOCK, "words": "all"}[mood]

    def _commit(self, request: Any, match: Any, num_tokens: int, blocks: Any) -> Any:
        self._end("commit", request, match.query_result)
        mood = self._mood("raises", "fewer", "none", "more", "negative", "words", "says nothing")
        fewer = max(0, num_tokens - BLOCK)
        accepted = {"fewer": fewer, "none": 0, "negative": 0, "words": 0}.get(mood, num_tokens)
        if accepted:
            self._load(request, blocks, accepted)
        said = {"more": 10**6, "negative": -5, "words": "all", "says nothing": None}
        return said.get(mood, accepted)

    def _commit_all(self, request: Any, blocks: Any, plan: Any) -> None:
        self._end("commit", request, plan.query_result)
        self._mood("raises")
        self._load(request, blocks, plan.num_tokens)

    def _load(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Load what there is of it."""
        start, keys = self.asked[request.request_id] // BLOCK, [*self.keys(request)]
        held = 0
        while start + held < len(keys) and self.saved.get(keys[start + held], 0) >= self.ranks:
            held += 1
        SimpleConnector.update_state_after_alloc(self, request, blocks, min(num_tokens // BLOCK, held) * BLOCK)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and self.form == "abort by request":
            self.account.end("commit", request, None)
            self._load(request, blocks, num_external_tokens)
        self._mood("raises") if not num_external_tokens else None

    def _update_with_result(self, request: Any, blocks: Any, num_external_tokens: int, query_result: Any) -> None:
        if query_result is not None:
            self.account.end("update", request, query_result)
        if num_external_tokens:
            self._load(request, blocks, num_external_tokens)
        else:
            self._mood("raises")

    def _update_with_match(self, request: Any, blocks: Any, match: Any) -> None:
        taken = match is not None and any(blocks.get_block_ids())
        self._update_with_result(request, blocks, match.num_tokens if taken else 0, match and match.query_result)

    # Ends

    def _abort(self, request: Any, match: Any, reason: ExternalMatchExit) -> None:
        if not reason.is_dropped:
            self.account.mistakes.append(f"aborted for {reason}")
        self._end("abort", request, match.query_result)
        self._mood("raises")

    def _abort_by_request(self, request: Any) -> None:
        self.account.end("abort", request, None)
        self._mood("raises")

    def postpone_external_match(self, request: Any, match: Any, reason: ExternalMatchExit) -> None:
        if reason.is_dropped:
            self.account.mistakes.append(f"postponed for {reason}")
        self._mood("raises")

    def _end(self, what: str, request: Any, lease: Lease | None) -> None:
        if lease is not None:
            self.account.end(what, request, lease)


@dataclass
class Play:
    """What a play came to."""

    steps: int
    leases: int
    left: int
    """Leases that never ended."""
    open: int
    """Matches that the engine still counts as open."""
    mistakes: list[str]
    """Leases that ended twice, or were never there; reasons that say something else than the call."""

    @property
    def is_sound(self) -> bool:
        return not (self.left or self.open or self.mistakes)


def play(seed: int, settings: Mapping[str, Any] | None = None) -> Play:
    """Requests come, leave, are paused and reset, for some steps, until none is left. Raises EngineDied."""
    random = Random(seed)
    config = {"form": FORMS[seed % len(FORMS)], "seed": seed, "asynchronous": random.random() < 0.5}
    transfer = {"kv_connector": "Unruly", "kv_connector_module_path": __name__, "kv_connector_extra_config": config}
    made = EngineSettings(
        num_blocks=random.choice([14, 20, 40]), scheduler=SCHEDULER, max_num_seqs=4, by_priority=random.random() < 0.3,
        overlap=random.random() < 0.3, **(settings or {}),
    )  # fmt: skip
    engine = VllmEngine(made, transfer, lambda line: None)
    connector: Unruly = engine.connector
    stems = [[100 * stem + place for place in range(6 * BLOCK)] for stem in range(3)]
    for number, stem in enumerate(stems):
        engine.add(f"stored{number}", [*stem, 1], max_tokens=1)
    engine.finish()
    engine.drain()
    alive: list[str] = []
    for number in range(random.randrange(6, 24)):
        if random.random() < 0.7:
            engine.evict_computed()
        match random.choices(["add", "step", "abort", "pause", "reset", "forget"], [8, 8, 2, 1, 1, 1])[0]:
            case "add":
                tokens = [*random.choice(stems)[: random.randrange(1, 97)], *range(number, number + 5)]
                engine.add(f"r{number}", tokens, max_tokens=random.randrange(1, 20), priority=random.randrange(3))
                alive.append(f"r{number}")
            case "step":
                engine.step(random.randrange(1, 6), throttle_prefills=random.random() < 0.2)
            case "abort" if alive:
                engine.abort(alive.pop(random.randrange(len(alive))), during_step=random.random() < 0.5)
            case "pause":
                engine.pause(random.random() < 0.5)
            case "reset":
                engine.reset(running=random.random() < 0.5, connector=random.random() < 0.5)
            case "forget":
                engine.forget_computed()
    engine.pause(False)
    engine.step(20)
    for name in alive:
        if not engine.ended(name):
            engine.abort(name)
    engine.drain()
    (tracker,) = engine.scheduler.exits.trackers
    account = connector.account
    engine.close()
    return Play(engine.observed.steps, account.found, account.left, len(tracker.open), account.mistakes)


def main(first: int, plays: int) -> None:
    """Stops at the first play that breaks a rule."""
    logging.disable(logging.CRITICAL)
    steps = leases = 0
    for seed in range(first, first + plays):
        try:
            done = play(seed)
        except Exception as error:
            raise SystemExit(f"seed {seed}: {error!r}") from error
        if not done.is_sound:
            raise SystemExit(f"seed {seed}: {done}")
        steps, leases = steps + done.steps, leases + done.leases
    print(json.dumps({"plays": plays, "steps": steps, "leases": leases}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
