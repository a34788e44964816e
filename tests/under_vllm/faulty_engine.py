"""A real engine whose kvpact fails on demand: `faulty.py` is loaded inside of it, this is the outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings, counts_in
from kvpact_testkit.demo.messages import Output

HERE = Path(__file__).parent
TIGHT_KV_BLOCKS = 24
ARGUMENTS: Mapping[str, Any] = {
    **BLOCK_BY_BLOCK,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": TIGHT_KV_BLOCKS,
    "max_model_len": 8 * BLOCK,
    "scheduler_cls": "kvpact.vllm.scheduler.KvpactScheduler",
}
"""One request runs at a time, and its prompt takes at most a third of the KV memory. Hits are what was not computed."""


@dataclass(frozen=True, slots=True)
class EndedPlan:
    """One plan of the engine's ledger, in tokens; `failed` is added up from the ranges that it names."""

    request_id: str
    state: str
    promised: int
    committed: int
    loaded: int
    used: int
    failed: int

    @property
    def adds_up(self) -> bool:
        """P7: promised >= committed >= loaded >= used, and each committed token is loaded or named as failed."""
        falls = self.promised >= self.committed >= self.loaded >= self.used >= 0
        return falls and self.loaded + self.failed == self.committed


class FaultyEngine:
    """A real engine whose kvpact fails on demand. `settings` are kvpact's, over the ones that all have."""

    def __init__(
        self, model: Path, directory: Path, *, arguments: Mapping[str, Any] = ARGUMENTS, **settings: object
    ) -> None:
        self.control = directory / "control"
        self.control.mkdir(exist_ok=True)
        self.slabs = directory / "slabs"
        (directory / "stats.json").unlink(missing_ok=True)  # of an earlier life
        transfer = kvpact_transfer_config(
            **{
                "memory": "16MiB",
                "tiers": [f"disk://{self.slabs}?capacity=128MiB"],
                "sync_load_budget": "1MiB",
                "load_deadline": "1s",
                "plan_lifetime": "1s",
                "stats_file": str(directory / "stats.json"),
                **settings,
            }
        ) | {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty"}
        environment = {
            "FAULTY_CONTROL": str(self.control),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = ForkedEngine(EngineSettings(model, transfer, arguments, environment), directory / "engine.log")

    def fail(self, *faults: str) -> None:
        """These faults are on from now on, all others off."""
        beside = self.control / "faults.new"
        beside.write_text(" ".join(faults))
        beside.replace(self.control / "faults")

    @property
    def raised(self) -> list[str]:
        """Every fault that struck so far, in order."""
        path = self.control / "raised"
        return path.read_text().split() if path.exists() else []

    @property
    def side_by_side(self) -> int:
        """How many requests one step computed at most."""
        return int((self.control / "side_by_side").read_text())

    @property
    def free_blocks(self) -> int:
        """How many of the engine's KV blocks were free at the end of its last step."""
        return int((self.control / "free_blocks").read_text())

    def count(self, name: str) -> float:
        """One of kvpact's counts, as the idle engine writes them; the file is read until it stays as it is."""
        path, before = self.control.parent / "stats.json", None
        while before != (now := counts_in(path) if path.exists() else None) or now is None:
            before = now
            time.sleep(0.3)
        return float(now[name])

    @property
    def plans(self) -> list[EndedPlan]:
        """Every plan that ended so far, in order."""
        path = self.control / "plans"
        lines = path.read_text().splitlines() if path.exists() else []
        plans = []
        for line in lines:
            request_id, state, promised, committed, loaded, used, used_again, failed = json.loads(line)
            failed_tokens = sum(count for _, count in failed) * self.process.block_size
            plans.append(EndedPlan(request_id, state, promised, committed, loaded, used + used_again, failed_tokens))
        return plans

    def ask(self, tokens: list[int], *, keep_local: bool = False, max_tokens: int = 4) -> Output:
        """One answer, the engine's own prefix cache dropped before."""
        if not keep_local:
            self.process.reset_prefix_cache()
        return self.process.generate([tokens], max_tokens=max_tokens)[0]
