"""The example `simple_cpu_offload`: vLLM's SimpleCPUOffloadConnector over the scheduler context, on vLLM's scheduler.

Its situations are those that upstream's own tests of its connector leave out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.errors import ConfigError
from kvpact_testkit.context_checks import BLOCKS, CHECKS
from kvpact_testkit.engine.block_pool import BlockPool
from kvpact_testkit.results import Verdict, as_text
from kvpact_testkit.vllm.adapters import ConnectorAdapter
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import SCENARIOS, VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt, under_multi_connector
from kvpact_testkit.vllm.model_groups import CHUNKED, GEMMA, STATES
from kvpact_testkit.vllm.releases import RELEASES, installed_release, run_on_release

EXAMPLES = Path(__file__).parents[2] / "examples"
CONNECTOR = "simple_cpu_offload:SimpleCPUOffload"
EAGER: dict[str, Any] = {}
LAZY = {"lazy_offload": True}


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


class Offloading(ConnectorAdapter):
    """What the example holds, and how its copies fail."""

    def held(self, connector: Any) -> Mapping[str, int]:
        """Everything that is held for a request or a copy."""
        offloader = connector.offloader
        offloader.check()
        return {
            "promises": len(offloader.promises),
            "copies": len(offloader.jobs),
            "requests": len(offloader.requests),
            "host blocks": offloader.host.held,
            "engine blocks": connector.scheduler_context.touched_blocks,
        }

    def fail_loads(self, engine: VllmEngine, good_blocks: int) -> bool:
        """A load fails as a whole, whatever `good_blocks`."""
        for rank in engine.ranks:
            rank.connector.memory.load = fail
        return True


def fail(engine_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
    """A copy that does not succeed."""
    raise RuntimeError("injected")


def driver(config: Mapping[str, Any], timeout: float = 20.0) -> VllmDriver:
    return VllmDriver(CONNECTOR, config, Offloading(), timeout)


class Engine:
    """vLLM's scheduler with the example, and short words for what the tests do with it."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        transfer = {
            "kv_connector": "SimpleCPUOffload",
            "kv_connector_module_path": "simple_cpu_offload",
            "kv_connector_extra_config": config,
        }
        self.journal: list[str] = []
        self.vllm = VllmEngine(EngineSettings(block_size=BLOCK, **settings), transfer, self.journal.append)
        self.offloader = self.vllm.connector.offloader
        self.host = self.offloader.host
        self.context = self.vllm.connector.scheduler_context

    def serve(self, name: str, tokens: Sequence[int], **settings: Any) -> int:
        """Run a request to its end: the tokens that were loaded for it."""
        self.vllm.add(name, tokens, **settings)
        assert self.vllm.finish(name), self.journal[-20:]
        return self.vllm.observed.committed_tokens(name)

    def begin(self, name: str, tokens: Sequence[int], **settings: Any) -> None:
        """Add a request, and take its first step."""
        self.vllm.add(name, tokens, **settings)
        self.vllm.step()

    def serve_several(self, count: int, blocks: int = 5) -> None:
        """Run requests of so many blocks to their ends, one after the other."""
        for number in range(count):
            self.serve(f"r{number}", prompt(number + 1, blocks))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache when all copies have ended."""
        assert self.vllm.drain()
        assert self.vllm.forget_computed()

    def store(self, *prompts: Sequence[int]) -> None:
        """Compute prompts, and leave them in host memory alone."""
        for tokens in prompts:
            self.serve(f"store{len(self.vllm.requests)}", tokens)
        self.forget()

    def probe(self, name: str) -> int:
        """Ask the connector for a request behind nothing, as the scheduler does: the tokens promised."""
        request = self.vllm.scheduler.requests[name]
        tokens, _ = self.vllm.connector.get_num_new_matched_tokens(request, 0)
        return int(tokens or 0)

    def stored(self) -> int:
        """Published host blocks that nobody holds."""
        return sum(view.block_hash is not None for view in self.host.iter_free_blocks())


@contextmanager
def engine(config: Mapping[str, Any] = EAGER, **settings: Any) -> Iterator[Engine]:
    """An engine. In the end all requests end well, every slot that was read was right, and nothing is held."""
    started = Engine(config, settings)
    yield started
    vllm = started.vllm
    assert vllm.finish(), started.journal[-20:]
    assert vllm.drain()
    assert not vllm.observed.wrong_slots
    assert not vllm.wrong_published()
    for name in vllm.requests:
        said, whole = vllm.observed.outputs[name], vllm.expected(name)
        assert said == whole[: len(said)]
    assert not any(Offloading().held(vllm.connector).values())
    assert vllm.held_blocks == 0
    vllm.close()


# It is a connector over the context, and its pool has the context's interface


class HostStage:
    """Host blocks as a `ContextStage`: requests take them as they would take an engine's."""

    def __init__(self, *, by_priority: bool) -> None:
        from simple_cpu_offload.host_pool import HostPool

        self.blocks = BlockPool(BLOCKS)
        self.pool = HostPool(self.blocks)
        self.by_priority = by_priority
        self.waiting: dict[str, tuple[Sequence[int], int, int]] = {}
        self.running: dict[str, tuple[list[int], int]] = {}

    @property
    def context(self) -> Any:
        """The pool, and the requests of this stage."""
        return HostContext(self)

    def add(self, name: str, tokens: Sequence[int], outputs: int = 8, priority: int = 0) -> None:
        """See `ContextStage`."""
        self.waiting[name] = tokens, outputs, priority

    def in_line(self) -> list[str]:
        return sorted(self.waiting, key=lambda name: self.waiting[name][2] if self.by_priority else 0)

    def cancel(self, name: str) -> None:
        """See `ContextStage`."""
        self.waiting.pop(name, None)
        blocks, _ = self.running.pop(name, ([], 0))
        self.blocks.free(blocks[::-1])

    def step(self, times: int = 1) -> None:
        """See `ContextStage`."""
        for _ in range(times):
            for name, (blocks, left) in [*self.running.items()]:
                self.running[name] = blocks, left - 1
                if left <= 1:
                    self.cancel(name)
            for name in self.in_line():
                if not self.admit(name, *self.waiting[name][:2]):
                    break

    def admit(self, name: str, tokens: Sequence[int], outputs: int) -> bool:
        hashes = [repr(tokens[:end]).encode() for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        hits: list[int] = []
        while len(hits) < len(hashes) and (hit := self.blocks.find(hashes[len(hits)], 0)) is not None:
            hits.append(hit)
        wanted = -(-(len(tokens) + outputs) // BLOCK) - len(hits)
        if wanted > self.blocks.num_free - sum(self.blocks.is_free(hit) for hit in hits):
            return False
        for hit in hits:
            self.blocks.touch(hit)
        blocks = [*hits, *self.blocks.allocate(max(0, wanted), 0)]
        for block, block_hash in zip(blocks[len(hits) :], hashes[len(hits) :], strict=False):
            self.blocks.publish(block, block_hash)
        self.running[name] = blocks, outputs
        del self.waiting[name]
        return True

    def finish(self, name: str) -> None:
        """See `ContextStage`."""
        while name in self.waiting or name in self.running:
            self.step()


class HostContext:
    """The host pool's own four methods, and this stage's requests."""

    def __init__(self, stage: HostStage) -> None:
        self._stage = stage
        pool = stage.pool
        self.get_block, self.touch, self.free_blocks = pool.get_block, pool.touch, pool.free_blocks
        self.iter_free_blocks = pool.iter_free_blocks

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        from kvpact.block_refs import no_such_request

        if request_id not in self._stage.waiting and request_id not in self._stage.running:
            raise no_such_request(request_id)
        return (tuple(self._stage.running.get(request_id, ([], 0))[0]),)

    def waiting_requests(self) -> Sequence[str]:
        return tuple(self._stage.in_line())


@pytest.mark.parametrize("name", CHECKS)
def test_the_host_pool_keeps_what_the_scheduler_context_promises(name: str) -> None:
    """The checks that vLLM's blocks and the embedded engine's are held to, on host blocks."""
    CHECKS[name](HostStage(by_priority="priority" in name))


ASKED_OF_VLLM = {
    "request": {"request_id", "num_tokens", "block_hashes", "skip_reading_prefix_cache"},
    "scheduler_output": {"num_scheduled_tokens"},
    "connector_output": {"kv_connector_worker_meta"},
    "blocks": set(),
    "kv_cache_manager": set(),
}
"""Argument of a hook -> the attributes that the example reads of it."""


def test_nothing_of_vllms_pool_and_its_requests_is_asked_but_through_the_context() -> None:
    folder = EXAMPLES / "simple_cpu_offload"
    for file in folder.glob("*.py"):
        tree = ast.parse(file.read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if file.stem in ("offloader", "host_pool", "host_memory"):
            assert not [module for module in imported if module.split(".")[0] == "vllm" or "kvpact.vllm" in module]
    asked: dict[str, set[str]] = {name: set() for name in ASKED_OF_VLLM}
    for node in ast.walk(ast.parse((folder / "connector.py").read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in asked:
            asked[node.value.id].add(node.attr)
    assert asked == ASKED_OF_VLLM


def test_models_that_it_does_not_serve_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="no states"):
        Engine(EAGER, {"groups": STATES})
    with pytest.raises(ConfigError, match="num_cpu_blocks is 0; at least 1 is needed"):
        Engine({"num_cpu_blocks": 0}, {})


# The driver's scenarios

BY_ITSELF = {
    "commits_come_with_the_next_output": "vLLM 0.33 defers loads",
    "draft_model_wants_the_rest_of_the_prompt": "all loads are asynchronous",
    "h13_hooks_do_not_raise": "it does not guard its hooks: an exception is a bug to be seen",
    "h22_flipped_bytes_are_not_served": "it keeps no files",
    "h22_truncated_files_are_a_miss": "it keeps no files",
    "h22_missing_files_are_a_miss": "it keeps no files",
    "restart_finds_what_was_stored": "host memory ends with the process",
    "h28_failed_load_of_a_request_that_is_preempted": "a load fails as a whole, and names no blocks",
    "h28_failed_load_leaves_nothing_published": "a load fails as a whole, and names no blocks",
    "h41_each_rank_fails_another_block": "a load fails as a whole",
    "h42_each_rank_saves_with_a_gap": "a save fails as a whole",
    "h43_one_rank_loads_all_and_the_other_nothing": "a load fails as a whole",
    "one_stage_fails_alone": "a load fails as a whole",
    "ranks_hold_the_same_bytes": "a save fails as a whole",
}
"""Scenario that cannot be observed on the example -> why."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_eager_saving_keeps_every_scenario_that_can_be_observed(scenario: Any) -> None:
    check = driver(EAGER).check(scenario)
    wanted = Verdict.NOT_OBSERVABLE if scenario.name in BY_ITSELF else Verdict.KEPT
    assert check.verdict is wanted, f"{check.note} {check.violations} {check.script}"


@pytest.mark.parametrize(
    "config",
    [pytest.param({"num_cpu_blocks": 9}, marks=pytest.mark.soak), LAZY, {**LAZY, "num_cpu_blocks": 9}],
    ids=["eager, short", "lazy", "lazy, short"],
)
def test_everything_at_once_breaks_nothing_where_host_memory_is_short(config: dict[str, Any]) -> None:
    report = driver(config, 60.0).run(["everything_at_once", "groups_and_everything_at_once", "preempted_after_a_load"])
    assert not report.broken, as_text(report)


@pytest.mark.parametrize("release", [release for release in RELEASES if release >= "0.33"])
@pytest.mark.skipif(installed_release() >= "0.33", reason="this release is the installed one")
@pytest.mark.timeout(900)
@pytest.mark.soak
def test_the_release_after_the_installed_one_keeps_the_same_scenarios(release: str) -> None:
    report = run_on_release(release, CONNECTOR)
    assert not report.broken, as_text(report)
    report_of_groups = run_on_release(
        release, CONNECTOR, names=["groups_under_pressure", "groups_and_everything_at_once"]
    )
    assert not report_of_groups.broken, as_text(report_of_groups)
    unseen = {check.name for check in report.checks if check.verdict is Verdict.NOT_OBSERVABLE}
    # Without an adapter, which another process does not have, no load can be made to fail.
    needs_faults = {"h09_load_that_always_fails", "failed_load_ends_its_request_alone"}
    assert unseen - needs_faults <= BY_ITSELF.keys(), as_text(report)


# Between the promise and the load

A = prompt(1, 6)


def test_a_request_that_is_cancelled_before_it_takes_its_promise_leaves_nothing_held() -> None:
    with engine(max_num_seqs=1) as one:
        one.store(A)
        one.begin("runs", prompt(2, 1), max_tokens=40)
        one.vllm.add("waits", A)
        assert one.probe("waits") == 6 * BLOCK
        assert one.host.held == 6
        one.vllm.abort("waits")
        assert one.host.held == 0
        assert one.stored() >= 6, "what nobody holds is still there"


def test_asking_again_holds_nothing_twice_and_another_range_replaces_the_first() -> None:
    with engine() as one:
        one.store(A)
        one.vllm.add("asks", A)
        request = one.vllm.scheduler.requests["asks"]
        answers = [one.vllm.connector.get_num_new_matched_tokens(request, 0)[0] for _ in range(3)]
        assert answers == [6 * BLOCK] * 3
        assert one.host.held == 6
        assert one.vllm.connector.get_num_new_matched_tokens(request, 4 * BLOCK) == (2 * BLOCK, True)
        assert one.host.held == 2
        assert one.vllm.connector.get_num_new_matched_tokens(request, 6 * BLOCK) == (0, False)
        assert one.host.held == 0


def test_a_promise_is_held_while_others_fill_host_memory_and_taken_whole() -> None:
    with engine({"num_cpu_blocks": 8}, max_num_seqs=1) as one:
        one.store(A)
        one.begin("runs", prompt(2, 1), max_tokens=6 * BLOCK)
        one.vllm.add("waits", A)
        assert one.probe("waits") == 6 * BLOCK
        assert one.vllm.finish("waits")
        assert one.vllm.observed.committed_tokens("waits") == 6 * BLOCK


def test_where_everything_is_held_nothing_is_saved_and_saving_goes_on_later() -> None:
    with engine({"num_cpu_blocks": 6}, max_num_seqs=1) as one:
        one.store(A)
        one.vllm.add("runs", prompt(2, 4), max_tokens=30)
        one.vllm.add("waits", A)
        assert one.probe("waits") == 6 * BLOCK
        assert one.host.num_free == 0
        one.vllm.step(3)
        assert not one.offloader.jobs, "there is no room, and no block is taken from the promise"
        one.vllm.abort("waits")
        one.vllm.step()
        assert one.vllm.drain()
        one.vllm.finish()
        assert {len(one.host.get_block(block).block_hash or b"") > 0 for block in range(1, 7)} == {True}
        one.forget()
        assert one.serve("again", prompt(2, 4)) == 4 * BLOCK, "the same request's blocks were saved when there was room"


@pytest.mark.parametrize("tokens", [5 * BLOCK, 5 * BLOCK - 3, BLOCK, 0])
def test_vllm_may_take_fewer_tokens_also_inside_a_block(tokens: int) -> None:
    with engine() as one:
        one.store(A)
        one.vllm.rewrite = lambda name, answer: tokens
        assert one.serve("fewer", A) == tokens


def test_a_window_that_ends_earlier_than_promised_is_loaded_from_where_it_begins() -> None:
    with engine(groups=GEMMA, num_blocks=101) as one:
        one.store(prompt(1, 8))
        one.vllm.rewrite = lambda name, answer: 5 * BLOCK
        assert one.serve("fewer", prompt(1, 8)) == 5 * BLOCK
        assert len(one.vllm.observed.probes_of("fewer")) == 1, "it was loaded, not lost and computed"


def test_a_shorter_window_whose_blocks_are_gone_is_computed() -> None:
    with engine(groups=GEMMA, num_blocks=101) as one:
        one.store(prompt(1, 8))
        one.vllm.add("fewer", prompt(1, 8))
        assert one.probe("fewer") == 8 * BLOCK
        one.vllm.rewrite = lambda name, answer: 5 * BLOCK
        free = [view.block_id for view in one.host.iter_free_blocks() if view.group_id > 0]
        one.host.unpublish(free)  # as other saves would: the promise holds the window at its own end alone
        assert one.vllm.finish("fewer")
        assert one.vllm.observed.committed_tokens("fewer") == 5 * BLOCK
        assert one.vllm.observed.outputs["fewer"] == one.vllm.expected("fewer")
        assert len(one.vllm.observed.commits) == 1, "what failed is not promised to this request again"


def test_blocks_that_the_request_does_not_need_are_not_loaded() -> None:
    with engine(groups=GEMMA, num_blocks=101) as one:
        one.store(prompt(1, 8))
        one.vllm.add("windows", prompt(1, 8))
        one.vllm.report_delay = [3]
        one.vllm.step()
        (load,) = [job for job in one.offloader.jobs.values() if job.request_id]
        views = [one.context.get_block(block) for block in load.engine_blocks]
        assert not any(view.is_null for view in views)
        assert len(views) == 8 + 3 + 3, "all blocks of full attention; of each window of 40 tokens the last three"


def test_chunks_are_counted_from_the_prompts_first_token_behind_a_local_hit_too() -> None:
    with engine(groups=CHUNKED, num_blocks=101) as one:
        one.store(prompt(1, 11))
        one.serve("head", prompt(1, 11)[: 6 * BLOCK + 3])
        assert one.serve("all", prompt(1, 11)) == 5 * BLOCK


# Copies under way


def test_a_load_outlives_its_request_and_one_of_the_same_name() -> None:
    with engine() as one:
        one.store(A)
        one.vllm.report_delay = [4]
        one.begin("name", A)
        (load,) = one.offloader.jobs.values()
        one.vllm.abort("name")
        assert [one.context.get_block(block).ref_cnt for block in load.engine_blocks[:6]] == [2] * 6
        assert one.host.held == 6
        one.vllm.step(2)
        assert one.host.held == 6, "the ranks have not said that they are done"
        assert one.vllm.drain()
        assert one.host.held == 0
        assert one.vllm.observed.finished["name"] == "abort"


def test_a_request_that_ends_before_its_save_is_stored_all_the_same() -> None:
    with engine() as one:
        one.vllm.report_delay = [6]
        one.serve("ends", A)
        assert one.offloader.jobs
        assert one.offloader.requests == {}
        one.forget()
        one.vllm.report_delay = [0]
        assert one.serve("again", A) == 6 * BLOCK


def test_blocks_under_a_save_are_not_reused_when_their_request_is_preempted() -> None:
    """The pool is too small for both: one is preempted while the ranks are silent about its saves."""
    with engine(num_blocks=14, chunk=2 * BLOCK) as one:
        one.vllm.report_delay = [5]
        one.vllm.add("first", prompt(1, 5), max_tokens=40)
        one.vllm.add("second", prompt(2, 5), max_tokens=40)
        assert one.vllm.finish()
        assert one.vllm.observed.preemptions
        one.vllm.report_delay = [0]
        one.forget()
        assert one.serve("again", prompt(1, 5)) == 5 * BLOCK


def test_a_request_that_comes_back_after_a_preemption_loads_what_it_had_computed() -> None:
    with engine(num_blocks=14, chunk=2 * BLOCK) as one:
        one.vllm.add("first", prompt(1, 5), max_tokens=50)
        one.vllm.add("second", prompt(2, 5), max_tokens=50)
        while not one.vllm.observed.preemptions:
            one.vllm.step()
        one.vllm.evict_computed()
        assert one.vllm.finish()
        assert max(commit.num_tokens for commit in one.vllm.observed.commits) > 5 * BLOCK, "more than its prompt"


def test_one_block_may_be_held_by_a_load_a_save_and_its_request() -> None:
    """The load's own target is published when it arrives, and offered to be saved when host memory lost it."""
    with engine() as one:
        one.store(A)
        one.vllm.report_delay = [2]
        one.begin("first", A, max_tokens=30)
        (load,) = one.offloader.jobs.values()
        one.offloader.reset()  # host memory forgets; the request goes on with what it loads
        while not any(not job.request_id for job in one.offloader.jobs.values()):
            one.vllm.step()
        (save,) = [job for job in one.offloader.jobs.values() if not job.request_id]
        assert {*save.engine_blocks} >= {*load.engine_blocks}
        one.begin("second", A)
        assert max(one.context.get_block(block).ref_cnt for block in save.engine_blocks) == 3


def test_two_requests_that_compute_the_same_are_saved_once() -> None:
    with engine() as one:
        one.vllm.report_delay = [3]
        one.vllm.add("first", A)
        one.vllm.add("second", A)
        assert one.vllm.finish()
        one.forget()
        names = [one.host.get_block(block).block_hash for block in range(1, one.vllm.settings.num_blocks)]
        named = [name for name in names if name is not None]
        assert len(named) == len({*named}) == 6


def test_a_block_whose_name_the_engine_withdrew_is_not_published() -> None:
    """As vLLM withdraws it when a load into it turns out to have failed."""
    with engine() as one:
        one.vllm.report_delay = [3]
        one.begin("computes", A, max_tokens=20)
        (save,) = one.offloader.jobs.values()
        one.context.evict_published(save.engine_blocks[2:3])
        assert one.vllm.finish()
        one.forget()
        one.vllm.report_delay = [0]
        assert one.serve("again", A) == 2 * BLOCK


# What ranks say


def test_a_rank_that_says_it_twice_is_not_two_ranks() -> None:
    with engine(ranks=2) as one:
        one.vllm.report_delay = [50, 50]
        one.begin("computes", A)
        (job,) = one.offloader.jobs
        one.offloader.settle({job: {0}}, set())
        one.offloader.settle({job: {0}}, set())
        assert job in one.offloader.jobs
        one.offloader.settle({job: {1}}, set())
        assert job not in one.offloader.jobs
        held = one.context.touched_blocks
        one.offloader.settle({job: {0, 1}}, set())
        assert one.context.touched_blocks == held, "over is over"
        assert one.stored() == 6


def test_a_save_that_fails_on_one_rank_is_not_served() -> None:
    with engine(ranks=2) as one:
        whole = one.vllm.ranks[1].connector.memory.save
        one.vllm.ranks[1].connector.memory.save = fail
        one.store(A)
        assert one.stored() == 0
        one.vllm.ranks[1].connector.memory.save = whole
        assert one.serve("again", A) == 0
        one.forget()
        assert one.serve("third", A) == 6 * BLOCK, "and can be saved again"


@pytest.mark.parametrize("groups", [(), GEMMA, CHUNKED], ids=["one group", "windows", "chunks"])
def test_a_load_that_fails_is_computed_and_what_was_stored_is_not_served_again(groups: Any) -> None:
    with engine(groups=groups, num_blocks=101) as one:
        one.store(A)
        whole = one.vllm.ranks[0].connector.memory.load
        one.vllm.ranks[0].connector.memory.load = fail
        assert one.serve("fails", A) == 6 * BLOCK
        assert len(one.vllm.observed.probes_of("fails")) == 2
        assert one.vllm.observed.probes_of("fails")[-1].answer == 0
        one.vllm.ranks[0].connector.memory.load = whole
        one.forget()
        assert one.serve("again", A) == 6 * BLOCK, "it was computed, and saved anew"


def test_what_a_failed_load_read_is_forgotten_and_its_request_is_promised_nothing_any_more() -> None:
    """Not even what another request has stored anew: a load that fails each time would go on for ever."""
    with engine() as one:
        one.store(A)
        one.vllm.ranks[0].connector.memory.load = fail
        one.vllm.add("fails", A)
        names = [one.offloader.requests["fails"][0](0, block) for block in range(6)]
        while not one.offloader.distrusted:
            assert all(one.host.find(name, 0) for name in names)
            one.vllm.step()
        assert not any(one.host.find(name, 0) for name in names)
        anew = one.host.take([0] * 6)
        for block, name in zip(anew, names, strict=True):
            one.host.publish(block, name)
        one.host.free_blocks(anew)
        assert one.probe("fails") == 0


def test_a_load_that_fails_for_a_request_that_is_gone_harms_no_other() -> None:
    with engine() as one:
        one.store(A)
        one.vllm.report_delay = [3]
        whole = one.vllm.ranks[0].connector.memory.load
        one.vllm.ranks[0].connector.memory.load = fail
        one.begin("gone", A)
        one.vllm.abort("gone")
        one.vllm.ranks[0].connector.memory.load = whole
        one.vllm.add("other", A)
        assert one.vllm.finish()
        assert one.offloader.distrusted == set()
        assert one.vllm.observed.outputs["other"] == one.vllm.expected("other")


# Resets


def test_after_a_reset_neither_what_is_stored_nor_what_is_being_saved_is_served() -> None:
    with engine() as one:
        one.vllm.report_delay = [5]
        one.begin("computes", A, max_tokens=20)
        assert one.offloader.jobs
        assert one.vllm.connector.reset_cache()
        one.vllm.abort("computes")
        one.forget()
        assert one.stored() == 0
        one.vllm.report_delay = [0]
        assert one.serve("again", A) == 0


def test_what_is_computed_after_a_reset_is_saved_although_an_older_save_of_it_runs() -> None:
    with engine() as one:
        one.vllm.report_delay = [8]
        one.begin("before", A)
        one.vllm.connector.reset_cache()
        one.begin("after", A)
        assert len(one.offloader.jobs) == 2
        assert one.vllm.finish()
        one.forget()
        one.vllm.report_delay = [0]
        assert one.serve("again", A) == 6 * BLOCK


def test_a_reset_with_a_promise_and_a_load_under_way_loses_the_promise_and_ends_the_load() -> None:
    with engine(max_num_seqs=1) as one:
        one.store(A, prompt(3, 3))
        one.vllm.report_delay = [4]
        one.begin("loads", A)
        one.vllm.add("waits", prompt(3, 3))
        assert one.probe("waits") == 3 * BLOCK
        assert one.vllm.connector.reset_cache()
        assert one.offloader.promises == {}
        assert len(one.offloader.jobs) == 1
        assert one.vllm.finish()
        assert one.vllm.observed.committed_tokens("waits") == 0


# What is reused first, in host memory


def test_what_the_next_waiting_requests_will_ask_for_is_reused_last() -> None:
    """Both are stored, the older one is wanted, and there is room for two and a half prompts."""
    with engine({"num_cpu_blocks": 8}, max_num_seqs=1) as one:
        one.store(prompt(1, 3), prompt(2, 3))
        one.vllm.add("runs", prompt(3, 4), max_tokens=10)
        one.vllm.add("waits", prompt(1, 3))
        assert one.vllm.finish()
        assert one.vllm.observed.committed_tokens("waits") == 3 * BLOCK


def test_of_a_prompt_the_end_is_reused_before_the_beginning() -> None:
    with engine({"num_cpu_blocks": 8}) as one:
        one.store(prompt(1, 6), prompt(2, 4))
        assert one.serve("again", prompt(1, 6)) == 4 * BLOCK


# Lazy


def test_lazy_saving_writes_nothing_while_everything_fits() -> None:
    with engine(LAZY, num_blocks=65) as one:
        one.serve_several(3, 3)
        assert one.vllm.drain()
        assert one.stored() == 0
        assert one.offloader.look_ahead == 16


def test_lazy_saving_keeps_what_the_engine_is_about_to_reuse() -> None:
    with engine(LAZY, num_blocks=21) as one:
        one.serve_several(6)
        one.forget()
        assert sum(one.serve(f"again{number}", prompt(number + 1, 5)) for number in range(3)) >= 10 * BLOCK


def test_lazy_saving_touches_what_it_found_when_its_walk_is_over_and_puts_it_back_at_the_head() -> None:
    """A touched block leaves the queue: a walk that touched as it went would lose its place."""
    with engine(LAZY, num_blocks=21) as one:
        one.serve_several(4)
        assert one.vllm.drain()
        ahead = [*one.context.iter_free_blocks()][: one.offloader.look_ahead]
        named = [view for view in ahead if view.block_hash is not None]
        assert named
        for view in named:
            assert one.host.find(view.block_hash, 0) is not None, "and so it is not saved again"


def test_lazy_saving_goes_on_when_blocks_leave_the_queue_between_two_walks() -> None:
    """Each walk begins at the head. One that began behind a remembered block could not: requests took that block."""
    with engine(LAZY, num_blocks=21) as one:
        one.vllm.report_delay = [2]
        for number in range(4):
            one.serve(f"r{number}", prompt(number + 1, 5))
            walked = [view.block_id for view in one.context.iter_free_blocks()]
            one.begin(f"takes{number}", prompt(number + 1, 5))
            assert walked != [view.block_id for view in one.context.iter_free_blocks()]
        assert one.vllm.finish()


def test_lazy_saving_holds_few_of_the_engines_blocks_however_silent_the_ranks_are() -> None:
    with engine(LAZY, num_blocks=21) as one:
        one.vllm.report_delay = [12]
        most = 0
        for number in range(6):
            one.vllm.add(f"r{number}", prompt(number + 1, 5), max_tokens=4)
            for _ in range(6):
                one.vllm.step()
                most = max(most, one.context.touched_blocks)
        assert one.vllm.finish()
        assert 0 < most <= one.offloader.look_ahead == 5


def test_lazy_saving_ends_where_host_memory_is_smaller_than_what_it_looks_at() -> None:
    with engine({**LAZY, "num_cpu_blocks": 3}, num_blocks=41) as one:
        one.serve_several(9)
        before = one.vllm.observed.steps
        assert one.vllm.drain()
        assert one.vllm.observed.steps - before < 20


def test_in_a_model_with_windows_lazy_saving_stores_what_can_be_served() -> None:
    with engine({**LAZY, "num_cpu_blocks": 300}, groups=GEMMA, num_blocks=121) as one:
        one.serve_several(10, 6)
        one.forget()
        assert one.serve("again", prompt(1, 6)) == 6 * BLOCK


# Company


def test_behind_another_connector_that_wins_its_promise_is_released(tmp_path: Path) -> None:
    from kvpact_testkit.vllm.harness import named
    from kvpact_testkit.vllm.simple_connector import SimpleConnector

    mine = {"kv_connector": "SimpleCPUOffload", "kv_connector_module_path": "simple_cpu_offload"}
    vllm = VllmEngine(
        EngineSettings(block_size=BLOCK), under_multi_connector(named(SimpleConnector), mine), lambda line: None
    )
    for name in ("first", "again"):
        vllm.add(name, A)
        assert vllm.finish()
        assert vllm.drain()
        assert vllm.forget_computed()
    assert vllm.observed.committed_tokens("again") == 6 * BLOCK
    from kvpact.vllm.compat.objects import connectors_of

    (offload,) = [one for one in connectors_of(vllm.connector) if type(one).__name__ == "SimpleCPUOffload"]
    assert not any(Offloading().held(offload).values())
    vllm.close()
