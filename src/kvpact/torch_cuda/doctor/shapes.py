"""The KV memory that is measured: page sizes and layouts, given, of a model's configuration, or the usual ones.

Owns the arithmetic from a model's config.json to bytes of a page, and the view of one piece of memory as an engine's
pages; allocates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvpact.errors import ConfigError
from kvpact.units import format_size
from kvpact.worker.paged import GROUPS, PagedKV, PagedLayer, join_adjacent

LAYERS: Final = 32
"""Of the usual shapes; as Llama-3-8B."""

USUAL_PAGES: Final = (8 << 10, 64 << 10)
"""Bytes of one block in one layer: Llama-3-8B in bf16, blocks of 16 tokens, on one of eight ranks and on one alone."""

LARGE_PAGES: Final = (512 << 10, 2 << 20)

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's KV memory: `layers` pages of `page_bytes` for each block, in one of two layouts."""

    layout: str
    """LBNHC: each layer apart, vLLM's own. BLNHC: all layers of a block side by side, as "kv_layout": "blocks"."""
    page_bytes: int
    layers: int = LAYERS

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.layout}, {self.layers} layers of {format_size(self.page_bytes)}"

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self.page_bytes * self.layers

    def paged(self, address: int, num_blocks: int, owner: Any) -> PagedKV:
        """Memory from `address` on as this shape's pages; `owner`, the tensor that has it, is kept with them."""
        inside = self.layout == "BLNHC"
        layers = tuple(
            PagedLayer(
                name=f"layer.{number}",
                address=address + number * self.page_bytes * (1 if inside else num_blocks),
                num_blocks=num_blocks,
                block_stride=self.block_bytes if inside else self.page_bytes,
                chunks=1,
                chunk_stride=self.page_bytes,
                chunk_bytes=self.page_bytes,
            )
            for number in range(self.layers)
        )
        numbers = range(self.layers)
        groups = join_adjacent(layers, numbers, -(-self.layers // GROUPS))
        index = {layer.name: number for number, layer in enumerate(layers)}
        return PagedKV(layers, index, num_blocks, groups, "cuda", (owner,), (numbers,))


LAYOUTS: Final = ("LBNHC", "BLNHC")


def usual_shapes() -> tuple[Shape, ...]:
    """Both layouts of the usual pages, and large pages, which both layouts move alike."""
    both = [Shape(layout, page_bytes) for page_bytes in USUAL_PAGES for layout in LAYOUTS]
    return (*both, *(Shape("LBNHC", page_bytes, 4) for page_bytes in LARGE_PAGES))


def shapes_of(page_bytes: Sequence[int], layers: int) -> tuple[Shape, ...]:
    """Both layouts of pages of these sizes. Raises ConfigError for what is no page of KV memory."""
    for size in page_bytes:
        if size < 8 or size % 8:
            raise ConfigError(f"a page of KV memory has a multiple of 8 bytes, not {size}")
    return tuple(Shape(layout, size, layers) for size in page_bytes for layout in LAYOUTS)


def model_shapes(path: Path, block_tokens: int, ranks: int) -> tuple[Shape, ...]:
    """Both layouts of a model's KV memory on one of `ranks` ranks.

    `path` is its config.json, or the directory that has it. Raises ConfigError for a file that does not say enough.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a model's configuration: {error}") from None
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    try:
        layers = int(config["num_hidden_layers"])
        element_bytes = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
        if "kv_lora_rank" in config:  # one latent vector for all heads, on each rank
            token_bytes = (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * element_bytes
        else:
            heads = int(config["num_attention_heads"])
            head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
            token_bytes = 2 * -(-kv_heads // ranks) * head * element_bytes
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} does not give the size of KV memory ({type(error).__name__}: {error}): give --kv-page-bytes"
        ) from None
    return shapes_of([token_bytes * block_tokens], layers)
