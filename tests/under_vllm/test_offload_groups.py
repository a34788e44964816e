"""A `PactTier` below OffloadingConnector with several KV cache groups, on vLLM's scheduler: all slots are checked.

Copies are vLLM's own worker's, over a simulated device that copies late.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from vllm.v1.kv_offload.base import get_offload_group_idx

from kvpact.vllm import plugin
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from kvpact_testkit.vllm.model_groups import CHUNKED, GEMMA, STATES
from kvpact_testkit.vllm.random_ops import act

plugin.register()

SEEDS = count(1)


class Engine(VllmEngine):
    """An engine whose one tier counts the chunks that it stores and gives back, by group."""

    def __init__(self, folder: Path, kind: str, settings: EngineSettings) -> None:
        seed = next(SEEDS)
        (folder / f"log{seed}").mkdir(parents=True)
        extra = {
            "spec_name": "PlayedPactTieringSpec",
            "spec_module_path": "kvpact_testkit.vllm.offloading",
            "cpu_bytes_to_use": 1 << 22,
            "seed": seed,
            "log": str(folder / f"log{seed}"),
            "secondary_tiers": [{"type": "PactTier", "model_id": "w", "url": f"{kind}://{folder}/kv?capacity=64MiB"}],
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "engine_id": uuid4().hex,
            "kv_connector_extra_config": extra,
        }
        super().__init__(settings, transfer, lambda line: None)
        self._mistakes = folder / f"log{seed}" / "mistakes"
        self.stored = Counter[int]()
        self.given = Counter[int]()
        (tier,) = self.connector.connector_scheduler.manager.secondary_tiers
        tier.submit_store = self._counting(tier.submit_store, self.stored)
        tier.submit_load = self._counting(tier.submit_load, self.given)

    @staticmethod
    def _counting(submit: Any, counts: Counter[int]) -> Any:
        def counting(job: Any) -> None:
            counts.update(map(get_offload_group_idx, job.keys))
            submit(job)

        return counting

    def promised(self, request_id: str) -> int:
        """The most tokens that were promised to a request."""
        return max((one.answer or 0 for one in self.observed.probes if one.request_id == request_id), default=0)

    def ask(self, name: str, tokens: Sequence[int], **settings: Any) -> int:
        """Serve a prompt of which the engine itself has nothing; the tokens that it was promised."""
        self.add(name, tokens, **settings)
        assert self.finish(name)
        assert self.drain()
        assert self.forget_computed()
        return self.promised(name)

    def check(self) -> None:
        """Every slot that was read held what it should, and every user got the tokens of an engine without a cache."""
        assert self.finish()
        assert self.drain()
        assert not self.observed.wrong_slots, str(self.observed.wrong_slots[0])
        assert not self.wrong_published()
        assert not self.observed.wrong_offers
        for name, said in self.observed.outputs.items():
            assert said == self.expected(name)[: len(said)]
        assert not self._mistakes.exists()
        assert self.held_blocks == 0


WITH_STATES: Mapping[str, Any] = {"groups": STATES, "token_budget": 3 * BLOCK, "max_num_seqs": 4}
"""Each step leaves one state, at its end."""


DRAFTS: Mapping[str, Any] = {"draft_tokens": 2, "accepted_drafts": 60}
"""Of these drafts, 60 % are what the model samples."""


@contextmanager
def engine(folder: Path, kind: str = "disk", **settings: Any) -> Iterator[Engine]:
    """An engine; in the end everything that it read was right."""
    started = Engine(folder, kind, EngineSettings(**{"block_size": BLOCK, "num_blocks": 101, **settings}))
    try:
        yield started
        started.check()
    finally:
        started.close()


@dataclass(frozen=True)
class Case:
    """A model, and what becomes of a prompt of eight blocks and seven tokens: chunks by group, of blocks of 16."""

    settings: Mapping[str, Any]
    stored: Mapping[int, int]
    given: Mapping[int, int]
    """For the same prompt again: the last windows, the last chunk of 64 tokens, the state at its end."""
    shorter: Mapping[int, int]
    """Tokens of a prompt that leaves it -> tokens that are promised, of what the longer one has left."""
    matched: int = 8
    """Blocks that the same prompt is promised: with a draft module vLLM drops the last one."""


CASES = {
    "windows": Case({"groups": GEMMA}, {0: 8, 1: 3, 2: 3}, {0: 8, 1: 3, 2: 3}, {99: 0, 65: 0}),
    "chunks": Case({"groups": CHUNKED}, {0: 8, 1: 8}, {0: 8, 1: 4}, {99: 96, 65: 64}),
    "states": Case(WITH_STATES, {0: 8, 1: 3}, {0: 8, 1: 1}, {99: 96, 65: 48, 47: 0}),
    "states and drafts": Case(
        {**WITH_STATES, **DRAFTS, "draft_method": "mtp"}, {0: 8, 1: 3}, {0: 8, 1: 1}, {99: 48, 65: 48, 47: 0}, 7
    ),
    "states and n-grams": Case({**WITH_STATES, **DRAFTS}, {0: 8, 1: 3}, {0: 8, 1: 1}, {99: 96, 65: 48, 47: 0}),
}
"""Windows are 40 tokens long. Steps of 48 tokens leave states at 48, 96 and where a prompt's last match ends."""


@pytest.mark.parametrize("kind", ["disk", "dir"])
@pytest.mark.parametrize("model", CASES)
def test_each_group_stores_and_gets_back_what_it_needs(model: str, kind: str, tmp_path: Path) -> None:
    case = CASES[model]
    tokens = prompt(1, 8)
    with engine(tmp_path, kind, **case.settings) as first:
        assert first.ask("first", tokens, max_tokens=20) == 0
        assert first.stored == case.stored
    with engine(tmp_path, kind, **case.settings) as second:
        assert second.ask("again", tokens, max_tokens=20) == case.matched * BLOCK
        assert second.given == case.given
        assert not second.stored
        promised = {length: second.ask(f"of {length}", tokens[:length]) for length in case.shorter}
        assert promised == case.shorter
        assert second.ask("longer", [*tokens, *prompt(2, 3)], max_tokens=20) == case.matched * BLOCK


@pytest.mark.parametrize("model", ["windows", "chunks", "states"])
def test_engines_of_other_groups_and_the_same_bytes_share_nothing(model: str, tmp_path: Path) -> None:
    tokens = prompt(1, 8)
    for name in {"windows", "chunks", "states"} - {model}:
        with engine(tmp_path, **CASES[name].settings) as other:
            other.ask("other", tokens)
    with engine(tmp_path, **CASES[model].settings) as own:
        assert own.ask("own", tokens) == 0


@pytest.mark.parametrize("model", CASES)
def test_whatever_happens_every_group_reads_its_own_over_three_lives(model: str, tmp_path: Path) -> None:
    promised = 0
    accepted = 0
    for life in range(3):
        dice = random.Random(f"{model} {life}")
        with engine(tmp_path, overlap=bool(life % 2), **CASES[model].settings) as started:
            for _ in range(40):
                act(started, dice.randrange(1, 2**32))
            started.pause(False)
            assert started.finish()
            promised += sum(started.promised(name) for name in started.requests)
            accepted += started.observed.accepted
    assert promised >= 10 * BLOCK
    assert accepted >= (30 if "draft_tokens" in CASES[model].settings else 0)
