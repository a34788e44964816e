"""Scenarios about data: loads that are late, cut short, damaged or cancelled, several ranks, and who may see what."""

from __future__ import annotations

from kvpact.testkit.vllm.engine import VllmEngine
from kvpact.testkit.vllm.harness import BLOCK, BrokenError, Harness, NotObservableError, prompt
from kvpact.testkit.vllm.scenarios import Scenarios

scenario = LOADS = Scenarios()


LATENCIES = (0, 1, 2, 3, 4, 5, 6)
"""Steps by which workers' words come late; 0.33 itself may delay them when it replays a failed worker's output."""


@scenario("P2", "P8")
def chunked_prefill_is_stored_whole(harness: Harness) -> None:
    """Three prompts are computed in chunks that end anywhere; what was stored of them is loaded and checked."""
    with harness.engine(token_budget=100) as engine:
        prompts = [prompt(seed, 12) for seed in range(1, 4)]
        for seed, tokens in enumerate(prompts):
            engine.add(f"first{seed}", tokens)
        harness.finish(engine)
        harness.forget(engine)
        for seed, tokens in enumerate(prompts):
            engine.add(f"again{seed}", tokens)
        harness.finish(engine)
        harness.require_promise(engine)


@scenario("P2", "P8", "H29")
def chunk_ends_inside_the_last_block(harness: Harness) -> None:
    """A prompt's first chunk ends inside its last full block, which has room allocated and is half empty."""
    with harness.engine(token_budget=12 * BLOCK - 12) as engine:
        tokens = prompt(1, 12)
        harness.store(engine, tokens)
        engine.add("again", tokens)
        harness.finish(engine)
        harness.require_promise(engine)


@scenario("P7", "H30")
def h30_load_ends_inside_a_block(harness: Harness) -> None:
    """Prompts end anywhere in a block: what lies behind the last loaded token is computed, not taken as loaded."""
    with harness.engine(num_blocks=129) as engine:
        prompts = [prompt(tail + 1, 3, tail=tail) for tail in range(0, BLOCK, 3)]
        harness.store(engine, *prompts)
        for number, tokens in enumerate(prompts):
            engine.add(f"again{number}", tokens)
            engine.add(f"branch{number}", [*tokens[:-2], *prompt(50 + number, 1)])
        harness.finish(engine)
        harness.require_promise(engine)
        inside = sum(commit.num_tokens % BLOCK > 0 for commit in engine.observed.commits)
        harness.notes.append(f"{inside} of {len(engine.observed.commits)} loads end inside a block")


@scenario("P8", "P11", "H08", "H10")
def reports_come_late(harness: Harness) -> None:
    """What the workers say reaches the scheduler zero to six steps late; loads end once, and in time."""
    for delay in LATENCIES:
        harness.start_over()
        with harness.engine(num_blocks=41) as engine:
            engine.report_delay = [delay]
            prompts = [prompt(seed, 10) for seed in range(1, 4)]
            harness.store(engine, *prompts)
            engine.journal(f"workers' reports come {delay} steps late")
            for seed, tokens in enumerate(prompts):
                engine.add(f"again{seed}", tokens, max_tokens=4)
            harness.finish(engine)
            harness.require_promise(engine)


@scenario("P8", "H29")
def h29_nothing_is_published_before_it_is_there(harness: Harness) -> None:
    """While a load is under way others arrive with the same prompt: none of them reads a block that has not arrived."""
    for delay in (0, 4):
        harness.start_over()
        with harness.engine(num_blocks=65) as engine:
            tokens = prompt(1, 10)
            harness.store(engine, tokens)
            engine.report_delay = [delay]
            engine.journal(f"workers' reports come {delay} steps late")
            for number in range(6):
                engine.add(f"r{number}", [*tokens[: (10 - number) * BLOCK], *prompt(20 + number, 1)])
                engine.step()
                if wrong := engine.wrong_published():
                    raise BrokenError("P8", wrong[0])
            harness.finish(engine)
            harness.require_promise(engine)


def _loading(harness: Harness, engine: VllmEngine, delay: int) -> None:
    """A request waits for its asynchronous load, whose end is reported late."""
    tokens = prompt(1, 10)
    harness.store(engine, tokens)
    engine.report_delay = [delay] * engine.settings.workers
    engine.journal(f"workers' reports come {delay} steps late")
    engine.add("loading", tokens)
    engine.run(lambda: bool(engine.status("loading") not in ("", "WAITING")), steps=30)
    harness.require_promise(engine, "loading")
    if engine.status("loading") != "WAITING_FOR_REMOTE_KVS":
        raise NotObservableError("the connector loads inside the step, so nothing can come between")


@scenario("P1", "H07", "H08")
def h07_cancelled_while_its_load_runs(harness: Harness) -> None:
    """A request is cancelled during its load: its blocks come back, and only after nobody writes to them any more."""
    for delay in LATENCIES:
        harness.start_over()
        with harness.engine(num_blocks=21) as engine:
            _loading(harness, engine, delay + 1)
            engine.abort("loading", during_step=bool(delay % 2))
            engine.add("next", prompt(2, 15))
            harness.finish(engine)


