"""Scenarios about promises: every way in which vLLM's scheduler silently drops or changes a match."""

from __future__ import annotations

import time

from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, named, prompt, under_multi_connector
from kvpact_testkit.vllm.scenarios import Scenarios
from kvpact_testkit.vllm.simple_connector import SimpleConnector

scenario = PROMISES = Scenarios()


@scenario.on_engine("P2", "H05")
def stores_and_loads(harness: Harness, engine: VllmEngine) -> None:
    """A prompt computed once is loaded the second time, and each of its slots has the right content."""
    (tokens,) = harness.store(engine, prompt(1, 10), max_tokens=4)
    harness.load(engine, "again", tokens, max_tokens=4)
    harness.notes.append(f"{engine.observed.committed_tokens('again')} of {len(tokens)} tokens loaded")


@scenario.on_engine("P5", "H05")
def h05_small_matches_are_loaded(harness: Harness, engine: VllmEngine) -> None:
    """Matches of one, two and three blocks are either not promised or loaded."""
    harness.load(engine, "again", *harness.store(engine, *(prompt(size, size) for size in (1, 2, 3))))


@scenario.on_engine("P1", "P3", "H01", num_blocks=21)
def h01_lookups_that_are_not_committed(harness: Harness, engine: VllmEngine) -> None:
    """Eight requests queue for the room of one: each is probed step after step, and nothing stays held."""
    prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 9)), max_tokens=4)
    harness.load(engine, "r", *prompts, max_tokens=20)
    positive = sum(bool(probe.answer) for probe in engine.observed.probes)
    harness.notes.append(f"{positive} positive lookups, {len(engine.observed.commits)} commits")


def _blocked(harness: Harness, engine: VllmEngine, **settings: object) -> None:
    """A request with a stored prefix waits for a running one that leaves it no room."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("wall", prompt(2, 10), max_tokens=25)
    engine.step()
    engine.add("blocked", tokens, **settings)
    engine.run(lambda: any(probe.answer for probe in engine.observed.probes_of("blocked")), steps=20)
    harness.require_promise(engine, "blocked")
    if engine.ended("wall") or engine.observed.committed_tokens("blocked"):
        raise NotObservable("there was room for the request at once")


@scenario.on_engine("P3", "H02", num_blocks=21)
def h02_repeated_lookups_acquire_nothing(harness: Harness, engine: VllmEngine) -> None:
    """The blocked head of the queue is probed every step: the answer stays, and nothing more is held."""
    _blocked(harness, engine)
    counts = []
    for _ in range(15):
        engine.step()
        counts.append(sum(harness.held(engine).values()))
    # Saves of the running request begin and end; blocks acquired by lookups would stay.
    first, last = max(counts[:5]), min(counts[-5:])
    answers = {(probe.computed, probe.answer) for probe in engine.observed.probes_of("blocked") if probe.answer}
    same = len(answers) <= 1 or len({computed for computed, _ in answers}) > 1
    require(same, f"the same lookup was answered with {sorted(answers)} (computed, promised)", "P3")
    require(last < first + 5, f"in 15 more lookups what the connector holds grows: {counts}", "P3")


@scenario.on_engine("P3", "H03", num_blocks=19, chunk=2 * BLOCK)
def h03_local_hit_changes_between_lookups(harness: Harness, engine: VllmEngine) -> None:
    """While a request waits, the engine computes part of its prefix: the match must begin after the computed tokens."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("wall", prompt(2, 7), max_tokens=30)
    engine.step()
    engine.add("twin", [*tokens[: 6 * BLOCK], *prompt(3, 0, 9)], prompt_logprobs=True, max_tokens=30)
    harness.load(engine, "blocked", tokens, max_tokens=4)
    starts = sorted({probe.computed for probe in engine.observed.probes_of("blocked")})
    observable_if(len(starts) >= 2, f"the local hit never changed: {starts}")
    harness.notes.append(f"lookups behind {starts} computed tokens")


@scenario.on_engine("P4", "H04")
def h04_fewer_tokens_are_committed(harness: Harness, engine: VllmEngine) -> None:
    """vLLM takes one block less than was promised, then nothing: the rest is released, and the loaded part is right."""
    tokens, others = harness.store(engine, prompt(1, 10), prompt(2, 10))
    engine.journal("vLLM takes one block less than it is promised")
    engine.rewrite = lambda _, answer: answer - BLOCK
    harness.serve(engine, "less", tokens)
    engine.journal("vLLM takes nothing of what it is promised")
    engine.rewrite = lambda _, answer: 0
    harness.serve(engine, "nothing", others)
    harness.require_promise(engine)


