"""A real engine whose kvpact fails on demand: `faulty.py` is loaded inside of it, this is the outside."""

from __future__ import annotations

import os
from pathlib import Path

from engines import BLOCK_BY_BLOCK, kvpact_transfer_config
from kvpact.demo.engine import EngineProcess, EngineSettings, Output

HERE = Path(__file__).parent


class FaultyEngine:
    """A real engine whose kvpact fails on demand."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.control = directory / "control"
        self.control.mkdir()
        self.slabs = directory / "slabs"
        transfer = kvpact_transfer_config(
            memory="64MiB",
            tiers=[f"disk://{self.slabs}?capacity=128MiB"],
            sync_load_limit="1MiB",
            load_deadline="1s",
            plan_lifetime="1s",
            stats_file=str(directory / "stats.json"),
        ) | {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty"}
        environment = {
            "FAULTY_CONTROL": str(self.control),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        settings = EngineSettings(model, transfer, BLOCK_BY_BLOCK, environment)
        self.process = EngineProcess(settings, directory / "engine.log")

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

    def ask(self, tokens: list[int], *, keep_local: bool = False) -> Output:
        """One answer, the engine's own prefix cache dropped before."""
        if not keep_local:
            self.process.reset_prefix_cache()
        return self.process.generate([tokens])[0]
