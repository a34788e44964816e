"""What workers say of their blocks, read from vLLM's own objects: equal only where the same bytes mean the same."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from transformers import Llama4Config
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvpact.identity.keys import Namespace
from kvpact.memory.arena import SegmentAddress
from kvpact.tiers.disk.superblock import Superblock
from kvpact.vllm.compat.configuration import ranks_with_same_kv
from kvpact.vllm.compat.objects import rotary_modules
from kvpact.vllm.worker_identity import facts_of_ranks, facts_of_slots, layer_pages, worker_facts
from kvpact.wire import WorkerHandshake
from vllm_played_engine import MODEL, PlayedEngine, PlayedLayer, answer, make_prompt, vllm_config

HEAD = 64
POSITIONS = 4096
"""`max_position_embeddings`: from the model's file, whatever `max_model_len` is."""

TRAINED = 1024
"""`original_max_position_embeddings`: above it LongRoPE takes its other table."""

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * (HEAD // 2),
    "long_factor": [4.0] * (HEAD // 2),
    "original_max_position_embeddings": TRAINED,
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
SECTIONS = {"mrope_section": [8, 12, 12]}
ROPES: dict[str, dict[str, Any]] = {
    "Llama 2": {"rope_theta": 10_000},
    "Llama 3": {"rope_theta": 500_000},
    "Llama 3.1": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    "Vicuna": {"rope_type": "linear", "factor": 4.0},
    "Vicuna 8": {"rope_type": "linear", "factor": 8.0},
    "InternLM": {"rope_type": "dynamic", "factor": 4.0},
    "Hunyuan": {"rope_type": "dynamic", "alpha": 4.0},
    "BERT of GTE": {"rope_type": "ntk", "factor": 4.0},
    "Qwen 2.5": {"rope_type": "yarn", **SCALED},
    "Phi 3.5": LONGROPE,
    "Qwen 2 VL": SECTIONS,
    "Qwen 3 VL": {**SECTIONS, "mrope_interleaved": True},
    "DeepSeek V3": {"rope_type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **SCALED},
    "Gemma 4": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "GLM 4": {"partial_rotary_factor": 0.5},
    "Llama 4, vision": {"rope_type": "mllama4"},
    "Ling": {"rope_type": "bailing_mrope", **SECTIONS},
}
"""Rope parameters as these models have them, less their sizes."""


@pytest.fixture(autouse=True)
def ropes_made() -> Iterator[dict[Any, Any]]:
    """vLLM's list of the rotary modules that this process has made; empty."""
    made = rotary_modules()
    before = dict(made)
    made.clear()
    yield made
    made.clear()
    made.update(before)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """vLLM's configuration of a Llama, without layers."""
    return vllm_config(tmp_path_factory.mktemp("llama"), {}, 4096, {})


def with_length(engine: VllmConfig, max_model_len: int) -> VllmConfig:
    other = copy.copy(engine)
    other.model_config = copy.copy(engine.model_config)
    other.model_config.hf_config = copy.deepcopy(engine.model_config.hf_config)
    other.model_config.max_model_len = max_model_len
    return other


def rope(engine: VllmConfig, parameters: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    """A new rotary module, and no other one in vLLM's list."""
    rotary_modules().clear()
    with set_current_vllm_config(engine):
        return get_rope(HEAD, POSITIONS, True, parameters, dtype)


def position(engine: VllmConfig, find_model: Callable[[], Any] | None = None) -> str:
    return worker_facts(engine, {}, find_model)["position"]


# Position encoding


def test_h34_longrope_says_which_of_its_tables_max_model_len_has_chosen(engine: VllmConfig) -> None:
    said = {}
    for length in (TRAINED - 1, TRAINED, TRAINED + 1, POSITIONS):
        changed = with_length(engine, length)
        module = rope(changed, LONGROPE)
        assert not hasattr(module, "cos_sin_cache")
        said[length] = position(changed)
    assert said[TRAINED - 1] == said[TRAINED] != said[TRAINED + 1] == said[POSITIONS]
    assert "use_long_rope" in said[POSITIONS], "a reader of `kvpact inspect` sees why"


@pytest.mark.parametrize("model", [model for model in ROPES if model != "Phi 3.5"])
def test_h34_any_other_rope_is_the_same_with_another_max_model_len(engine: VllmConfig, model: str) -> None:
    said = []
    for length in (512, POSITIONS):
        changed = with_length(engine, length)
        rope(changed, ROPES[model])
        said.append(worker_facts(changed, {}))
    assert said[0] == said[1]


def test_h34_the_rotary_classes_of_seventeen_models_differ_and_are_the_same_when_made_again(engine: VllmConfig) -> None:
    said: list[dict[str, str]] = []
    for _ in range(2):
        said.append({})
        for model, parameters in ROPES.items():
            rope(engine, parameters)
            said[-1][model] = position(engine)
    assert said[0] == said[1]
    assert len(set(said[0].values())) == len(ROPES) == 17


@pytest.mark.parametrize("model", ["Llama 3", "Phi 3.5", "DeepSeek V3"])
def test_h34_one_value_of_any_table_makes_it_another_one(engine: VllmConfig, model: str) -> None:
    module = rope(engine, ROPES[model])
    before = position(engine)
    for name, table in [*module.named_buffers(), ("cos_sin_q_cache", torch.zeros(2, 2))]:
        module.register_buffer(name, table.clone())
        with_it = position(engine)
        getattr(module, name)[-1, -1] += 0.5
        assert position(engine) not in (before, with_it)
        module.register_buffer(name, table)


def test_h34_a_table_that_is_cast_when_it_is_first_used_stays_the_same(engine: VllmConfig) -> None:
    module = rope(engine, ROPES["Llama 3"], torch.float32)
    before = position(engine)
    query = torch.zeros(1, HEAD, dtype=torch.bfloat16)
    module.forward_native(torch.zeros(1, dtype=torch.int64), query)
    assert module.cos_sin_cache.dtype == torch.bfloat16
    assert position(engine) == before


def test_h34_without_a_rotary_module_max_model_len_itself_counts(engine: VllmConfig) -> None:
    assert position(with_length(engine, 512)) == "max_model_len 512"
    assert position(with_length(engine, 513)) == "max_model_len 513"


def test_h34_the_model_if_it_can_be_reached_tells_more_than_vllms_list(
    engine: VllmConfig, ropes_made: dict[Any, Any]
) -> None:
    """The list has modules of other models in this process; and a model may have made its own without the list."""
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.rotary_emb = rope(engine, LONGROPE)
    alone = position(engine)
    assert position(engine, lambda: model) == alone
    with set_current_vllm_config(engine):
        get_rope(HEAD, POSITIONS, True, {"rope_theta": 7}, torch.bfloat16)
    assert len(ropes_made) == 2
    assert position(engine) != alone == position(engine, lambda: model)

    class OwnRotaryEmbedding(torch.nn.Module):
        """As models of transformers have it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.arange(32.0))

    model.layer.rotary_emb = OwnRotaryEmbedding()
    assert position(engine, lambda: model).startswith("OwnRotaryEmbedding")


def test_h34_what_loading_does_to_the_configuration_counts(engine: VllmConfig) -> None:
    """Llama 4 sets `attn_temperature_tuning` by `max_model_len`, in the worker's copy alone."""
    said = set()
    for tuned in (None, False, True):
        loaded = with_length(engine, 2048)
        if tuned is not None:
            loaded.model_config.hf_config.attn_temperature_tuning = tuned
        said.add(worker_facts(loaded, {})["architecture"])
    assert len(said) == 3


def test_h34_what_loading_does_to_a_part_of_the_model_counts(engine: VllmConfig) -> None:
    """A part gets a copy of its configuration (`VllmConfig.with_hf_config`); where that is hidden, `max_model_len`."""
    whole = with_length(engine, 2048)
    whole.model_config.hf_config = Llama4Config()
    rope(whole, ROPES["Llama 3"])
    hidden = [position(with_length(whole, length)) for length in (2048, 4096)]
    assert hidden[0] != hidden[1]

    said = set()
    for tuned in (False, True):
        model = torch.nn.Module()
        model.config = whole.model_config.hf_config
        model.language_model = torch.nn.Module()
        model.language_model.config = copy.deepcopy(model.config.text_config)
        model.language_model.config.attn_temperature_tuning = tuned
        model.rotary_emb = rope(whole, ROPES["Llama 3"])
        facts = [worker_facts(with_length(whole, length), {}, lambda: model) for length in (2048, 4096)]  # noqa: B023
        assert facts[0] == facts[1]
        said.add(facts[0]["architecture"])
    assert len(said) == 2


# Bytes inside a block


class Attention:
    """An attention layer with what vLLM's own have."""

    def __init__(self, backend: str = "CPU_ATTN", isa: str = "vec", **attributes: Any) -> None:
        self.kv_cache_dtype, self.kv_cache_torch_dtype = "auto", torch.bfloat16
        self._k_scale, self._v_scale = torch.tensor(1.0), torch.tensor(1.0)
        self._k_scale_float = self._v_scale_float = 1.0
        self.isa = isa
        self.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: backend)
        vars(self).update(attributes)


def facts_of_layers(engine: VllmConfig, layers: dict[str, Any], page: str = "a page") -> dict[str, str]:
    changed = with_length(engine, 2048)
    changed.compilation_config = copy.copy(engine.compilation_config)
    changed.compilation_config.static_forward_context = layers
    return worker_facts(changed, dict.fromkeys(layers, page))


def test_h33_whatever_lays_bytes_out_otherwise_is_another_engine(engine: VllmConfig) -> None:
    plain = facts_of_layers(engine, {"first": Attention(), "second": Attention()})
    assert facts_of_layers(engine, {"first": Attention(), "second": Attention()}) == plain
    assert plain["attention"] == "2 x CPU_ATTN vec auto"
    others = {
        "order": {"second": Attention(), "first": Attention()},
        "name": {"first": Attention(), "third": Attention()},
        "number": {"first": Attention()},
        "backend": {"first": Attention(), "second": Attention("TORCH_SDPA")},
        "backend, the other one": {"first": Attention("TORCH_SDPA"), "second": Attention()},
        "kernels": {"first": Attention(), "second": Attention(isa="amx")},
        "kv dtype": {"first": Attention(), "second": Attention(kv_cache_dtype="fp8")},
        "stored dtype": {"first": Attention(), "second": Attention(kv_cache_torch_dtype=torch.float16)},
        "k scale": {"first": Attention(), "second": Attention(_k_scale=torch.tensor(0.5))},
        "v scale": {"first": Attention(), "second": Attention(_v_scale=torch.tensor(0.5))},
        "k scale as a number": {"first": Attention(), "second": Attention(_k_scale_float=0.5)},
        "k scale of each head": {"first": Attention(), "second": Attention(_k_scale=torch.tensor([1.0, 1.0]))},
    }
    said = {name: facts_of_layers(engine, layers) for name, layers in others.items()}
    said["page"] = facts_of_layers(engine, {"first": Attention(), "second": Attention()}, "another page")
    assert len({facts["layers"] for facts in [plain, *said.values()]}) == len(others) + 2
    assert said["kernels"]["attention"] == "CPU_ATTN amx auto, CPU_ATTN vec auto"


@pytest.mark.parametrize("shape", [(64, 16, 4, 32), (2, 64, 16, 4, 32)], ids=str)
def test_h33_pages_are_told_by_shape_strides_and_dtype_whatever_the_number_of_blocks(shape: tuple[int, ...]) -> None:
    def page(num_blocks: int, *, swap: bool = False, **kind: Any) -> str:
        size = [num_blocks if axis == 64 else axis for axis in shape]
        tensor = torch.zeros(size, **kind)
        return layer_pages({"layer": tensor.transpose(-3, -2) if swap else tensor}, num_blocks)["layer"]

    assert page(64, dtype=torch.bfloat16) == page(1, dtype=torch.bfloat16) == page(33, dtype=torch.bfloat16)
    said = {page(8, dtype=dtype, swap=swap) for dtype in (torch.bfloat16, torch.float16) for swap in (False, True)}
    assert len(said) == 4
    split = torch.zeros([4 * size if size == 64 else size for size in shape], dtype=torch.bfloat16)
    assert layer_pages({"layer": split}, 64)["layer"] not in said, "an engine's kernels may have smaller blocks"


def test_h33_the_instruction_set_counts(engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [worker_facts(engine, {})["machine"]]
    for tiles in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        said.append(worker_facts(engine, {})["machine"])
    assert said[1] != said[2]
    assert said[0] in said[1:]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    assert worker_facts(engine, {})["machine"] not in said


def test_h33_ranks_count_in_their_order() -> None:
    one, other = {"attention": "CPU_ATTN vec"}, {"attention": "CPU_ATTN amx"}
    assert facts_of_ranks([one, other]) == {"attention": "CPU_ATTN vec | CPU_ATTN amx"}
    assert facts_of_ranks([other, one]) == {"attention": "CPU_ATTN amx | CPU_ATTN vec"}
    assert facts_of_ranks([one, one, other]) == {"attention": "2 x CPU_ATTN vec | CPU_ATTN amx"}
    assert facts_of_ranks([one, {}]) != facts_of_ranks([one]) != facts_of_ranks([one, one])


def test_h33_a_rank_that_shares_anothers_slots_counts_only_where_it_differs() -> None:
    address = SegmentAddress(1, 2, 3, 4096, 5, 6, "boot", "pid")
    one, other = {"attention": "CPU_MLA"}, {"attention": "AMX_MLA"}

    def facts(*ranks: dict[str, str], same_kv: int) -> dict[str, str]:
        first_of = [rank - rank % same_kv for rank in range(len(ranks))]
        places = [None if first == rank else first for rank, first in enumerate(first_of)]
        said = zip(places, ranks, strict=True)
        return facts_of_slots(
            [WorkerHandshake(rank, address, facts=own, slots_of=of) for rank, (of, own) in enumerate(said)]
        )

    assert facts(*[one] * 8, same_kv=8) == facts(one, same_kv=1) == {"attention": "CPU_MLA"}
    assert facts(one, other, same_kv=2) == facts(one, other, same_kv=1) != facts(one, one, same_kv=2)
    assert facts(one, one, other, other, same_kv=2) == {"attention": "CPU_MLA | AMX_MLA"}, "stages"


@pytest.mark.parametrize(
    ("kinds", "config", "expected"),
    [
        (["MLAAttentionSpec"], {}, 4),
        (["MLAAttentionSpec", "SlidingWindowMLASpec"], {}, 4),
        (["MLAAttentionSpec"], {"kv_tp_replicas": 4}, 4),
        (["MLAAttentionSpec"], {"kv_tp_replicas": 1}, 1),
        (["MLAAttentionSpec"], {"kv_tp_replicas": 2}, 1),
        (["MLAAttentionSpec", "FullAttentionSpec"], {}, 1),
        (["FullAttentionSpec"], {"kv_tp_replicas": 4}, 1),
        ([], {}, 1),
    ],
)
def test_ranks_have_the_same_kv_where_all_layers_are_latent_and_vllm_agrees(
    kinds: list[str], config: dict[str, int], expected: int
) -> None:
    specs = [type(kind, (), {})() for kind in kinds]
    of_layers = SimpleNamespace(kv_cache_specs={str(number): spec for number, spec in enumerate(specs)})
    engine = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=4))
    for groups in (specs, [of_layers] if specs else []):
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups], **config)
        assert ranks_with_same_kv(engine, cache) == expected


