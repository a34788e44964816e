"""What keeps the tiny model company: adapters, a draft model, and a model that sees, all with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvpact_testkit.demo.model import TINY_SHAPE

RANK = 8
"""Of adapters."""

IMAGE_SIDE, IMAGE_TOKENS = 64, 16
"""Pixels of an image's side, and the positions that it takes in a prompt."""


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter on queries, keys and values of the tiny model."""
    directory.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    size, heads = TINY_SHAPE.hidden, TINY_SHAPE.heads * TINY_SHAPE.head_dim
    weights = {}
    for layer in range(TINY_SHAPE.layers):
        for module in ("q_proj", "k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, size, generator=draw) * 0.1
            weights[f"{name}.lora_B.weight"] = torch.randn(heads, RANK, generator=draw) * 0.1
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def make_draft(directory: Path, model: Path, seed: int) -> Path:
    """An EAGLE draft model for `model`: that one's first layer, behind a random projection."""
    directory.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    (file,) = model.glob("*.safetensors")
    weights = {
        name.removeprefix("model."): weight.clone()
        for name, weight in load_file(str(file)).items()
        if name.startswith("model.layers.0.") and not name.endswith("input_layernorm.weight")
    }
    draw = torch.Generator().manual_seed(seed)
    size = TINY_SHAPE.hidden
    weights["fc.weight"] = (torch.randn(size, 2 * size, generator=draw) * 0.06).to(torch.bfloat16)
    save_file(weights, str(directory / "model.safetensors"))
    return directory


def make_seeing_model(directory: Path, tokenizer: Path) -> Path:
    """An Idefics 3 (a vision transformer before a Llama) with its processor; nothing is downloaded."""
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    marks += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    reader = AutoTokenizer.from_pretrained(tokenizer)
    reader.add_special_tokens({"additional_special_tokens": marks})
    pixels = {"longest_edge": IMAGE_SIDE}
    images = Idefics3ImageProcessorPil(size=pixels, max_image_size=pixels, do_image_splitting=False)
    Idefics3Processor(images, reader, image_seq_len=IMAGE_TOKENS).save_pretrained(directory)
    text = LlamaConfig(
        vocab_size=TINY_SHAPE.vocabulary + len(marks),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    sight = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIDE,
        "patch_size": 8,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config=sight,
        text_config=text.to_dict(),
        image_token_id=reader.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def picture(seed: int) -> Any:
    """An image unlike that of another seed."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 255, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    return Image.fromarray(colours)


def image_token(model: Path) -> int:
    """The token that stands for an image in a prompt."""
    return int(json.loads((model / "config.json").read_text())["image_token_id"])


def copy_elsewhere(directory: Path, target: Path) -> Path:
    """The same files at another path."""
    return Path(shutil.copytree(directory, target))
