"""Connectors with `before_update_states` for tests, on top of the small one of the test kit: none of it is kvpact's.

`StepConnector` finds blocks when the step begins, in each worker's own memory; its scheduler half never promises
anything. The environment variable STEP_CONTROL names a directory: the file `faults` in it holds words that change what
it does, `said` gets one line of JSON for each thing that happened. `Bystander` has no hook.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpact_testkit.vllm.simple_connector import Copy, Orders, Saved, SimpleConnector

CONTROL = Path(os.environ.get("STEP_CONTROL", "/nowhere"))


def faults() -> dict[str, str]:
    """The words that are on now, such as "claim=200"."""
    try:
        words = (CONTROL / "faults").read_text().split()
    except FileNotFoundError:
        return {}
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def say(**what: object) -> None:
    """Tell the test; one write, so that lines of several processes do not mix."""
    with (CONTROL / "said").open("a") as said:
        said.write(json.dumps(what) + "\n")


@dataclass
class StepOrders(Orders):
    """Beside what is to be copied: the full blocks that the step computes, and how many tokens there are before."""

    computes: dict[str, tuple[int, list[Copy]]] = field(default_factory=dict)


@dataclass
class SavedAndHits(Saved):
    """Beside what was saved: what each rank skipped."""

    hits: list[dict[str, int]] = field(default_factory=list)

    def aggregate(self, other: Any) -> SavedAndHits:
        """Both ranks'."""
        return SavedAndHits(super().aggregate(other).ranks, self.hits + other.hits)


class StepConnector(SimpleConnector):
    """Answers when the step begins, with what this rank holds. "claim=N": with N tokens, wherever it can."""

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """This side does not know."""
        self.asked[request.request_id] = num_computed_tokens
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """What the step computes, by key."""
        orders = super().build_connector_meta(scheduler_output)
        step = StepOrders(orders.loads, orders.saves)
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            start, keys = request.num_computed_tokens, list(self.keys(request))
            (table,) = self.tables.get_block_ids(name)
            blocks = range(start // self.block_size, min(len(keys), (start + count) // self.block_size))
            step.computes[name] = (start, [Copy(name, keys[block], table[block]) for block in blocks])
        if scheduler_output.preempted_req_ids:
            say(preempted=len(scheduler_output.preempted_req_ids))
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """The scheduler hears of the hits as it hears of saves."""
        super().update_connector_output(connector_output)
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, SavedAndHits) and any(metadata.hits):
            say(hits=[list(hits.values()) for hits in metadata.hits])

    # Worker half

    found: Mapping[str, tuple[int, list[Copy]]] = {}
    applied: Mapping[str, int] = {}

    def step_hook_bound(self) -> None:
        """The worker will ask."""
        say(bound=True)

    def before_update_states(self, scheduler_output: Any) -> Mapping[str, int]:
        """As many tokens as there are blocks held in a row."""
        on = faults()
        if "raise" in on:
            raise RuntimeError("injected")
        orders = scheduler_output.kv_connector_metadata
        assert isinstance(orders, StepOrders)
        self.found, hits = orders.computes, {}
        for name, (start, copies) in orders.computes.items():
            held = next((at for at, copy in enumerate(copies) if copy.key not in self.blocks), len(copies))
            tokens = (start // self.block_size + held) * self.block_size - start
            if held and "off" not in on:
                hits[name] = min(tokens, int(on["claim"])) if "claim" in on else tokens
                if "second_rank" in on and self._rank() == 1:
                    hits[name] = min(hits[name], int(on["second_rank"]))
        return hits

    def external_hits_applied(self, hits: Mapping[str, int]) -> None:
        """To be loaded once the state is updated."""
        self.applied = dict(hits)

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        """Every block that the hits reach into."""
        super().start_load_kv(forward_context, **kwargs)
        for name, hit in self.applied.items():
            start, copies = self.found[name]
            blocks = -(-(start + hit) // self.block_size) - start // self.block_size
            for copy in copies[:blocks]:
                for tensor, content in zip(self.layers.values(), self.blocks[copy.key], strict=True):
                    tensor[copy.block_id] = -content if "spoil" in faults() else content

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """How many tokens were really computed."""
        if layer_name == next(iter(self.layers)):
            say(computed=int(attn_metadata.num_actual_tokens), rank=self._rank())

    def build_connector_worker_meta(self) -> Any:
        """What was saved, and what was skipped."""
        saved = super().build_connector_worker_meta()
        hits, self.applied = dict(self.applied), {}
        return SavedAndHits(saved.ranks if saved is not None else {}, [hits])

    def _rank(self) -> int:
        from vllm.distributed.parallel_state import get_tp_group

        return int(get_tp_group().rank_in_group)


class Bystander(SimpleConnector):
    """A connector without the hook, which saves and never promises anything."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing."""
        self.asked[request.request_id] = num_computed_tokens
        return 0, False
