"""Scenarios about data: loads that are late, shortened, damaged or cancelled, several ranks, and isolation."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt
from kvpact_testkit.vllm.scenarios import Scenarios

scenario = LOADS = Scenarios()


LATENCIES = (0, 1, 2, 3, 4, 5, 6)
"""Steps by which workers' reports are late; 0.33 itself may delay them when it replays a failed worker's output."""


@scenario.on_engine("P2", "P8", token_budget=100)
def chunked_prefill_is_stored_whole(harness: Harness, engine: VllmEngine) -> None:
    """Three prompts are computed in chunks that end anywhere; their stored blocks are loaded and checked."""
    prompts = [prompt(seed, 12) for seed in range(1, 4)]
    harness.serve(engine, "first", *prompts)
    harness.forget(engine)
    harness.load(engine, "again", *prompts)


@scenario.on_engine("P2", "P8", "H29", token_budget=12 * BLOCK - 12)
def chunk_ends_inside_the_last_block(harness: Harness, engine: VllmEngine) -> None:
    """A prompt's first chunk ends inside its last full block, which is allocated and half empty."""
    harness.load(engine, "again", *harness.store(engine, prompt(1, 12)))


@scenario.on_engine("P7", "H30", num_blocks=129)
def h30_load_ends_inside_a_block(harness: Harness, engine: VllmEngine) -> None:
    """Prompts end anywhere in a block: tokens after the last loaded one are computed, not taken as loaded."""
    prompts = harness.store(engine, *(prompt(tail + 1, 3, tail=tail) for tail in range(0, BLOCK, 3)))
    for number, tokens in enumerate(prompts):
        engine.add(f"again{number}", tokens)
        engine.add(f"branch{number}", [*tokens[:-2], *prompt(50 + number, 1)])
    harness.finish_promised(engine)
    inside = sum(commit.num_tokens % BLOCK > 0 for commit in engine.observed.commits)
    harness.notes.append(f"{inside} of {len(engine.observed.commits)} loads end inside a block")


@scenario.on_engine("P8", "P11", "H08", "H10", each=LATENCIES, num_blocks=41)
def reports_come_late(harness: Harness, engine: VllmEngine, delay: int) -> None:
    """The workers' reports reach the scheduler zero to six steps late; each load ends once, and in time."""
    engine.report_delay = [delay]
    prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 4)))
    harness.load(engine, "again", *prompts, max_tokens=4)


@scenario.on_engine("P8", "H29", each=(0, 4), num_blocks=65)
def h29_nothing_is_published_before_it_is_there(harness: Harness, engine: VllmEngine, delay: int) -> None:
    """While a load is under way others arrive with the same prompt: none of them reads a block that has not arrived."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.report_delay = [delay]
    for number in range(6):
        engine.add(f"r{number}", [*tokens[: (10 - number) * BLOCK], *prompt(20 + number, 1)])
        engine.step()
        harness.require_sound(engine)
    harness.finish_promised(engine)


@scenario.on_engine("P1", "H07", "H08", each=LATENCIES, num_blocks=21)
def h07_cancelled_while_its_load_runs(harness: Harness, engine: VllmEngine, delay: int) -> None:
    """A request is cancelled during its load: its blocks are freed, and only after the last write to them."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    engine.report_delay = [delay + 1]
    engine.add("loading", tokens)
    engine.run(lambda: bool(engine.status("loading") not in ("", "WAITING")), steps=30)
    harness.require_promise(engine, "loading")
    if engine.status("loading") != "WAITING_FOR_REMOTE_KVS":
        raise NotObservable("the connector loads inside the step, so nothing can come between")
    engine.abort("loading", during_step=bool(delay % 2))
    harness.serve(engine, "next", prompt(2, 15))


@scenario.on_engine("P1", "H08", ranks=2, num_blocks=81)
def h08_loads_are_reported_once(harness: Harness, engine: VllmEngine) -> None:
    """Many loads, some cancelled, on two ranks of different speed: each receive is reported once."""
    engine.report_delay = [0, 3]
    harness.add(engine, "r", *harness.store(engine, *(prompt(seed, 6) for seed in range(1, 7))))
    engine.step()
    for seed in (1, 4):
        engine.abort(f"r{seed}")
    harness.finish_promised(engine)