@scenario.on_engine("P4", "H04")
def h04_prompt_logprobs_need_the_whole_prompt(harness: Harness, engine: VllmEngine) -> None:
    """A request that must compute its prompt loads nothing, also if vLLM leaves that to the connector."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    harness.serve(engine, "logprobs", tokens, prompt_logprobs=True)
    taken = engine.observed.committed_tokens("logprobs")
    require(not taken, f"{taken} tokens are loaded whose log-probabilities were asked for", "P4")


@scenario("P4", "H04")
def h04_another_connector_wins(harness: Harness) -> None:
    """Under MultiConnector the first connector with a match loads; the other one's match is silently dropped."""
    transfer = under_multi_connector(named(SimpleConnector), harness.subject.transfer(harness.folder))
    harness.journal.note("MultiConnector with a simple connector before this one")
    with harness.engine(transfer) as engine:
        (tokens,) = harness.store(engine, prompt(1, 10))
        harness.load(engine, "again", tokens)


@scenario.on_engine("P6", "H06")
def h06_match_of_the_whole_prompt(harness: Harness, engine: VllmEngine) -> None:
    """A prompt of exactly ten blocks is stored completely: one token is left to compute."""
    tokens = prompt(1, 10, tail=0)
    harness.store(engine, [*tokens, 5], tokens)
    harness.load(engine, "again", tokens, [*tokens, 5])


@scenario.on_engine("P1", "H01")
def cancelled_before_it_is_seen(harness: Harness, engine: VllmEngine) -> None:
    """A request is cancelled before the scheduler has seen it."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("gone", tokens)
    engine.abort("gone")
    harness.rest(engine)


@scenario.on_engine("P1", "H01", num_blocks=21)
def cancelled_while_blocked(harness: Harness, engine: VllmEngine) -> None:
    """A request is cancelled after a positive lookup that was never committed."""
    _blocked(harness, engine)
    engine.abort("blocked")
    engine.step()
    held = harness.held(engine).get("leases")
    require(not held, f"{held} leases are held for a request that is gone", "P1")


@scenario.on_engine("P1", "H07", each=(False, True), chunk=3 * BLOCK)
def cancelled_in_every_step(harness: Harness, engine: VllmEngine, during_step: bool) -> None:
    """A request is cancelled while its first, second, ... sixth step computes, or right after it."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    for steps in range(1, 7):
        request_id = f"gone{steps}"
        engine.add(request_id, [*tokens, *prompt(steps + 10, 6)], max_tokens=3)
        engine.step(steps)
        if not engine.ended(request_id):
            engine.abort(request_id, during_step=during_step)
        engine.add(f"next{steps}", prompt(steps + 30, 12))
        harness.finish(engine, f"next{steps}")
    harness.require_promise(engine)


@scenario.on_engine("P1", "P9", num_blocks=35)
def preempted_after_a_load(harness: Harness, engine: VllmEngine) -> None:
    """Requests outgrow the KV memory, are preempted, probed again and loaded again."""
    prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 4)))
    harness.load(engine, "r", *prompts, max_tokens=60)
    observable_if(engine.observed.preemptions, "nothing was preempted")
    harness.notes.append(f"{engine.observed.preemptions} preemptions")


@scenario.on_engine("P1", "P2", num_blocks=21, by_priority=True)
def overtaken_by_priority(harness: Harness, engine: VllmEngine) -> None:
    """A blocked request with a promise is overtaken by urgent ones that fill the cache; its promise holds."""
    _blocked(harness, engine, priority=5)
    harness.serve(engine, "urgent", *(prompt(seed, 7) for seed in range(20, 26)), priority=0)


@scenario.on_engine("P1", "P2", "H11", num_blocks=21)
def paused_with_a_promise(harness: Harness, engine: VllmEngine) -> None:
    """The engine starts no new requests for a while: an earlier promise still holds, or is not committed."""
    _blocked(harness, engine)
    engine.pause(True)
    engine.abort("wall")
    for _ in range(5):
        engine.step()
        time.sleep(0.02)
    engine.pause(False)
    harness.finish(engine)


@scenario.on_engine("P1", "H01", chunked_prefill=False, token_budget=300)
def prompt_exceeds_the_step(harness: Harness, engine: VllmEngine) -> None:
    """Without chunked prefill a prompt waits until a step has room for it: its earlier lookup is not committed."""
    prompts = harness.store(engine, *(prompt(seed, 16) for seed in range(1, 4)))
    harness.load(engine, "r", *([*tokens[: 4 * BLOCK], *prompt(seed, 12)] for seed, tokens in enumerate(prompts, 10)))


