"""One rank without a model: vLLM's own connector calls around a forward pass that only reads and writes digests.

Owns a model runner's state of each request and its KV memory. vLLM's own runner mixin and its decorator of attention
layers make the connector's calls, so that their order is vLLM's. A state-space layer's block has the window of a
convolution in its first slots, one for each accepted draft it may be read behind, and the state in all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvpact.identity.groups import GroupKind
from kvpact_testkit.device.played import EachJob, OnDevice
from kvpact_testkit.engine.oracle import Digests
from kvpact_testkit.vllm.compat import (
    EngineSettings,
    acting_as,
    make_worker_connector,
    step_hook_of,
)
from kvpact_testkit.vllm.drafts import Drafter, known
from kvpact_testkit.vllm.model_groups import group_of_layers, groups_of, layers_of_worker, plan_of
from kvpact_testkit.vllm.model_memory import lay_out
from kvpact_testkit.vllm.oracle import VOCABULARY, OracleMemory, PageShape, TokenChain, WrongSlot
from kvpact_testkit.vllm.runners import RUNNERS, forward_context
from kvpact_testkit.vllm.state_layers import RunningState


@dataclass(slots=True)
class RankRequest:
    """A model runner's state of a request."""

    chain: TokenChain
    num_prompt_tokens: int
    tables: list[list[int]]
    """Block ids, one table per KV cache group."""
    num_computed_tokens: int
    state: RunningState
    guesses: list[int] = field(default_factory=list)
    """The worker's own drafts for the next step."""
    drafts: list[int] = field(default_factory=list)
    """The drafts that this step verifies."""


class OracleAttention:
    """The part of an attention backend that connectors use."""

    @staticmethod
    def get_name() -> str:
        """The backend's name, such as "FLASH_ATTN" for others."""
        return "ORACLE"


@dataclass(frozen=True, slots=True)
class OracleLayer:
    """The part of an attention layer that vLLM and connectors use."""

    kv_cache: Any

    def get_attn_backend(self) -> type[OracleAttention]:
        """Return the attention backend, like vLLM's layers."""
        return OracleAttention