@scenario.on_engine("P9", "P11", "H09", each=(0, 3))
def h09_load_that_always_fails(harness: Harness, engine: VllmEngine, good_blocks: int) -> None:
    """A load fails each time: the request computes its prompt itself and ends with the right tokens."""
    tokens = _stored_for_a_failing_load(harness, engine, good_blocks)
    harness.load(engine, "failing", tokens, max_tokens=4)
    harness.notes.append(f"{len(engine.observed.commits)} commits with {good_blocks} good blocks")


@scenario.on_engine("P8", "P9", "H28")
def h28_failed_load_leaves_nothing_published(harness: Harness, engine: VllmEngine) -> None:
    """A load fails and its request is cancelled before it recomputes: the next request with the prefix is right."""
    tokens = fail_a_load(harness, engine, 3)
    engine.abort("victim")
    engine.step()
    harness.require_sound(engine)
    harness.serve(engine, "next", tokens, max_tokens=4)


@scenario.on_engine("P9", failure_policy="fail")
def failed_load_ends_its_request_alone(harness: Harness, engine: VllmEngine) -> None:
    """Under the policy "fail" a failed load ends its own request with an error; all others go on."""
    engine.add("victim", _stored_for_a_failing_load(harness, engine, 3), max_tokens=4)
    harness.serve(engine, "bystander", prompt(2, 10), max_tokens=12)
    harness.require_promise(engine, "victim")


def _stored_for_a_failing_load(harness: Harness, engine: VllmEngine, good_blocks: int) -> list[int]:
    """Store a prompt, and make its loads fail."""
    (tokens,) = harness.store(engine, prompt(1, 10))
    if not harness.subject.adapter.fail_loads(engine, good_blocks):
        raise NotObservable("no adapter makes this connector's loads fail")
    engine.journal(f"from now on loads fail behind {good_blocks} blocks")
    return tokens


def fail_a_load(harness: Harness, engine: VllmEngine, good_blocks: int) -> list[int]:
    """Make the load of a request "victim" fail; returns its prompt."""
    tokens = _stored_for_a_failing_load(harness, engine, good_blocks)
    engine.add("victim", tokens, max_tokens=4)
    engine.run(lambda: bool(engine.observed.invalid_blocks) or engine.ended("victim"), steps=50)
    harness.require_promise(engine, "victim")
    observable_if(engine.observed.invalid_blocks, "the failed load was not reported as invalid blocks")
    return tokens


@scenario("H13")
def h13_hooks_do_not_raise(harness: Harness) -> None:
    """An exception inside any hook costs a hit, but neither the engine nor a request nor a right token."""
    with harness.engine() as engine:
        hooks = list(harness.subject.adapter.break_hooks(engine))
    observable_if(hooks, "no adapter breaks this connector's hooks")
    for hook in hooks:
        harness.journal.clear()
        with harness.engine(num_blocks=33) as engine:
            (tokens,) = harness.store(engine, prompt(1, 10))
            engine.add("before", tokens, max_tokens=12)
            engine.step()
            engine.journal(f"{hook} raises the next three times")
            harness.subject.adapter.break_hooks(engine)[hook]()
            engine.add("after", tokens, max_tokens=3)
            harness.serve(engine, "other", prompt(2, 10), max_tokens=3)
            harness.abandon(engine)


@scenario("H22")
def h22_flipped_bytes_are_not_served(harness: Harness) -> None:
    """Stored bytes are flipped between two engines: the blocks are a miss."""
    _damaged(harness, "flip")


@scenario("H22")
def h22_truncated_files_are_a_miss(harness: Harness) -> None:
    """Stored files are cut in half between two engines."""
    _damaged(harness, "truncate")


@scenario("H22")
def h22_missing_files_are_a_miss(harness: Harness) -> None:
    """Stored files vanish between two engines."""
    _damaged(harness, "delete")


def _damaged(harness: Harness, how: str) -> None:
    with harness.engine() as engine:
        (tokens,) = harness.store(engine, prompt(1, 10))
    files = harness.subject.adapter.damage(harness.folder, how)
    observable_if(files, "the connector stores nothing in its folder")
    harness.journal.note(f"{how} {files} stored files")
    with harness.engine() as engine:
        harness.serve(engine, "again", tokens)


@scenario("P2", "H59")
def restart_finds_what_was_stored(harness: Harness) -> None:
    """A second engine with the same store loads what the first one computed."""
    with harness.engine() as engine:
        prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 5)))
    with harness.engine() as engine:
        harness.load(engine, "again", *prompts)
        later = sum(probe.answer is None for probe in engine.observed.probes)
        harness.notes.append(f"{later} lookups were answered 'ask again later'")