@scenario("P1", "H08")
def h08_loads_are_reported_once(harness: Harness) -> None:
    """Many loads, some cancelled, on two ranks that are not equally fast: each receive is reported once."""
    with harness.engine(ranks=2, num_blocks=81) as engine:
        engine.report_delay = [0, 3]
        prompts = [prompt(seed, 6) for seed in range(1, 7)]
        harness.store(engine, *prompts)
        for seed, tokens in enumerate(prompts):
            engine.add(f"r{seed}", tokens)
        engine.step()
        for seed in (1, 4):
            engine.abort(f"r{seed}")
        harness.finish(engine)
        harness.require_promise(engine)


@scenario("P9", "P11", "H09")
def h09_load_that_always_fails(harness: Harness) -> None:
    """A load fails each time: the request computes its prompt itself and ends with the right tokens."""
    for good_blocks in (0, 3):
        harness.start_over()
        with harness.engine() as engine:
            tokens = prompt(1, 10)
            harness.store(engine, tokens)
            _fail_loads(harness, engine, good_blocks)
            engine.add("failing", tokens, max_tokens=4)
            harness.finish(engine)
            harness.require_promise(engine, "failing")
            harness.notes.append(f"{len(engine.observed.commits)} commits with {good_blocks} good blocks")


@scenario("P8", "P9", "H28")
def h28_failed_load_leaves_nothing_published(harness: Harness) -> None:
    """A load fails, its request is cancelled before it recomputes: the next one with the prefix is not fooled."""
    with harness.engine() as engine:
        tokens = prompt(1, 10)
        harness.store(engine, tokens)
        _fail_loads(harness, engine, 3)
        engine.add("victim", tokens, max_tokens=4)
        engine.run(lambda: bool(engine.observed.invalid_blocks) or engine.ended("victim"), steps=50)
        harness.require_promise(engine, "victim")
        if not engine.observed.invalid_blocks:
            raise NotObservableError("the failed load was not reported as invalid blocks")
        engine.abort("victim")
        engine.step()
        if wrong := engine.wrong_published():
            raise BrokenError("P8", wrong[0])
        engine.add("next", tokens, max_tokens=4)
        harness.finish(engine)


@scenario("P9")
def failed_load_ends_its_request_alone(harness: Harness) -> None:
    """Under the policy "fail" a failed load ends its own request with an error; all others go on."""
    with harness.engine(failure_policy="fail") as engine:
        tokens, others = prompt(1, 10), prompt(2, 10)
        harness.store(engine, tokens)
        _fail_loads(harness, engine, 3)
        engine.add("victim", tokens, max_tokens=4)
        engine.add("bystander", others, max_tokens=12)
        harness.finish(engine)
        harness.require_promise(engine, "victim")


def _fail_loads(harness: Harness, engine: VllmEngine, good_blocks: int) -> None:
    if not harness.subject.adapter.fail_loads(engine, good_blocks):
        raise NotObservableError("no adapter makes this connector's loads fail")
    engine.journal(f"from now on loads fail behind {good_blocks} blocks")


@scenario("H13")
def h13_hooks_do_not_raise(harness: Harness) -> None:
    """A mistake inside any hook costs a hit, and neither the engine nor a request nor a wrong token."""
    with harness.engine() as engine:
        hooks = list(harness.subject.adapter.break_hooks(engine))
    if not hooks:
        raise NotObservableError("no adapter breaks this connector's hooks")
    for hook in hooks:
        harness.start_over()
        with harness.engine(num_blocks=33) as engine:
            tokens = prompt(1, 10)
            harness.store(engine, tokens)
            engine.add("before", tokens, max_tokens=12)
            engine.step()
            harness.journal.append(f"{hook} raises the next three times")
            harness.subject.adapter.break_hooks(engine)[hook]()
            engine.add("after", tokens, max_tokens=3)
            engine.add("other", prompt(2, 10), max_tokens=3)
            harness.finish(engine)
            engine.abandoned = True
            harness.violations += [*harness.reads(engine), *harness.answers(engine)]


@scenario("H22")
def h22_flipped_bytes_are_not_served(harness: Harness) -> None:
    """Stored bytes are flipped between two engines: they are a miss."""
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
    tokens = prompt(1, 10)
    with harness.engine() as engine:
        harness.store(engine, tokens)
    files = harness.subject.adapter.damage(harness.folder, how)
    if not files:
        raise NotObservableError("the connector stores nothing in its folder")
    harness.journal.append(f"{how} {files} stored files")
    with harness.engine() as engine:
        engine.add("again", tokens)
        harness.finish(engine)


@scenario("P2", "H59")
def restart_finds_what_was_stored(harness: Harness) -> None:
    """A second engine with the same store loads what the first one computed."""
    prompts = [prompt(seed, 10) for seed in range(1, 5)]
    with harness.engine() as engine:
        harness.store(engine, *prompts)
    with harness.engine() as engine:
        for seed, tokens in enumerate(prompts):
            engine.add(f"again{seed}", tokens)
        harness.finish(engine)
        harness.require_promise(engine)
        later = sum(probe.answer is None for probe in engine.observed.probes)
        harness.notes.append(f"{later} lookups were answered 'ask again later'")