def test_h33_the_description_of_many_ranks_fits_in_a_slab_and_their_order_still_counts() -> None:
    names = ("machine", "page_layout", "attention", "layers", "architecture", "position")
    ranks = [dict.fromkeys(names, f"{rank:03} {'a fact ' * 30}") for rank in range(64)]
    fields = [facts_of_ranks(order) for order in (ranks, ranks[::-1])]
    assert fields[0] != fields[1]
    for described in fields:
        Superblock.for_capacity(Namespace({**described, "weights": "w" * 200}), 4096, 1 << 20).encode()


def test_facts_name_no_host_path_process_or_device_and_are_short(
    engine: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope(engine, ROPES["Llama 3"])
    layers = {f"model.layers.{number}.attn": Attention(isa=f"isa{number}") for number in range(40)}
    facts = facts_of_layers(engine, layers)
    text = json.dumps(facts)
    for hidden in (socket.gethostname(), str(engine.model_config.model), "/", str(os.getpid()), "cuda", "0x"):
        assert hidden not in re.sub("[0-9a-f]{32}", "", text)
    assert max(len(fact) for fact in facts.values()) < 300
    monkeypatch.setenv("HOSTNAME", "another")
    monkeypatch.chdir("/")
    moved = with_length(engine, 2048)
    moved.model_config.model = "/elsewhere/model"
    moved.model_config.hf_config.name_or_path = "/elsewhere/model"
    assert facts_of_layers(moved, layers) == facts


def test_what_cannot_be_read_is_unlike_anything_else_and_one_warning_says_so(
    engine: VllmConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model() -> Any:
        raise NotImplementedError("no model here")

    monkeypatch.setattr(logging.getLogger("kvpact"), "propagate", True)
    with caplog.at_level(logging.WARNING, "kvpact"):
        said = [worker_facts(engine, {"no such layer": "a page"}, no_model) for _ in range(2)]
    for name in ("attention", "layers", "architecture", "position"):
        assert said[0][name] != said[1][name]
        assert len({said[0][name], *said[1].values()}) == 1 + len(set(said[1].values()))
    for name in ("machine", "page_layout"):
        assert said[0][name] == said[1][name]
    assert len(caplog.records) == 2
    assert "layers (KeyError: 'no such layer')" in caplog.text
    assert "position (NotImplementedError: no model here)" in caplog.text


# Two engines on one store


def test_h33_engines_with_other_kernels_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape, strides and dtype are equal."""
    tiers = [f"dir://{tmp_path}/store?capacity=64MiB"]
    asked = make_prompt(1, 6)

    def live(backend: str) -> int:
        monkeypatch.setattr(PlayedLayer, "get_name", staticmethod(lambda: backend))
        engine = PlayedEngine(tmp_path, tiers=tiers)
        try:
            played = engine.generate(asked)
            assert played.said == answer(asked, 3)
            return played.cached_tokens
        finally:
            engine.close()

    assert [live(backend) for backend in ("A", "B", "A", "B")] == [0, 0, 96, 96]


def test_h34_engines_that_read_positions_otherwise_share_nothing(tmp_path: Path) -> None:
    tiers = [f"dir://{tmp_path}/store?capacity=64MiB"]
    asked = make_prompt(2, 6)
    assert MODEL["max_position_embeddings"] == POSITIONS

    def live(length: int) -> int:
        directory = tmp_path / "llama"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length)
        rope(VllmConfig(model_config=model), LONGROPE)
        engine = PlayedEngine(tmp_path, tiers=tiers)
        try:
            return engine.generate(asked).cached_tokens
        finally:
            engine.close()

    assert [live(length) for length in (TRAINED, POSITIONS, TRAINED, POSITIONS)] == [0, 0, 96, 96]