@scenario.on_engine("P1", "H01")
def prefills_are_throttled(harness: Harness, engine: VllmEngine) -> None:
    """Data-parallel balancing delays prefills after their lookup."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("running", prompt(2, 4), max_tokens=30)
    engine.step(3)
    engine.add("held back", [*tokens, *prompt(3, 3)])
    engine.journal("five steps in which prefills are throttled")
    engine.step(5, throttle_prefills=True)
    harness.finish_promised(engine)


@scenario.on_engine("P1", "P9", draft_tokens=3, token_budget=64, num_blocks=41)
def draft_tokens_take_the_room(harness: Harness, engine: VllmEngine) -> None:
    """With speculative decoding a match of all but one token is padded with draft tokens."""
    prompts = harness.store(engine, *(prompt(seed, 3, tail=1) for seed in range(1, 7)), max_tokens=4)
    harness.load(engine, "r", *prompts, max_tokens=12)


@scenario("P1", "H01")
def adapters_wait_for_each_other(harness: Harness) -> None:
    """One adapter runs at a time: a request with another one is no longer probed after its promise."""
    adapters, tokens = [adapter_in(harness, "calm", b"a"), adapter_in(harness, "wild", b"b")], prompt(1, 10)
    with harness.engine(adapters=1, num_blocks=33) as engine:
        _store_with_adapters(harness, engine, tokens, adapters)
        for index, adapter in enumerate([*adapters, *adapters]):
            engine.add(f"r{index}", tokens, adapter=adapter, max_tokens=6)
        harness.finish_promised(engine)


@scenario("H24")
def h24_adapters_of_one_name(harness: Harness) -> None:
    """Two adapters of one name with different weights, and no adapter: none is served another one's blocks."""
    adapters, tokens = [adapter_in(harness, "one/style", b"a"), adapter_in(harness, "two/style", b"b")], prompt(1, 10)
    with harness.engine(adapters=2, num_blocks=65) as engine:
        _store_with_adapters(harness, engine, tokens, adapters[:1])
        for index, adapter in enumerate([adapters[1], None, adapters[0]]):
            engine.evict_computed()  # so that the connector is asked for all that it stored
            engine.add(f"r{index}", tokens, adapter=adapter)
            harness.finish(engine)
        harness.require_promise(engine)


def _store_with_adapters(harness: Harness, engine: VllmEngine, tokens: list[int], adapters: list[str]) -> None:
    for index, adapter in enumerate(adapters):
        engine.add(f"known{index}", prompt(20 + index, 1), adapter=adapter)
    harness.finish(engine)
    engine.run(lambda: False, steps=300, seconds=0.2)  # a thread of the connector may read its files
    for index, adapter in enumerate(adapters):
        engine.add(f"stored{index}", tokens, adapter=adapter)
        harness.finish(engine)
    harness.forget(engine)


def adapter_in(harness: Harness, name: str, weights: bytes) -> str:
    """A LoRA adapter's folder."""
    folder = harness.folder / "adapters" / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights * 64)
    return str(folder)


@scenario.on_engine("P1", "P8", "H32")
def reset_while_requests_run(harness: Harness, engine: VllmEngine) -> None:
    """The whole cache is reset under running requests, which are preempted and computed again."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.add("running", prompt(2, 8), max_tokens=12)
    engine.add("loaded", tokens, max_tokens=12)
    engine.run(lambda: engine.status("loaded") == "RUNNING", steps=50)
    harness.require_promise(engine, "loaded")
    engine.step()
    done = engine.run(lambda: engine.reset(running=True, connector=True), seconds=harness.subject.timeout)
    require(done, "vLLM refuses every reset, because blocks stay held", "P11")
    harness.finish(engine)


@scenario.on_engine("H32")
def h32_new_weights_make_old_blocks_useless(harness: Harness, engine: VllmEngine) -> None:
    """After a reset for new weights no earlier block is served, nor a block that was being saved."""
    (tokens,), saving = harness.store(engine, prompt(1, 10)), prompt(2, 10)
    engine.add("saving", saving, max_tokens=1)
    engine.finish("saving")
    if not engine.run(lambda: engine.reset(running=False, connector=True), steps=500):
        raise NotObservable("vLLM says that the cache could not be reset")
    engine.new_weights()
    engine.add("again", tokens)
    harness.serve(engine, "saved again", saving)


@scenario.on_engine("H62", "H13")
def h62_requests_without_names_cost_only_themselves(harness: Harness, engine: VllmEngine) -> None:
    """Token ids below 0 and above 2^32 run beside a stored prompt and a new one: both keep their hits and answers."""
    (stored,), new = harness.store(engine, prompt(1, 10)), prompt(2, 10)
    sick = [[*prompt(seed, 6), token, *prompt(seed, 4)] for seed, token in ((3, -1), (4, 2**32), (5, 2**40))]
    engine.add("again", stored, max_tokens=8)
    engine.add("new", new, max_tokens=8)
    harness.serve(engine, "sick", *sick, max_tokens=8)
    harness.require_promise(engine, "again")
    lost = engine.observed.invalid_blocks
    require(not lost, f"blocks {lost} are not loaded beside them", "H62")
    harness.forget(engine)
    engine.add("new again", new)
    harness.serve(engine, "sick again", *sick, max_tokens=8)
    for name in ("again", "new again"):
        found = engine.observed.committed_tokens(name)
        wanted = 10 * BLOCK
        require(found >= wanted, f"{name} loads {found} tokens of {wanted} beside requests without names", "H62")
