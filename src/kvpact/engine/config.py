"""The configuration of an embedded engine: sizes, groups and policies. Owns no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpact.contract import num_blocks_for
from kvpact.errors import ConfigError
from kvpact.identity.keys import RequestIdentity


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that keep the same tokens: all of them, or those of the last `sliding_window` tokens, the reader's
    included."""

    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 2:
            raise ConfigError(f"a sliding window spans at least 2 tokens, not {self.sliding_window}")

    def first_live_token(self, position: int) -> int:
        """The first token that the query at `position`, or any later one, still reads."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes are in tokens and blocks. `num_blocks` includes the null block, which no request gets.

    `oracle` decides what each step checks: "full" all tokens of all scheduled requests; "incremental" all tokens of
    requests that start, resume or received external tokens, of other requests what the previous step wrote, and all
    tokens of a request again when it finishes. With `on_violation` "record" the engine continues with wrong outputs, as
    a real engine would.
    """

    num_blocks: int = 256
    block_size: int = 16
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    num_ranks: int = 1
    num_layers: int = 1
    max_model_len: int = 1024
    max_running: int = 64
    max_tokens_per_step: int = 512
    chunked_prefill: bool = True
    prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_adapters: int | None = None
    zero_new_blocks: bool = False
    oracle: Literal["full", "incremental"] = "full"
    on_violation: Literal["raise", "record"] = "raise"
    hash_seed: bytes = b""
    """Changes all of the engine's block hashes, as a random process seed would (H25)."""

    def __post_init__(self) -> None:
        sizes = (self.num_blocks - 1, self.block_size, len(self.groups), self.num_ranks, self.num_layers)
        if min(*sizes, self.max_running, self.max_tokens_per_step, self.max_model_len) < 1:
            raise ConfigError(f"an engine needs sizes of at least 1 and 2 blocks, not {self}")
        if not self.chunked_prefill and self.max_tokens_per_step < self.max_model_len:
            raise ConfigError("without chunked prefill max_tokens_per_step must be at least max_model_len")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer on one rank: one digest of 8 bytes a token."""
        return self.block_size * 8

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request, in one group."""
        return num_blocks_for(self.max_model_len, self.block_size)


NO_EXTRAS = RequestIdentity()
"""The identity of a plain request: no adapter, no salt, no media."""
