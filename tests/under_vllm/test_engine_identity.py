"""Real engines one after another on one directory: they share what the same kernels and positions made, no more.

Their weights have one name (`model_id`) and their blocks one shape, so only what the workers say keeps them apart. Two
live at once where they have nothing to do with each other, because an engine takes longer to start than to answer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.model import TINY_SHAPE

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
TRAINED = 8 * BLOCK
"""Positions for which LongRoPE takes its short table."""

BLOCKS = 5
ASKED = [prompt(seed, BLOCKS) for seed in range(700, 704)]


@dataclass(frozen=True, slots=True)
class Life:
    """What one engine answered."""

    asked: list[Output]
    """To `ASKED`, right after the start."""
    computed: list[Output]
    """To `ASKED` again, under a tenant's salt that nobody has used, so with no cache at all."""
    log: str

    @property
    def cached_tokens(self) -> list[int]:
        """What each answer reused."""
        return [output.cached_tokens for output in self.asked]

    @property
    def is_right(self) -> bool:
        """Whether the tokens are those without a cache."""
        assert [output.cached_tokens for output in self.computed] == [0] * len(ASKED)
        pairs = zip(self.asked, self.computed, strict=True)
        return all(output.tokens == computed.tokens for output, computed in pairs)


class Place:
    """A model and the directory in which all its engines store."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.lives: dict[str, Life] = {}

    @property
    def store(self) -> Path:
        """Of blocks."""
        return self.directory / "store"

    @contextmanager
    def live(self, name: str, max_model_len: int, *, kernels: str = "", **arguments: Any) -> Iterator[EngineProcess]:
        """An engine that starts on entry; on exit it has answered and is gone."""
        transfer = kvpact_transfer_config(
            memory="64MiB", tiers=[f"dir://{self.store}?capacity=1GiB"], model_id="one", match_at="schedule"
        )
        if kernels:
            transfer |= {"kv_connector": kernels, "kv_connector_module_path": "other_kernels"}
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        settings = EngineSettings(
            self.model,
            transfer,
            {**BLOCK_BY_BLOCK, "max_model_len": max_model_len, "kv_cache_memory_bytes": 1 << 28, **arguments},
            {"PYTHONPATH": path},
        )
        log = self.directory / f"{name}.log"
        with ForkedEngine(settings, log) as engine:
            yield engine
            engine.wait_ready()
            asked = engine.generate(ASKED, max_tokens=8)
            computed = engine.generate(ASKED, max_tokens=8, cache_salt=name)
        self.lives[name] = Life(asked, computed, log.read_text())


def longrope_model(directory: Path, tokenizer: Path) -> Path:
    """A small Phi-3 with random weights, whose two tables are far apart."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    half = TINY_SHAPE.head_dim // 2
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=TINY_SHAPE.vocabulary,
        hidden_size=TINY_SHAPE.hidden,
        intermediate_size=TINY_SHAPE.intermediate,
        num_hidden_layers=TINY_SHAPE.layers,
        num_attention_heads=TINY_SHAPE.heads,
        num_key_value_heads=TINY_SHAPE.kv_heads,
        max_position_embeddings=8 * TRAINED,
        original_max_position_embeddings=TRAINED,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * half, "long_factor": [8.0] * half},
        initializer_range=0.06,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    Phi3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def places(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Place]:
    """A plain model and one with LongRoPE, after all their engines' lives."""
    home = tmp_path_factory.mktemp("identity")
    plain = Place(tiny_model, home / "plain")
    longrope = Place(longrope_model(home / "phi", tiny_model), home / "longrope")
    with ExitStack() as lives:
        lives.enter_context(plain.live("first", 2 * TRAINED))
        lives.enter_context(longrope.live("short", TRAINED))
    with ExitStack() as lives:
        lives.enter_context(plain.live("longer", 4 * TRAINED, worker_cls="kvpact.vllm.worker.KvpactWorker"))
        lives.enter_context(longrope.live("long", 2 * TRAINED))
    with plain.live("other kernels", 2 * TRAINED, kernels="OtherKernelsConnector"):
        pass
    return plain, longrope


def test_h34_a_plain_model_restarted_with_another_max_model_len_finds_what_it_stored(
    places: tuple[Place, Place],
) -> None:
    """The second worker is kvpact's, which reads the model itself: that makes no difference either."""
    lives = places[0].lives
    assert lives["first"].cached_tokens == [0] * len(ASKED)
    assert lives["longer"].cached_tokens == [BLOCKS * BLOCK] * len(ASKED)
    assert lives["first"].is_right
    assert lives["longer"].is_right


def test_h34_a_longrope_model_restarted_across_its_limit_finds_nothing_and_answers_right(
    places: tuple[Place, Place],
) -> None:
    lives = places[1].lives
    assert "Using LongRoPE scaling factors" not in lives["short"].log
    assert "Using LongRoPE scaling factors" in lives["long"].log
    assert lives["short"].cached_tokens == lives["long"].cached_tokens == [0] * len(ASKED)
    assert lives["short"].is_right
    assert lives["long"].is_right
    pairs = zip(lives["short"].computed, lives["long"].computed, strict=True)
    assert any(short.tokens != long.tokens for short, long in pairs), "the tables make no difference to this model"


def test_h33_an_engine_whose_kernels_pack_otherwise_finds_nothing_and_answers_right(
    places: tuple[Place, Place],
) -> None:
    """Its `_get_attn_isa` is replaced, because one machine cannot run AMX and AVX2; shapes and strides are equal."""
    lives = places[0].lives
    assert lives["other kernels"].cached_tokens == [0] * len(ASKED)
    assert lives["other kernels"].is_right
