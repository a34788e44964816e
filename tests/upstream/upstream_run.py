"""vLLM's own tests, on a tree with or without a patch: which are run, on what, and how each of them ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_source import RELEASE

from hub_cache import add_commit
from kvpact_testkit.vllm.releases import releases_folder

HERE = Path(__file__).parent

RUN_SECONDS = 1200.0
"""Seconds for one run: at most 40 s of one core, of which 10 s are imports, on a machine that may be busy."""

MODELS: Mapping[str, Mapping[str, object]] = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": 3072,
        "hidden_size": 768,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "torch_dtype": "float16",
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    }
}
"""Configurations of the models that the tests name. There are no weights and no tokenizers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of vLLM's own tests are run."""

    proof: tuple[str, ...]
    """Files of the area that the series changes."""
    soak: tuple[str, ...]
    """Further files."""
    played: tuple[str, ...]
    """Files with tests that need a GPU, for the device that is played."""
    unrunnable: Mapping[str, tuple[str, ...]]
    """Why some cannot be run here -> their names: files, tests, or tests with parameters."""

    @property
    def left_out(self) -> list[str]:
        """The names of those that cannot be run."""
        return [name for names in self.unrunnable.values() for name in names]


def choice() -> Choice:
    """From `upstream_tests.toml`."""
    table = tomllib.loads((HERE / "upstream_tests.toml").read_text(encoding="utf-8"))
    unrunnable = {group["reason"]: tuple(group["tests"]) for group in table["unrunnable"]}
    return Choice(tuple(table["proof"]), tuple(table["soak"]), tuple(table["played"]), unrunnable)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How each test of a run ended, by name."""

    by_name: Mapping[str, tuple[str, str]]

    def named(self, outcome: str) -> set[str]:
        """The tests that ended so: "passed", "failed", "skipped", "left out"."""
        return {name for name, (ended, _) in self.by_name.items() if ended == outcome}

    def of(self, files: Iterable[str]) -> Outcomes:
        """Those of these files."""
        chosen = set(files)
        return Outcomes({name: end for name, end in self.by_name.items() if name.partition("::")[0] in chosen})

    def __str__(self) -> str:
        """All that did not pass, with what was said last."""
        return "\n".join(
            f"{ended}: {name}\n{said}" for name, (ended, said) in self.by_name.items() if ended not in OF_NO_INTEREST
        )


OF_NO_INTEREST = ("passed", "left out")


def run(
    tree: Path,
    files: Iterable[str],
    unrunnable: Collection[str],
    *,
    on_played_device: bool = False,
    with_pact_tier: bool = False,
) -> Outcomes:
    """Run the test files in one process. Raises RuntimeError if pytest does not come to its end.

    A file that is named as unrunnable is not even imported.
    """
    files = [name for name in files if name not in unrunnable]
    if not files:
        return Outcomes({})
    with tempfile.TemporaryDirectory(prefix="kvpact-upstream-") as scratch:
        outcomes, order = Path(scratch, "outcomes.json"), Path(scratch, "run.json")
        orders = {
            "unrunnable": [*unrunnable],
            "outcomes": str(outcomes),
            "on_played_device": on_played_device,
            "with_pact_tier": with_pact_tier,
        }
        order.write_text(json.dumps(orders))
        command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-p", "no:valkey"]
        try:
            done = subprocess.run(
                [*command, "-q", "--tb=short", "--timeout", "300", "--continue-on-collection-errors", *files],
                cwd=tree,
                env=_environment(Path(scratch), order),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=RUN_SECONDS,
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"vLLM's tests take more than {RUN_SECONDS:.0f} s") from None
        if not outcomes.exists():
            raise RuntimeError(f"vLLM's tests cannot be started:\n{done.stdout[-4000:]}")
        return Outcomes({name: (end, said) for name, (end, said) in json.loads(outcomes.read_text()).items()})


def _environment(scratch: Path, order: Path) -> dict[str, str]:
    """No GPU, no network, one thread, and a hub with the configurations of `MODELS`."""
    hub = scratch / "hub"
    for name, config in MODELS.items():
        model = scratch / name.replace("/", "--")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        add_commit(hub, name, model)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "KVPACT_UPSTREAM_RUN": str(order),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        # An inspection of model classes, kept for each release: without it the first run takes half a minute more.
        "VLLM_CACHE_ROOT": str(releases_folder() / f"{RELEASE}-cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }
