"""One rank without a model: vLLM's own connector calls around a forward pass that only reads and writes digests.

Owns a model runner's state of each request and its KV memory. vLLM's own runner mixin and its decorator of attention
layers make the connector's calls, so that their order is vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
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
from kvpact_testkit.vllm.model_groups import group_of_layers, groups_of, layers_of_worker, plan_of
from kvpact_testkit.vllm.model_memory import lay_out
from kvpact_testkit.vllm.oracle import VOCABULARY, OracleMemory, PageShape, TokenChain, WrongSlot


@dataclass(slots=True)
class RankRequest:
    """A model runner's state of a request."""

    chain: TokenChain
    num_prompt_tokens: int
    tables: list[list[int]]
    """Block ids, one table per KV cache group."""
    num_computed_tokens: int


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
            self.connector.register_kv_caches(on_device)

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
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

        self._vllm_config.compilation_config.static_forward_context = self._layers()
        self.wrong = []
        self._digests = {}
        if self.step_hook is not None and not self.mute:
            scheduler_output = self.step_hook.apply(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        with self.acting():
            if not self.mute:
                self.connector.handle_preemptions(scheduler_output.kv_connector_metadata)
            self._update_states(scheduler_output, identities)
            if not (self.mute or scheduled):
                answer = Runner.kv_connector_no_forward(scheduler_output, self._vllm_config)
                return ModelRunnerOutput([], {}, kv_connector_output=answer.kv_connector_output)
            metadata = {layer: SimpleNamespace(slot_mapping=None) for layer in self.layers}
            around = nullcontext() if self.mute else Runner.maybe_get_kv_connector_output(scheduler_output)
            with set_forward_context(metadata, self._vllm_config, slot_mapping={}), around as connector_output:
                for layer in self.layers:
                    (self._attend if self.mute or layer in self._unhooked else self._attention)(scheduled, layer)
            if self.device is not None:
                self.device.finish_computing()  # for the sampled tokens; the connector's hooks are over
            sampled = [self._sample(request_id, count) for request_id, count in scheduled.items()]
        places = {request_id: index for index, request_id in enumerate(scheduled)}
        return ModelRunnerOutput(
            list(scheduled), places, sampled_token_ids=sampled, kv_connector_output=connector_output
        )

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
            self.requests[new.req_id] = RankRequest(chain, len(new.prompt_token_ids), tables, new.num_computed_tokens)
            self.known[new.req_id] = chain
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            del request.chain.tokens[request.num_prompt_tokens + cached.num_output_tokens[index] :]
            if request_id in cached.all_token_ids:
                request.chain.tokens.extend(cached.all_token_ids[request_id][len(request.chain.tokens) :])
            # A step that is planned before the last one's output counts draft tokens as accepted; none of them is.
            request.num_computed_tokens = min(cached.num_computed_tokens[index], len(request.chain.tokens) - 1)
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.tables = [list(table) for table in new_blocks]
            elif new_blocks is not None:
                for table, added in zip(request.tables, new_blocks, strict=True):
                    table.extend(added)

    def _attend(self, scheduled: dict[str, int], layer_name: str) -> None:
        """A layer's attention: at once, or when the device's computing stream gets there."""
        if self.device is None:
            self._compute(scheduled, layer_name)
        else:
            self.device.driver.launch(partial(self._compute, scheduled, layer_name))

    def _compute(self, scheduled: dict[str, int], layer_name: str) -> None:
        """Read what the layer reads of the computed tokens, write for the tokens that are scheduled."""
        number = self._groups[layer_name]
        group = self._kinds[number]
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens
            # Draft tokens have no digest: nothing is written for them, and none of them is ever accepted.
            known = min(computed + count, len(request.chain.tokens))
            table, digests = request.tables[number], self._digests_of(request_id, known)
            if group.kind is GroupKind.STATE:
                self._advance_state(request_id, table, digests, group.block_size, layer_name)
                continue
            first = group.first_read(computed)
            self._check(request_id, table, digests[first:computed], layer_name, first)
            self.memory.write(table, computed, digests[computed:], layer_name)

    def _digests_of(self, request_id: str, known: int) -> Digests:
        """Return digests of the request's first `known` tokens; they are the same for all layers of a step."""
        digests = self._digests.get(request_id)
        if digests is None or len(digests) != known:
            digests = self._digests[request_id] = self.requests[request_id].chain.digests(0, known)
        return digests

    def _advance_state(
        self, request_id: str, table: Sequence[int], digests: Digests, size: int, layer_name: str
    ) -> None:
        """Read the state of the computed tokens and write that of the known ones, each in the block that they end."""
        computed, known = self.requests[request_id].num_computed_tokens, len(digests)
        if computed:
            where = [table[(computed - 1) // size]]
            self._check(request_id, where, digests[computed - 1 : computed], layer_name, 0)
        where = [table[(known - 1) // size]]
        self.memory.write(where, 0, digests[known - 1 :], layer_name)

    def _check(self, request_id: str, table: Sequence[int], digests: Digests, layer_name: str, start: int) -> None:
        """Note the first slot from `start` on that does not hold what it should."""
        size = self._kinds[self._groups[layer_name]].block_size
        wrong = self.memory.first_wrong(table, digests, layer_name, start)
        if wrong is not None:
            block_id = table[wrong // size]
            found = self.memory.describe(block_id, wrong % size, layer_name, iter(self.known.items()))
            self.wrong.append(WrongSlot(request_id, wrong, block_id, layer_name, self.rank, found))

    def _sample(self, request_id: str, count: int) -> list[int]:
        """The next token if this step computed the last known one; a wrong one if attention read wrong slots."""
        request = self.requests[request_id]
        if request.num_computed_tokens + count < len(request.chain.tokens):
            return []
        token = request.chain.next_token()
        if any(slot.request_id == request_id for slot in self.wrong):
            token = (token + 1) % VOCABULARY
        request.chain.tokens.append(token)
        return [token]