class Rank:
    """One worker of the engine: a tensor-parallel rank of a pipeline stage, with that stage's layers alone."""

    def __init__(self, settings: EngineSettings, vllm_config: Any, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.layers = layers_of_worker(settings, rank)
        self._groups = group_of_layers(settings)
        self._kinds = groups_of(settings)
        self._state_size = next((one.block_size for one in self._kinds if one.kind is GroupKind.STATE), 1)
        self._drafter = Drafter(settings.draft_tokens, settings.accepted_drafts, settings.draft_method == "ngram")
        self.memory = self.new_memory()
        self.device = settings.device(rank) if settings.device is not None else None
        if self.device is not None and not self.device.checks_first:
            self.device.proof = EachJob  # no scenario's copies go unchecked
        self.requests: dict[str, RankRequest] = {}
        self._digests: dict[str, Digests] = {}
        """Request id -> digests of all tokens that the request has after the step."""
        self.known: dict[str, TokenChain] = {}
        """Every request so far, so that foreign content can be described."""
        self.wrong: list[WrongSlot] = []
        """Slots with wrong content that the step's forward pass read."""
        self.mute = False
        """The rank computes, but its connector's worker half does no work and reports nothing."""
        from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

        self._vllm_config = vllm_config
        self.connector = make_worker_connector(settings, vllm_config, rank)
        self.step_hook = step_hook_of(self.connector, vllm_config)
        self._unhooked = self.layers[len(self.layers) - settings.unhooked_layers :]
        self._attention: Callable[[dict[str, int], str], None] = maybe_transfer_kv_layer(self._attend)
        # All ranks share one configuration here; the handshake comes after the last rank is made.
        vllm_config.compilation_config.static_forward_context.update(self._layers())
        with self.acting():
            tensors = self.memory.tensors
            on_device = {name: OnDevice(tensor) if self.device else tensor for name, tensor in tensors.items()}
            runner = RUNNERS[settings.runner]
            self._runner = runner(self.connector, vllm_config, on_device, drafts=settings.draft_tokens > 0)
        self.memory.follow()

    def new_memory(self) -> OracleMemory:
        """KV memory, all zeros."""
        settings = self.settings
        if settings.model is not None:
            made = lay_out(plan_of(settings), settings.model_layout)
            return OracleMemory(made.layers, self.rank, made.allocations)
        row_bytes = 2 * settings.head_size * (1 if settings.latent else 2)
        shape = PageShape(
            settings.num_blocks,
            settings.rank_heads,
            settings.block_size,
            row_bytes,
            settings.kv_layout,
            settings.latent,
        )
        return OracleMemory.of(self.layers, shape, self.rank)

    def acting(self) -> Any:
        """Within, this process acts as this rank."""
        return acting_as(self.settings, self.rank, self.connector)

    def execute(self, scheduler_output: Any, identities: dict[str, str]) -> Any:
        """One step: a `ModelRunnerOutput`. `identities` is what besides tokens decides each request's KV content."""
        from vllm.v1.outputs import ModelRunnerOutput

        self._vllm_config.compilation_config.static_forward_context = self._layers()
        self.wrong = []
        self._digests = {}
        if self.step_hook is not None and not self.mute:
            scheduler_output = self.step_hook.apply(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        with self.acting():
            if not self.mute:
                self._runner.before_update(scheduler_output)
            for copied in scheduler_output.kv_cache_block_copies or ():
                self._on_device(partial(self.memory.copy_block, copied.src_block_id, copied.dst_block_id))
            self._update_states(scheduler_output, identities)
            if not (self.mute or scheduled):
                return ModelRunnerOutput([], {}, kv_connector_output=self._runner.no_forward(scheduler_output))
            self._move_states(scheduled)
            if self.mute:
                with forward_context(self.layers, self._vllm_config):
                    self._forward(scheduled)
            else:
                self._runner.forward(scheduler_output, self.layers, partial(self._forward, scheduled))
            if self.device is not None:
                self.device.finish_computing()  # for the sampled tokens
            sampled = [self._sample(request_id, count) for request_id, count in scheduled.items()]
            if not self.mute:
                self._runner.sampled(scheduler_output.finished_req_ids)
            self._settle_states(scheduled, [len(tokens) for tokens in sampled])
            for request_id in scheduled:
                request = self.requests[request_id]
                request.guesses = self._drafter.guess(request.chain)
            connector_output = None if self.mute else self._runner.end(scheduler_output.finished_req_ids)
        places = {request_id: index for index, request_id in enumerate(scheduled)}
        return ModelRunnerOutput(
            list(scheduled), places, sampled_token_ids=sampled, kv_connector_output=connector_output
        )

    def guesses(self, request_id: str) -> list[int]:
        """The drafts for the request's next step."""
        request = self.requests.get(request_id)
        return list(request.guesses) if request is not None else []

    def _forward(self, scheduled: dict[str, int]) -> None:
        """All layers, in order."""
        for layer in self.layers:
            (self._attend if self.mute or layer in self._unhooked else self._attention)(scheduled, layer)

    def _layers(self) -> dict[str, OracleLayer]:
        return {layer: OracleLayer(tensor) for layer, tensor in self.memory.tensors.items()}

    def _update_states(self, scheduler_output: Any, identities: dict[str, str]) -> None:
        """Take in the step's requests like `GPUModelRunner._update_states`, for tokens and block tables only."""
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            # A resumed request, which may come as a new one, has said something already.
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            chain = TokenChain(identities[new.req_id], list(tokens))
            tables = [list(table) for table in new.block_ids]
            state = RunningState(self._state_size)
            self.requests[new.req_id] = RankRequest(
                chain, len(new.prompt_token_ids), tables, new.num_computed_tokens, state
            )
            self.known[new.req_id] = chain
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            del request.chain.tokens[request.num_prompt_tokens + cached.num_output_tokens[index] :]
            if request_id in cached.all_token_ids:
                request.chain.tokens.extend(cached.all_token_ids[request_id][len(request.chain.tokens) :])
            # A step that is planned before the last one's output counts all draft tokens as accepted.
            request.num_computed_tokens = min(cached.num_computed_tokens[index], len(request.chain.tokens) - 1)
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.tables = [list(table) for table in new_blocks]
                request.state = RunningState(self._state_size)
                request.guesses = []
            elif new_blocks is not None:
                for table, added in zip(request.tables, new_blocks, strict=True):
                    table.extend(added)
        drafted = scheduler_output.scheduled_spec_decode_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            request.drafts = known(drafted.get(request_id, ()), request.guesses)

    def _attend(self, scheduled: dict[str, int], layer_name: str) -> None:
        """A layer's attention: at once, or when the device's computing stream gets there."""
        self._on_device(partial(self._compute, scheduled, layer_name))

    def _on_device(self, kernel: Callable[[], None]) -> None:
        if self.device is None:
            kernel()
        else:
            self.device.driver.launch(kernel)

    def _compute(self, scheduled: dict[str, int], layer_name: str) -> None:
        """Read what the layer reads of the computed tokens, write for the tokens and drafts that are scheduled."""
        number = self._groups[layer_name]
        group = self._kinds[number]
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens
            table, digests = request.tables[number], self._digests_of(request_id, computed + count)
            if group.kind is GroupKind.STATE:
                self._advance_state(request_id, table, digests, layer_name)
                continue
            first = group.first_read(computed)
            self._check(request_id, table, digests[first:computed], layer_name, first)
            self.memory.write(table, computed, digests[computed:], layer_name)

    def _digests_of(self, request_id: str, num_tokens: int) -> Digests:
        """Return digests of the request's first tokens and the step's drafts; they are the same for all layers."""
        digests = self._digests.get(request_id)
        if digests is None:
            request = self.requests[request_id]
            known = TokenChain(request.chain.identity, request.chain.tokens + request.drafts)
            digests = self._digests[request_id] = known.digests(0, num_tokens)
        return digests

    # States

    def _advance_state(self, request_id: str, table: Sequence[int], digests: Digests, layer_name: str) -> None:
        """Read the state of the computed tokens and write those behind the known ones and behind each draft."""
        request = self.requests[request_id]
        computed, state = request.num_computed_tokens, request.state
        assert state.column is not None
        windows, slots = self._state_slots(layer_name)
        column, behind = state.column, state.accepted - 1
        if computed:
            right = digests[computed - 1 : computed]
            self._check_state(request_id, table[column], right, layer_name, behind)
            self._check_state(request_id, table[column + behind], right.repeat(slots - windows), layer_name, windows)
        running = len(digests) - len(request.drafts)
        self.memory.write([table[column]], 0, digests[running - 1 :][:windows], layer_name)
        for place, digest in enumerate(digests[running - 1 :]):
            self.memory.write([table[column + place]], windows, digest.repeat(slots - windows), layer_name)

    def _state_slots(self, layer_name: str) -> tuple[int, int]:
        """Slots of a state's block: those of windows, and all."""
        slots = self.memory.block_size(layer_name)
        return min(1 + self.settings.draft_tokens, slots - 1), slots

    def _move_states(self, scheduled: dict[str, int]) -> None:
        """Before a forward pass, as vLLM does it."""
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            request.state.before(request.num_computed_tokens, count, partial(self._copy_state, request))

    def _settle_states(self, scheduled: dict[str, int], sampled: Sequence[int]) -> None:
        """After sampling, as vLLM does it."""
        for (request_id, count), tokens in zip(scheduled.items(), sampled, strict=True):
            request = self.requests[request_id]
            running = request.num_computed_tokens + count - len(request.drafts)
            request.state.after(running, tokens, partial(self._copy_state, request))

    def _copy_state(self, request: RankRequest, source: int, behind: int, target: int) -> None:
        for layer in self.layers:
            number = self._groups[layer]
            if self._kinds[number].kind is GroupKind.STATE:
                table, (windows, _) = request.tables[number], self._state_slots(layer)
                places = (table[source], table[source + behind], table[target])
                self._on_device(partial(self.memory.copy_state, *places, behind, windows, layer))

    def state_fault(self, group: int, block_id: int, digests: Digests) -> str:
        """Describe how a block of a group of states differs from the state after these tokens; "" if it does not."""
        for layer in self.layers:
            if self._groups[layer] != group:
                continue
            windows, slots = self._state_slots(layer)
            for slot in (0, *range(windows, slots)):
                if self.memory.first_wrong([block_id], digests[-1:], layer, slot) is not None:
                    found = self.memory.describe(block_id, slot, layer, iter(self.known.items()))
                    return f"but its slot {slot} holds ({layer}, rank {self.rank}) {found}"
        return ""

    def _check_state(self, request_id: str, block_id: int, digests: Digests, layer_name: str, slot: int) -> None:
        """Note the first slot from `slot` on of a state's block that does not hold what it should."""
        wrong = self.memory.first_wrong([block_id], digests, layer_name, slot)
        if wrong is not None:
            found = self.memory.describe(block_id, wrong, layer_name, iter(self.known.items()))
            computed = self.requests[request_id].num_computed_tokens
            self.wrong.append(WrongSlot(request_id, computed - 1, block_id, layer_name, self.rank, found))

    def _check(self, request_id: str, table: Sequence[int], digests: Digests, layer_name: str, start: int) -> None:
        """Note the first slot from `start` on that does not hold what it should."""
        size = self._kinds[self._groups[layer_name]].block_size
        wrong = self.memory.first_wrong(table, digests, layer_name, start)
        if wrong is not None:
            block_id = table[wrong // size]
            found = self.memory.describe(block_id, wrong % size, layer_name, iter(self.known.items()))
            self.wrong.append(WrongSlot(request_id, wrong, block_id, layer_name, self.rank, found))

    def _sample(self, request_id: str, count: int) -> list[int]:
        """The tokens that this step samples: all accepted drafts, and one more.

        None if it did not compute the last known token; a wrong one if attention read wrong slots.
        """
        request = self.requests[request_id]
        if request.num_computed_tokens + count - len(request.drafts) < len(request.chain.tokens):
            return []
        sampled: list[int] = []
        for draft in (*request.drafts, None):
            token = request.chain.next_token()
            if any(slot.request_id == request_id for slot in self.wrong):
                token = (token + 1) % VOCABULARY
            request.chain.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
        return sampled
