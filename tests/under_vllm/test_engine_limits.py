"""What the README says of models: those with sliding windows run, state-space layers without prefix caching are
refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from model_families import gemma_like, save_model
from transformers import MambaConfig, MambaForCausalLM

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineError, EngineSettings
from kvpact_testkit.demo.model import TINY_SHAPE

pytestmark = pytest.mark.engine

BLOCKS = 6
"""Three windows long."""


@pytest.fixture
def window_model(tiny_model: Path, tmp_path: Path) -> Path:
    return gemma_like(tmp_path / "windows", tiny_model)


@pytest.fixture
def state_space_model(tiny_model: Path, tmp_path: Path) -> Path:
    config = MambaConfig(
        vocab_size=TINY_SHAPE.vocabulary, hidden_size=64, num_hidden_layers=2, bos_token_id=0, eos_token_id=0
    )
    return save_model(MambaForCausalLM(config), tmp_path / "states", tiny_model)


GROUPED = {"cache": "kvpact_testkit.vllm.reference:make"}
"""A cache that keeps all groups, whatever kvpact's own does."""


@pytest.mark.parametrize(
    ("settings", "hybrid"),
    [
        pytest.param(GROUPED, True, marks=pytest.mark.proof),
        pytest.param({}, False, marks=pytest.mark.soak),
    ],
    ids=["by KV cache groups", "with vLLM's hybrid manager off"],
)
def test_a_model_with_sliding_windows_is_served(
    window_model: Path, tmp_path: Path, settings: dict[str, str], hybrid: bool
) -> None:
    """What is loaded gives the answer of the engine's own prefix hit, bit by bit."""
    asked = [prompt(2_100 + seed, BLOCKS) for seed in range(2)]
    arguments = {**BLOCK_BY_BLOCK, **({} if hybrid else {"disable_hybrid_kv_cache_manager": True})}
    transfer = kvpact_transfer_config(memory="64MiB", **settings)
    with ForkedEngine(EngineSettings(window_model, transfer, arguments), tmp_path / "engine.log") as engine:
        engine.wait_ready()
        cold = engine.generate(asked)
        local = engine.generate(asked)
        engine.reset_prefix_cache()
        loaded = engine.generate(asked)
        external = engine.metrics()["vllm:external_prefix_cache_hits"]
    assert [output.cached_tokens for output in cold] == [0, 0]
    for outputs in (local, loaded):
        assert [output.cached_tokens for output in outputs] == [BLOCKS * BLOCK] * 2
    assert external == 2 * BLOCKS * BLOCK
    assert all(one.same_answer(other) for one, other in zip(loaded, local, strict=True))
    assert local[0].logprobs != local[1].logprobs
    log = engine.log.read_text()
    assert "Turning off hybrid kv cache manager" not in log
    assert ("kv cache group sizes (128, 128, 128, 128)" in log) == hybrid


@pytest.mark.soak
def test_a_model_with_state_space_layers_is_refused_without_prefix_caching(
    state_space_model: Path, tmp_path: Path
) -> None:
    arguments = {**BLOCK_BY_BLOCK, "enable_prefix_caching": False}
    settings = EngineSettings(state_space_model, kvpact_transfer_config(memory="64MiB"), arguments)
    log = tmp_path / "engine.log"
    with pytest.raises(EngineError), ForkedEngine(settings, log) as engine:
        engine.wait_ready()
    assert "add --enable-prefix-caching and, before vLLM 0.33, --mamba-cache-mode align" in log.read_text()
