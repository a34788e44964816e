"""vLLM's real scheduler over ranks without a model: one step at a time, with every call of the connector recorded.

Owns the engine's loop (the order of `EngineCore.step`) and the observations for scenarios. Judges only what no engine
survives: a hook that raises.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpact.identity.groups import GroupKind
from kvpact.vllm.compat.scheduler import group_of
from kvpact_testkit.engine.oracle import Digests
from kvpact_testkit.vllm import compat
from kvpact_testkit.vllm.compat import EngineSettings, RequestSettings
from kvpact_testkit.vllm.model_groups import group_of_layers, groups_of
from kvpact_testkit.vllm.observed import Observed
from kvpact_testkit.vllm.oracle import TokenChain, continuation
from kvpact_testkit.vllm.rank import Rank
from kvpact_testkit.vllm.rank_group import CollectiveNotPossible

IDLE_SECONDS = 0.001
"""Seconds of pause after a step that computed nothing, so that a connector's threads can run."""


class EngineDied(Exception):
    """An exception left the scheduler or a rank: vLLM's EngineCore would end."""


class VllmEngine:
    """One engine. `transfer` are the fields of `KVTransferConfig` that name the connector and its configuration."""

    def __init__(self, settings: EngineSettings, transfer: Mapping[str, Any], journal: Callable[[str], None]) -> None:
        self.settings = settings
        self.observed = Observed()
        self._report_delay: Sequence[int] = [0] * settings.workers
        self.rewrite: Callable[[str, int], int] | None = None
        """(request, answered tokens) -> tokens that the scheduler takes instead of the answer."""
        self.journal = journal
        """Called with a line for each action."""
        self.abandoned = False
        """The scenario broke the connector permanently: what it holds at the end is not judged."""
        self._weights = 0
        self._identities: dict[str, str] = {}
        self._wanted: dict[str, RequestSettings] = {}
        self._aborts: list[str] = []
        self._late: list[deque[tuple[int, Any]]] = [deque() for _ in range(settings.workers)]
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._drafts: Any = None
        self._closed = False
        vllm_config = compat.make_vllm_config(settings, transfer)
        kv_cache_config = compat.make_kv_cache_config(settings)
        with compat.runs_runner(settings.runner):
            # Workers come up before the scheduler does.
            self.ranks = [Rank(settings, vllm_config, worker) for worker in range(settings.workers)]
            self.scheduler = compat.make_scheduler(settings, vllm_config, kv_cache_config)
        self.connector = self.scheduler.connector
        compat.shake_hands(settings, self.connector, [rank.connector for rank in self.ranks])
        self._aggregator = compat.make_aggregator(self.connector, settings.workers)
        self.observed.listen(self.connector, journal, self._taken)
        self.scheduler.kv_event_publisher.publish = lambda batch: self.observed.events.extend(batch.events)

    # What a scenario does

    def add(self, request_id: str, prompt: Sequence[int], **settings: Any) -> None:
        """A request arrives; see `RequestSettings`."""
        wanted = RequestSettings(prompt=prompt, **settings)
        special = ", ".join(f"{name}={value}" for name, value in settings.items())
        self.journal(f"add {request_id}: {len(prompt)} tokens, first is {prompt[0]}{', ' + special if special else ''}")
        self._identities[request_id] = f"{wanted.salt}|{wanted.adapter}|{self._weights}"
        self._wanted[request_id] = wanted
        self.observed.outputs[request_id] = []
        request = compat.make_request(request_id, wanted, compat.block_sizes(self.settings)["hash_block_size"])
        self._guarded("add_request", lambda: self.scheduler.add_request(request))

    def abort(self, request_id: str, *, during_step: bool = False) -> None:
        """Abort a request: at once, or (as most users do) while the next step computes."""
        if during_step:
            self.journal(f"abort {request_id} while the next step computes")
            self._aborts.append(request_id)
        else:
            self.journal(f"abort {request_id}")
            self._abort_now(request_id)

    def _abort_now(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.observed.finished.setdefault(request_id, "abort")
        self._guarded(
            "finish_requests", lambda: self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        )

    def step(self, times: int = 1, *, throttle_prefills: bool = False) -> int:
        """Run `times` turns of the engine's loop; returns the number of computed tokens."""
        return sum(self._step(throttle_prefills) for _ in range(times))

    def _step(self, throttle_prefills: bool) -> int:
        self.observed.steps += 1
        output = self._guarded("schedule", lambda: self.scheduler.schedule(throttle_prefills))
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        # One that has lost its name since promises nothing: the scheduler may have given it to another request.
        self.observed.offered = [one for one in self.observed.offered if blocks[one[2]].block_hash is not None]
        self.observed.preemptions += len(output.preempted_req_ids or ())
        self.observed.copies += len(output.kv_cache_block_copies or ())
        answer = self._guarded("execute_model", lambda: self._execute(output))
        self._judge_offers()
        self._in_flight.append((output, answer))
        if self.settings.draft_tokens and not self.settings.overlap:  # else the workers keep them
            self._draft(output)
        computing = int(self.settings.overlap and output.total_num_scheduled_tokens > 0)
        while len(self._in_flight) > computing:
            self._take_output()
        return int(output.total_num_scheduled_tokens)

    def _judge_offers(self) -> None:
        """Compare the states that vLLM offered in this step, now that it has ended, with what they must be."""
        for request_id, group, block, tokens in self.observed.offered:
            # a load that has ended is offered, too, before its request is in a step
            loaded = TokenChain(self._identities[request_id], list(self._wanted[request_id].prompt))
            for rank in self.ranks:
                digests = rank.known.get(request_id, loaded).digests(0, tokens)
                if len(digests) < tokens or (fault := rank.state_fault(group, block, digests)):
                    where = f"block {block} is offered as the state of {request_id} at {tokens} tokens"
                    found = fault if len(digests) == tokens else f"of which there are {len(digests)}"
                    self.observed.wrong_offers.append(f"{where}, {found}")

    def _draft(self, output: Any) -> None:
        """The workers' drafts for the next step."""
        from vllm.v1.outputs import DraftTokenIds

        scheduled = list(output.num_scheduled_tokens)
        self._drafts = DraftTokenIds(scheduled, [self.ranks[0].guesses(one) for one in scheduled])

    def _take_output(self) -> None:
        output, answer = self._in_flight.popleft()
        while self._aborts:
            self._abort_now(self._aborts.pop(0))
        results = self._guarded("update_from_output", lambda: self.scheduler.update_from_output(output, answer))
        for client in results.values():
            for result in client.outputs:
                self.observed.outputs[result.request_id].extend(result.new_token_ids)
                if result.finish_reason is not None:
                    self.observed.finished.setdefault(result.request_id, str(result.finish_reason))
        if self._drafts is not None:
            self.scheduler.update_draft_token_ids(self._drafts)
            self._drafts = None

    @property
    def report_delay(self) -> Sequence[int]:
        """Steps by which each rank's reports to the scheduler are delayed."""
        return self._report_delay

    @report_delay.setter
    def report_delay(self, steps: Sequence[int]) -> None:
        self._report_delay = steps
        self.journal(f"workers' reports come {list(steps)} steps late")

    def run(self, until: Callable[[], bool], *, steps: int = 20_000, seconds: float = 20.0) -> bool:
        """Step until `until()`, for at most `steps` steps and `seconds` seconds; whether it became true."""
        end = time.monotonic() + seconds
        for _ in range(steps):
            if until():
                return True
            if time.monotonic() > end:
                break
            if not self.step():
                time.sleep(IDLE_SECONDS)
        return until()

    def finish(self, *request_ids: str, **limits: Any) -> bool:
        """Run until these requests (or all) have ended; whether they have."""
        self.journal(f"run until {', '.join(request_ids) or 'all requests'} ended")
        return self.run(lambda: all(self.ended(one) for one in request_ids or self._wanted), **limits)

    def drain(self, seconds: float = 20.0) -> bool:
        """Run as vLLM does until it has no work left; whether it got that far."""
        return self.run(lambda: not self.scheduler.has_requests() and not self._in_flight, seconds=seconds)

    def forget_computed(self) -> bool:
        """Empty the engine's own prefix cache, so that only the connector can provide the next hit."""
        self.journal("empty the engine's own prefix cache")
        return self.run(
            lambda: bool(self._guarded("reset_prefix_cache", self.scheduler.reset_prefix_cache)), seconds=10.0
        )

    def evict_computed(self, group: int | None = None) -> None:
        """Evict every block, or those of one KV cache group, from the engine's own prefix cache, held or not."""
        of_group = "everything" if group is None else f"the blocks of group {group}"
        self.journal(f"evict {of_group} from the engine's own prefix cache")
        pool = self.scheduler.kv_cache_manager.block_pool
        published = [block for block in pool.blocks if block.block_hash is not None]
        pool.evict_blocks({one.block_id for one in published if group in (None, group_of(one.block_hash))})

    def new_weights(self) -> None:
        """Make the model compute other keys and values."""
        self.journal("the weights change")
        self._weights += 1

    def reset(self, *, running: bool, connector: bool) -> bool:
        """vLLM's `reset_prefix_cache`, as after a change of weights; whether vLLM reports success.

        It refuses while a transfer holds blocks: it returns False or (with `running`) raises an exception. With
        overlapping steps it also does while one computes, whose blocks it frees afterwards: no connector can help that,
        so such a step ends first.
        """
        while running and self._in_flight:
            self._take_output()
        self.journal(f"reset the prefix cache{', running requests too' * running}{', the connector too' * connector}")
        try:
            return bool(self.scheduler.reset_prefix_cache(running, connector))
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise EngineDied(f"reset_prefix_cache raises RuntimeError: {error}") from error
            self.journal("    vLLM refuses: blocks are held")
            return False

    def pause(self, paused: bool) -> None:
        """Pause requests that do not run yet, or resume them."""
        from vllm.v1.core.sched.interface import PauseState

        self.journal("pause new requests" if paused else "go on with new requests")
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW if paused else PauseState.UNPAUSED)

    def close(self) -> None:
        """Shut the connector down, scheduler half first, as the engine does."""
        if self._closed:
            return
        self._closed = True
        self._guarded("shutdown", self.scheduler.shutdown)
        for rank in self.ranks:
            with rank.acting():
                self._guarded("shutdown", rank.connector.shutdown)

    # What a scenario asks

    def ended(self, request_id: str) -> bool:
        """Whether the request's user has its final output."""
        return request_id in self.observed.finished

    def status(self, request_id: str) -> str:
        """vLLM's name for the request's state, such as WAITING_FOR_REMOTE_KVS; "" for an unknown request."""
        request = self.scheduler.requests.get(request_id)
        return str(request.status.name) if request is not None else ""

    def expected(self, request_id: str) -> list[int]:
        """The output that this request must get, whether its loads succeed or fail."""
        wanted = self._wanted[request_id]
        return continuation(self._identities[request_id], wanted.prompt, wanted.max_tokens)

    def said(self, request_id: str) -> list[int]:
        """The request's prompt, and what its user got."""
        return [*self._wanted[request_id].prompt, *self.observed.outputs[request_id]]

    @property
    def requests(self) -> list[str]:
        """All requests ever added."""
        return list(self._wanted)

    @property
    def held_blocks(self) -> int:
        """KV blocks that are not free, except the one that vLLM keeps for itself."""
        return self.settings.num_blocks - 1 - int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def wrong_published(self) -> list[str]:
        """Descriptions of blocks in the engine's prefix cache whose content does not match their hash."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        size = compat.block_sizes(self.settings)["hash_block_size"]
        owners: dict[bytes, list[tuple[str, int, Digests]]] = {}
        for request_id, wanted in self._wanted.items():
            if not self._identities[request_id].endswith(f"|{self._weights}"):
                continue
            request = compat.make_request(request_id, wanted, size)
            request.append_output_token_ids(self.observed.outputs[request_id])
            tokens = list(request.all_token_ids)
            digests = TokenChain(self._identities[request_id], tokens).digests(0, len(tokens))
            for number, block_hash in enumerate(request.block_hashes, 1):
                owners.setdefault(bytes(block_hash), []).append((request_id, number * size, digests))
        wrong = []
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None:
                continue
            candidates = owners.get(bytes(get_block_hash(block.block_hash)), [])
            group = get_group_id(block.block_hash)
            found = [self._content_fault(block.block_id, digests[:end], group) for _, end, digests in candidates]
            if found and all(found):
                request_id, end, _ = candidates[0]
                index = end // groups_of(self.settings)[group].block_size - 1
                wrong.append(f"block {block.block_id} is published as block {index} of {request_id}, {found[0]}")
        return wrong

    def _content_fault(self, block_id: int, digests: Digests, number: int) -> str:
        """Describe how `block_id` differs from a group's block that ends with these tokens; "" if it does not."""
        group, numbers = groups_of(self.settings)[number], group_of_layers(self.settings)
        if group.kind is GroupKind.STATE:
            return next(filter(None, (rank.state_fault(number, block_id, digests) for rank in self.ranks)), "")
        digests = digests[(len(digests) - 1) // group.block_size * group.block_size :]
        for rank in self.ranks:
            for layer in (name for name in rank.layers if numbers[name] == number):
                if (offset := rank.memory.first_wrong([block_id], digests, layer)) is not None:
                    found = rank.memory.describe(block_id, offset, layer, iter(rank.known.items()))
                    return f"but its slot {offset} holds ({layer}, rank {rank.rank}) {found}"
        return ""

    # The engine's insides

    def _execute(self, output: Any) -> Any:
        answers = []
        for rank in self.ranks:
            answer = rank.execute(output, self._identities)
            answer.kv_connector_output = self._delayed(rank.rank, answer.kv_connector_output)
            answers.append(answer)
        self.observed.drafted += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self.observed.accepted += sum(max(0, len(tokens) - 1) for tokens in answers[0].sampled_token_ids)
        answer = self._aggregator.aggregate(answers)
        words = answer.kv_connector_output
        if words is not None:
            self.observed.received.update(words.finished_recving or ())
            if words.invalid_block_ids:
                self.observed.invalid_blocks.append(set(words.invalid_block_ids))
        # vLLM discards what a request computed over blocks that are reported as not loaded.
        named = words.invalid_block_ids if words is not None else set()
        self.observed.wrong_slots += [slot for rank in self.ranks for slot in rank.wrong if slot.block_id not in named]
        return answer

    def _delayed(self, rank: int, words: Any) -> Any:
        """The rank's report that is due now, delayed by `report_delay` steps; at most one per step, in order."""
        late = self._late[rank]
        if words is not None and not words.is_empty():
            late.append((self.observed.steps + self._report_delay[rank], words))
        if late and late[0][0] <= self.observed.steps:
            return late.popleft()[1]
        return None

    def _taken(self, request_id: str, answer: int) -> int:
        return self.rewrite(request_id, answer) if self.rewrite is not None else answer

    def _guarded(self, where: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CollectiveNotPossible:
            raise
        except Exception as error:
            raise EngineDied(f"{where} raises {type(error).__name__}: {error}"[:600]) from error
