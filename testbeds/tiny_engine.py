"""What real vLLM engines on a tiny model are asked and configured with, in tests and benchmarks alike."""

from __future__ import annotations

import random
from typing import Any

from kvpact.config import load_config
from kvpact_testkit.demo.model import TINY_SHAPE

BLOCK = 128
"""Tokens in a block of the CPU engine."""

TOKENIZER_TEXT = "A prompt prefix is never computed twice: it is promised, committed, loaded and used.\n" * 50


def prompt(seed: int, blocks: int, tail: int = 17) -> list[int]:
    """A prompt of `blocks` full blocks and `tail` more tokens; different seeds differ from the first token on."""
    source = random.Random(seed)
    return [source.randrange(1, TINY_SHAPE.vocabulary) for _ in range(blocks * BLOCK + tail)]


def kvpact_transfer_config(**settings: object) -> dict[str, Any]:
    """The `kv_transfer_config` that turns kvpact on, with `settings` as its configuration.

    A tiny model on a busy machine may compute faster than it loads, so by default everything is loaded.
    """
    return load_config({"recompute_if_faster": False, **settings}, {}).kv_transfer_config()
