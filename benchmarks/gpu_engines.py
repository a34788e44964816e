"""The engines that `gpu_first_token` and `gpu_gaps` compare, on a GPU or, to try the programs, on the CPU.

Owns the model and how each subject is configured. On the CPU the model is tiny and connectors copy on simulated
devices, `SimpleCPUOffloadConnector` plainly: no millisecond there is a result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.needs import find_testbeds, require_vllm
from kvpact.config import load_config
from kvpact.vllm.compat.platforms import PACT_SPEC
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.gpu import cuda_devices
from kvpact_testkit.demo.model import TINY_SHAPE, ModelShape, ensure_model
from kvpact_testkit.demo.phases import GPU_SHARE, class_arguments, settle
from kvpact_testkit.vllm.step_log import VARIABLE

find_testbeds()

SUBJECTS = ("kvpact", "OffloadingConnector", "SimpleCPUOffloadConnector")

THROUGH = "kvpact, through offloading"
"""The subject whose engine has kvpact's tiers below vLLM's own offloading."""

ONE_LAYER = ModelShape(
    layers=1, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=2048, positions=1 << 17
)
LAYERS = 32

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's compilation, but where its default is compared: it starts in seconds."""

PROVING = 70
"""Prompts before all others on a GPU: 64 saves, 64 loads and 64 loads that a step waits for are checked at first."""

FORGETS_SECONDS = 0.5


@dataclass(frozen=True)
class Bench:
    """A folder with the model; `gpu` as torch sees it."""

    folder: Path
    gpu: bool
    model: Path
    layers: int
    shape: ModelShape

    @classmethod
    def at(cls, folder: Path) -> Bench:
        """Raises ModuleNotFoundError without vLLM."""
        require_vllm()
        from tiny_engine import TOKENIZER_TEXT

        gpu = bool(cuda_devices())
        shape = ONE_LAYER if gpu else TINY_SHAPE
        model = ensure_model(folder, shape, TOKENIZER_TEXT)
        return cls(folder, gpu, model, LAYERS if gpu else shape.layers, shape)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for a token."""
        dtype = "bfloat16" if self.gpu else "float32"
        return self.shape.token_bytes(dtype) * self.layers // self.shape.layers

    def prompts(self, seed: int, number: int, tokens: int) -> list[list[int]]:
        """Prompts of random tokens, each new."""
        source = random.Random(seed)
        return [source.choices(range(16, self.shape.vocabulary), k=tokens) for _ in range(number)]

    def engine(
        self, subject: str, life: str, longest: int, kv_tokens: int, kept_tokens: int, *, compiled: bool = False,
        tiers: Sequence[str] = (),
    ) -> EngineProcess:  # fmt: skip
        """Start a subject's engine, with KV memory for `kv_tokens` and host memory for `kept_tokens`.

        `compiled` is vLLM's default compilation. The folder `life` gets its log, steps, timeline and stats.
        """
        folder = self.folder / life
        folder.mkdir()
        arguments: dict[str, Any] = class_arguments() if subject == "kvpact" else {}
        arguments |= {"max_model_len": longest, "kv_cache_memory_bytes": self.token_bytes * kv_tokens}
        arguments["scheduler_cls"] = f"kvpact_testkit.vllm.step_log.Logged{'Async' * self.gpu}Scheduler"
        environment = {VARIABLE: str(folder / "steps")}
        if not self.gpu:
            from forked_engine import ForkedEngine

            arguments |= {"dtype": "float32", "max_num_batched_tokens": 4096}
            settings = EngineSettings(
                self.model, self._transfer(subject, folder, kept_tokens, tiers), arguments, environment
            )
            engine: EngineProcess = ForkedEngine(settings, folder / "log")
            return engine
        arguments |= {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": self.layers}}
        arguments |= {
            "gpu_memory_utilization": GPU_SHARE,
            "max_num_batched_tokens": 8192,
            "enforce_eager": False,
            "cudagraph_metrics": True,
        }
        if not compiled:
            arguments["compilation_config"] = GRAPHS
        transfer = self._transfer(subject, folder, kept_tokens, tiers)
        return EngineProcess(EngineSettings(self.model, transfer, arguments, environment), folder / "log")

    def _transfer(self, subject: str, folder: Path, kept_tokens: int, tiers: Sequence[str]) -> dict[str, Any]:
        kept = self.token_bytes * kept_tokens
        if subject == "kvpact":
            said = {"memory": f"{kept}B", "recompute_if_faster": False, "pool": "engine", "tiers": list(tiers)}
            said |= {"stats_file": str(folder / "stats"), "timeline": str(folder / "timeline")}
            transfer = load_config(said, {}).kv_transfer_config()
            played = {"kv_connector": "PlayedConnector", "kv_connector_module_path": f"{KIT}.played_connector"}
            return transfer | ({} if self.gpu else played)
        extra: dict[str, Any] = {"cpu_bytes_to_use": kept}
        if subject == THROUGH:
            subject = "OffloadingConnector"
            extra |= {"spec_name": PACT_SPEC, "secondary_tiers": [{"type": "PactTier", "url": url} for url in tiers]}
        transfer = {"kv_connector": subject, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        if not self.gpu and subject == "OffloadingConnector":
            extra |= {"spec_name": f"Played{'PactTiering' * bool(tiers)}Spec", "spec_module_path": f"{KIT}.offloading"}
            extra |= {"seed": 1, "log": str(folder)}
        elif not self.gpu:
            transfer["kv_connector"] = f"Memcpy{subject}"
            transfer["kv_connector_module_path"] = f"{KIT}.simple_offloading"
        return transfer

    def warm(self, engine: EngineProcess, longest: int) -> None:
        """Have kernels loaded and copies proven before anything is timed."""
        first = self.prompts(1, PROVING if self.gpu else 2, 64 if self.gpu else 300)
        for together in (True, True, False):
            engine.generate(first, max_tokens=1, together=together)
            self.forget(engine)
        engine.generate(self.prompts(2, 1, longest), max_tokens=2)
        self.forget(engine)

    def forget(self, engine: EngineProcess) -> None:
        """Wait until all is stored, then drop the engine's own prefix cache."""
        settle(engine)
        if not engine.stats():
            time.sleep(FORGETS_SECONDS)  # a connector that does not say when it has stored all
            engine.generate(self.prompts(3, 1, 16), max_tokens=4)
        engine.reset_prefix_cache()


KIT = "kvpact_testkit.vllm"