@scenario.on_engine("P2", "H20")
def h20_same_tokens_behind_another_prefix(harness: Harness, engine: VllmEngine) -> None:
    """A block's keys and values depend on all tokens before it: the same tokens elsewhere are another block."""
    first, second, shared = prompt(1, 4, tail=0), prompt(2, 4, tail=0), prompt(3, 4)
    harness.store(engine, [*first, *shared], [*second, *prompt(4, 4)])
    engine.add("crossed", [*second, *shared])
    harness.serve(engine, "alone", shared)
    harness.require_promise(engine)


@scenario.on_engine("H24")
def h24_tenants_share_nothing(harness: Harness, engine: VllmEngine) -> None:
    """A prompt under another salt, or none, loads no block stored under the first salt."""
    (tokens,) = harness.store(engine, prompt(1, 10), salt="tenant one")
    engine.add("other", tokens, salt="tenant two")
    harness.serve(engine, "none", tokens)
    engine.forget_computed()
    harness.serve(engine, "same", tokens, salt="tenant one")
    harness.require_promise(engine)


@scenario.on_engine("P10", "H40", "H45", each=([0, 0], [0, 5], [4, 1]), ranks=2, num_blocks=41)
def h45_ranks_report_in_different_steps(harness: Harness, engine: VllmEngine, delays: Sequence[int]) -> None:
    """Two ranks report up to five steps apart: nothing counts before both have reported."""
    engine.report_delay = delays
    prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 4)))
    harness.load(engine, "again", *prompts, max_tokens=4)


@scenario.on_engine("P10", "H40", ranks=2, num_blocks=65)
def h40_silent_rank_saves_nothing(harness: Harness, engine: VllmEngine) -> None:
    """One rank neither copies nor reports while a prompt is stored: the prompt is not served from half a block."""
    tokens = prompt(1, 10)
    engine.journal("rank 1 neither copies nor speaks")
    engine.ranks[1].mute = True
    harness.serve(engine, "first", tokens, max_tokens=4)
    engine.run(lambda: False, steps=10)
    engine.journal("rank 1 copies and speaks again")
    engine.ranks[1].mute = False
    engine.evict_computed()
    harness.serve(engine, "again", tokens, max_tokens=4)
    harness.abandon(engine)


@scenario.on_engine("P1", "H44")
def h44_report_of_a_request_that_just_ended(harness: Harness, engine: VllmEngine) -> None:
    """A request ends with its first token, before its save is reported: its blocks are stored nevertheless."""
    (longer,) = harness.store(engine, prompt(1, 10), max_tokens=10)
    shortest = prompt(2, 10)
    harness.serve(engine, "short", shortest, max_tokens=1)
    harness.forget(engine)
    engine.add("short again", shortest)
    harness.load(engine, "longer again", longer)
    taken = engine.observed.committed_tokens("short again")
    require(taken, "what a request computed that ended at once is not stored", "H44")


@scenario.on_engine("P1", "P2", "P9", "H27", num_blocks=27, chunk=4 * BLOCK)
def preempted_while_it_saves(harness: Harness, engine: VllmEngine) -> None:
    """Requests are preempted in the step that computed new blocks: the saved blocks are right."""
    prompts = [prompt(seed, 8) for seed in range(1, 5)]
    harness.serve(engine, "r", *prompts, max_tokens=70)
    harness.forget(engine)
    for seed, tokens in enumerate(prompts):
        engine.add(f"again{seed}", [*tokens, *engine.observed.outputs[f"r{seed}"]])
        harness.finish(engine)
    harness.require_promise(engine)
    observable_if(engine.observed.preemptions, "nothing was preempted")


@scenario.on_engine("P1", "P2", "P9", overlap=True, num_blocks=35)
def steps_overlap(harness: Harness, engine: VllmEngine) -> None:
    """Each step is scheduled before the last one's output is known, as on GPUs; requests come and go."""
    prompts = harness.store(engine, *(prompt(seed, 10) for seed in range(1, 4)))
    harness.add(engine, "r", *prompts, max_tokens=50)
    engine.run(lambda: len(engine.observed.outputs["r0"]) > 5, steps=60)
    engine.abort("r1", during_step=True)
    harness.serve(engine, "late", prompts[1], max_tokens=30)
    harness.require_promise(engine)
