"""Scenarios about a match that vLLM's scheduler drops or shortens: one for each place in its code that does.

The usual ones (no room, no budget for the prompt, cancellation, another connector) are in `scenarios_promises.py`;
docs/internals/contract-on-vllm.md has the table. Some scenarios here set a switch of the scheduler that only another
model would set; the scheduler's reaction is its own.
"""

from __future__ import annotations

import time
from collections import UserDict
from types import SimpleNamespace
from typing import Any

from kvpact_testkit.results import NotObservable, observable_if
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, named, prompt, under_multi_connector
from kvpact_testkit.vllm.scenarios import Scenarios
from kvpact_testkit.vllm.scenarios_loads import fail_a_load
from kvpact_testkit.vllm.simple_connector import HesitantConnector

scenario = EXITS = Scenarios()

SILENT_STEPS = 12


def _switch(engine: VllmEngine, name: str, value: object) -> None:
    """Set a field of the scheduler that only some models or releases use."""
    observable_if(hasattr(engine.scheduler, name), f"this release's scheduler has no {name}")
    setattr(engine.scheduler, name, value)
    engine.journal(f"the scheduler's {name} is {value if isinstance(value, (int, bool)) else 'set'}")


def _dropped(engine: VllmEngine, request_id: str) -> int:
    """Positive lookups of the request that no commit of the same step followed."""
    taken = {commit.step for commit in engine.observed.commits if commit.request_id == request_id}
    return sum(bool(probe.answer) and probe.step not in taken for probe in engine.observed.probes_of(request_id))


def _require_dropped(harness: Harness, engine: VllmEngine, request_id: str) -> None:
    dropped = _dropped(engine, request_id)
    observable_if(dropped, "the match was taken in the step in which it was promised")
    harness.notes.append(f"{dropped} promises dropped")


@scenario.on_engine("P1", "P2", "H01", token_budget=2 * BLOCK)
def draft_model_wants_the_rest_of_the_prompt(harness: Harness, engine: VllmEngine) -> None:
    """A drafter that looks ahead allows no chunk to end just before the prompt: the promise waits for a larger step."""
    (tokens,) = harness.store(engine, prompt(1, 5, tail=BLOCK - 1))
    _switch(engine, "num_prefill_lookahead", BLOCK)
    engine.add("beside", prompt(2, 1, tail=2), max_tokens=1)
    engine.add("other", prompt(3, 1, tail=1), max_tokens=1)  # leaves 14 of the 15 missing tokens
    harness.load(engine, "late", tokens)
    _require_dropped(harness, engine, "late")


class _EncoderConnector:
    """A connector for encoder outputs that have not arrived yet."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return False

    def take_unavailable_requests(self) -> set[str]:
        return set()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@scenario.on_engine("P1", "P3", "H02")
def encoder_outputs_are_on_their_way(harness: Harness, engine: VllmEngine) -> None:
    """A request is skipped after its lookup until the outputs of a remote encoder have arrived."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("waiting", tokens)
    request = engine.scheduler.requests["waiting"]
    place = SimpleNamespace(offset=len(tokens) - 1, length=1, is_embed=None)  # after all blocks that can be loaded
    picture = SimpleNamespace(identifier="picture", modality="image", data=UserDict(), mm_position=place)
    features, request.mm_features = request.mm_features, [picture]
    _switch(engine, "ec_connector", _EncoderConnector())
    until = time.monotonic() + 1.0  # a connector may first read the picture
    while not _dropped(engine, "waiting") and time.monotonic() < until:
        engine.step()
    engine.step(SILENT_STEPS)
    _switch(engine, "ec_connector", None)
    request.mm_features = features
    _require_dropped(harness, engine, "waiting")
    harness.finish_promised(engine, "waiting")


@scenario.on_engine("P4", "H04")
def window_is_computed_again(harness: Harness, engine: VllmEngine) -> None:
    """Sliding windows are replayed: a match is cut to whole blocks, its end computed again, a short one dropped."""
    tokens, short = harness.store(engine, prompt(1, 10), prompt(2, 2))
    _switch(engine, "prefix_replay_tokens", 3 * BLOCK)
    harness.serve(engine, "long", tokens)
    harness.load(engine, "short", short)
    observable_if(not engine.observed.committed_tokens("short"), "the short match was taken")
    harness.notes.append("a match of two blocks was dropped")


