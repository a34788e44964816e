"""Generates a Llama with random weights and a byte-level tokenizer.

Owns the model's shape and its directory. Never downloads: the cost of serving depends on the shape, not on the weights.
Needs torch and transformers, which the engine brings.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from hashlib import blake2s
from pathlib import Path

END_OF_TEXT = "<|end|>"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape, which decides the engine's computation and the size of its KV pages."""

    layers: int = 16
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = 2048
    positions: int = 8192

    def token_bytes(self, dtype: str) -> int:
        """Keys and values of one token, in "bfloat16" or in four bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (2 if dtype == "bfloat16" else 4)


SLOW_SHAPE = ModelShape(layers=12, heads=4, kv_heads=4, head_dim=128, intermediate=512)
"""For a processor without AVX-512: fewer layers, each with as many keys and values but less to compute."""

TINY_SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=512, vocabulary=512)


def ensure_model(root: Path, shape: ModelShape, text: str) -> Path:
    """The directory under `root` with a model of `shape`, created if missing; the tokenizer is fitted to `text`.

    A directory appears complete or not at all, so several processes may ask at once and a kill leaves no half model.
    """
    name = blake2s(repr(sorted(asdict(shape).items())).encode(), digest_size=6).hexdigest()
    directory = root / f"llama-{name}"
    if not directory.exists():
        making = root / f".{directory.name}-{os.getpid()}"
        make_model(making, shape, text)
        try:
            making.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(making)
    return directory


def describe_model(directory: Path) -> str:
    """The shape of the model in `directory`, in words for a reader of the figures."""
    config = json.loads((directory / "config.json").read_text())
    return (
        f"{config['num_hidden_layers']} layers x hidden {config['hidden_size']}, "
        f"{config['num_key_value_heads']} KV heads x {config['head_dim']}, feed-forward {config['intermediate_size']}"
    )


def make_model(directory: Path, shape: ModelShape, text: str) -> None:
    """Make a model of `shape` in a new directory; the tokenizer is fitted to `text`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(directory)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        # Wide enough that attention is not flat: a wrong key or value anywhere must show in the log-probabilities.
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