@scenario("P2", "H20")
def h20_same_tokens_behind_another_prefix(harness: Harness) -> None:
    """A block's keys and values depend on all tokens before it: the same tokens elsewhere are another block."""
    with harness.engine() as engine:
        first, second, shared = prompt(1, 4, tail=0), prompt(2, 4, tail=0), prompt(3, 4)
        harness.store(engine, [*first, *shared], [*second, *prompt(4, 4)])
        engine.add("crossed", [*second, *shared])
        engine.add("alone", shared)
        harness.finish(engine)
        harness.require_promise(engine)


@scenario("H24")
def h24_tenants_share_nothing(harness: Harness) -> None:
    """The same prompt under another salt, or none, loads nothing of what was stored for the first."""
    with harness.engine() as engine:
        tokens = prompt(1, 10)
        harness.store(engine, tokens, salt="tenant one")
        engine.add("other", tokens, salt="tenant two")
        engine.add("none", tokens)
        harness.finish(engine)
        engine.forget_computed()
        engine.add("same", tokens, salt="tenant one")
        harness.finish(engine)
        harness.require_promise(engine)


@scenario("P10", "H40", "H45")
def h45_ranks_report_in_different_steps(harness: Harness) -> None:
    """Two ranks speak up to five steps apart: nothing counts before both have spoken."""
    for delays in ([0, 0], [0, 5], [4, 1]):
        harness.start_over()
        with harness.engine(ranks=2, num_blocks=41) as engine:
            engine.report_delay = delays
            engine.journal(f"the ranks' reports come {delays} steps late")
            prompts = [prompt(seed, 10) for seed in range(1, 4)]
            harness.store(engine, *prompts)
            for seed, tokens in enumerate(prompts):
                engine.add(f"again{seed}", tokens, max_tokens=4)
            harness.finish(engine)
            harness.require_promise(engine)


@scenario("P10", "H40")
def h40_silent_rank_saves_nothing(harness: Harness) -> None:
    """One rank stops to copy and to speak while a prompt is stored: the prompt is not served from half a block."""
    with harness.engine(ranks=2, num_blocks=65) as engine:
        tokens = prompt(1, 10)
        engine.journal("rank 1 neither copies nor speaks")
        engine.ranks[1].mute = True
        engine.add("first", tokens, max_tokens=4)
        harness.finish(engine)
        engine.run(lambda: False, steps=10)
        engine.journal("rank 1 copies and speaks again")
        engine.ranks[1].mute = False
        engine.evict_computed()
        engine.add("again", tokens, max_tokens=4)
        harness.finish(engine)
        engine.abandoned = True
        harness.violations += [*harness.reads(engine), *harness.answers(engine)]


@scenario("P1", "H44")
def h44_report_of_a_request_that_just_ended(harness: Harness) -> None:
    """A request ends with its first token, before its save is reported: what it computed is stored all the same."""
    with harness.engine() as engine:
        longer, shortest = prompt(1, 10), prompt(2, 10)
        harness.store(engine, longer, max_tokens=10)
        engine.add("short", shortest, max_tokens=1)
        harness.finish(engine, "short")
        harness.forget(engine)
        engine.add("longer again", longer)
        engine.add("short again", shortest)
        harness.finish(engine)
        harness.require_promise(engine, "longer again")
        if not engine.observed.committed_tokens("short again"):
            raise BrokenError("H44", "what a request computed that ended at once is not stored")


@scenario("P1", "P2", "P9", "H27")
def preempted_while_it_saves(harness: Harness) -> None:
    """Requests are preempted in the step that computed new blocks; what is saved of them is right."""
    with harness.engine(num_blocks=27, chunk=4 * BLOCK) as engine:
        prompts = [prompt(seed, 8) for seed in range(1, 5)]
        for seed, tokens in enumerate(prompts):
            engine.add(f"r{seed}", tokens, max_tokens=70)
        harness.finish(engine)
        harness.forget(engine)
        for seed, tokens in enumerate(prompts):
            engine.add(f"again{seed}", [*tokens, *engine.observed.outputs[f"r{seed}"]])
            harness.finish(engine)
        harness.require_promise(engine)
        if not engine.observed.preemptions:
            raise NotObservableError("nothing was preempted")


@scenario("P1", "P2", "P9")
def steps_overlap(harness: Harness) -> None:
    """Each step is scheduled before the last one's output is known, as on GPUs; requests come and go."""
    with harness.engine(overlap=True, num_blocks=35) as engine:
        prompts = [prompt(seed, 10) for seed in range(1, 4)]
        harness.store(engine, *prompts)
        for seed, tokens in enumerate(prompts):
            engine.add(f"r{seed}", tokens, max_tokens=50)
        engine.run(lambda: len(engine.observed.outputs["r0"]) > 5, steps=60)
        engine.abort("r1", during_step=True)
        engine.add("late", prompts[1], max_tokens=30)
        harness.finish(engine)
        harness.require_promise(engine)