@scenario.on_engine("P1", "P2", "H01", "H11", num_blocks=21, max_num_seqs=2, by_priority=True)
def as_many_run_as_may(harness: Harness, engine: VllmEngine) -> None:
    """A request with a promise is overtaken; then the engine runs its maximum of requests and does not probe it."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("wall", prompt(2, 9), max_tokens=30)
    engine.step()
    engine.add("silent", tokens, priority=5)
    engine.run(lambda: any(probe.answer for probe in engine.observed.probes_of("silent")), steps=20)
    engine.add("urgent", prompt(3, 2), max_tokens=SILENT_STEPS + 4, priority=0)
    _stay_silent(engine, "silent")
    harness.finish_promised(engine, "silent")


@scenario.on_engine("P1", "P2", "H01", "H11", num_blocks=41, token_budget=BLOCK, by_priority=True)
def budget_of_the_step_is_spent(harness: Harness, engine: VllmEngine) -> None:
    """A request with a promise waits while a running one takes the whole budget, step after step."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("wall", prompt(2, 31), max_tokens=2)
    engine.step(2)
    engine.add("silent", tokens, priority=5)
    _stay_silent(engine, "silent")
    harness.finish_promised(engine, "silent")


def _stay_silent(engine: VllmEngine, request_id: str) -> None:
    asked = len(engine.observed.probes_of(request_id))
    engine.step(SILENT_STEPS)
    observable_if(len(engine.observed.probes_of(request_id)) <= asked + 1, "the request is looked up all the time")


@scenario.on_engine("P1", "P2", "H01", num_blocks=31)
def preemption_closes_the_queue(harness: Harness, engine: VllmEngine) -> None:
    """In a step that preempts a running request no waiting request is probed, promised or not."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    harness.add(engine, "wall", *(prompt(seed, 9, tail=BLOCK - 2) for seed in range(2, 5)), max_tokens=60)
    engine.step()
    engine.add("silent", tokens)
    closed = 0
    while not engine.ended("silent") and engine.observed.steps < 2000:
        before, asked = engine.observed.preemptions, len(engine.observed.probes_of("silent"))
        waiting = engine.status("silent") == "WAITING"
        engine.step()
        silent = len(engine.observed.probes_of("silent")) == asked
        closed += waiting and silent and engine.observed.preemptions > before
    harness.finish_promised(engine, "silent")
    observable_if(closed, "nobody was preempted while the request waited")
    harness.notes.append(f"{closed} steps with a preemption")


@scenario("P1", "P3", "H02")
def another_connector_asks_for_time(harness: Harness) -> None:
    """Under MultiConnector a connector that answers 'ask again later' voids every promise of the step."""
    transfer = under_multi_connector(harness.subject.transfer(harness.folder), named(HesitantConnector))
    harness.journal.note("MultiConnector with this connector before one that hesitates")
    with harness.engine(transfer) as engine:
        (tokens,) = harness.store(engine, prompt(1, 10))
        harness.load(engine, "again", tokens)
        if not any(probe.answer is None for probe in engine.observed.probes_of("again")):
            raise NotObservable("the other connector did not hesitate")


@scenario.on_engine("P8", "P9", "H28", each=(0, 3))
def h28_failed_load_of_a_request_that_is_preempted(harness: Harness, engine: VllmEngine, good_blocks: int) -> None:
    """A load fails and its request is preempted before it recomputes: no block that did not arrive is served."""
    tokens = fail_a_load(harness, engine, good_blocks)
    engine.run(lambda: engine.status("victim") == "RUNNING", steps=50)
    _preempt(engine, "victim")
    harness.require_sound(engine)
    harness.serve(engine, "next", tokens, max_tokens=4)


def _preempt(engine: VllmEngine, request_id: str) -> None:
    """Preempt a running request, as the scheduler does when blocks run out."""
    request = engine.scheduler.requests.get(request_id)
    observable_if(request in engine.scheduler.running, f"{request_id} does not run any more")
    engine.journal(f"preempt {request_id}")
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, time.monotonic())


@scenario.on_engine("P1", "P2", "H01", "H07", overlap=True, num_blocks=65)
def commits_come_with_the_next_output(harness: Harness, engine: VllmEngine) -> None:
    """Release 0.33 may defer an asynchronous load until the running step's output arrives; some requests end before."""
    _switch(engine, "defer_async_loads", True)
    _switch(engine, "defer_block_free", True)
    prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 5)))
    put_off: set[str] = set()
    take_in = engine.scheduler.update_from_output

    def note_and_take_in(*outputs: Any) -> Any:
        put_off.update(engine.scheduler.deferred_loads)
        return take_in(*outputs)

    engine.scheduler.update_from_output = note_and_take_in
    engine.add("running", prompt(9, 2), max_tokens=60)
    engine.step(3)
    for number, tokens in enumerate(prompts):
        engine.add(f"again{number}", tokens, max_tokens=4)
        if number % 2:
            engine.abort(f"again{number}", during_step=True)  # after the load was deferred, before it began
        engine.step()
    harness.finish_promised(engine)
    observable_if(put_off, "no load was put off")
    harness.notes.append(f"{len(put_off)} loads put off")
