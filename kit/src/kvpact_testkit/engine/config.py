"""The configuration of an embedded engine: sizes, groups and policies. Owns no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

from kvpact.errors import ConfigError
from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact.identity.keys import RequestIdentity


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes are in tokens and blocks. `num_blocks` includes the null block, which no request gets.

    `max_tokens_per_step` is what a step may compute. What hits in `before_update_states` spared of it is given back to
    the next step, as far as the ranks can take more tokens: `max_tokens_of_ranks`, by default no more, so that nothing
    is given back (in vLLM `max_num_scheduled_tokens` and `max_num_batched_tokens`).

    Without `groups` there is one of full attention. A block of a group is a whole number of `block_size`, or a whole
    part of it; matches and settlements count in blocks of `block_size` tokens. A block of a group that `drops_last`
    is right only for one next token.

    A step that computes a request's last known token verifies up to `draft_tokens` drafts behind it, of which 60 % are
    right; they are fewer than the tokens of a block of states. The state of each is in a block of its own until then.

    `oracle` decides what each step checks: "full" all tokens of all scheduled requests; "incremental" all tokens of
    requests that start, resume or received external tokens, of other requests what the previous step wrote, and all
    tokens of a request again when it finishes. With `on_violation` "record" the engine continues with wrong outputs, as
    a real engine would.
    """

    num_blocks: int = 256
    block_size: int = 16
    groups: tuple[KVCacheGroup, ...] = ()
    num_ranks: int = 1
    num_layers: int = 1
    max_model_len: int = 1024
    max_running: int = 64
    max_tokens_per_step: int = 512
    max_tokens_of_ranks: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_adapters: int | None = None
    draft_tokens: int = 0
    zero_new_blocks: bool = False
    oracle: Literal["full", "incremental"] = "full"
    on_violation: Literal["raise", "record"] = "raise"
    hash_seed: bytes = b""
    """Changes all of the engine's block hashes, as a random process seed would (H25)."""

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (KVCacheGroup(GroupKind.FULL, max(1, self.block_size)),))
        if not self.max_tokens_of_ranks:
            object.__setattr__(self, "max_tokens_of_ranks", self.max_tokens_per_step)
        sizes = (self.num_blocks - 1, self.block_size, self.num_ranks, self.num_layers)
        if min(*sizes, self.max_running, self.max_tokens_per_step, self.max_model_len) < 1:
            raise ConfigError(f"an engine needs sizes of at least 1 and 2 blocks, not {self}")
        if self.max_tokens_of_ranks < self.max_tokens_per_step:
            raise ConfigError(
                f"max_tokens_of_ranks is {self.max_tokens_of_ranks}; it must be at least max_tokens_per_step, "
                f"{self.max_tokens_per_step}"
            )
        if not self.chunked_prefill and self.max_tokens_per_step < self.max_model_len:
            raise ConfigError("without chunked prefill max_tokens_per_step must be at least max_model_len")
        if self.draft_tokens >= min(self._state_sizes, default=self.draft_tokens + 1):
            raise ConfigError(f"{self.draft_tokens} drafts are not fewer than the tokens of a block of states")
        for group in self.groups:
            if gcd(group.block_size, self.block_size) != min(group.block_size, self.block_size):
                raise ConfigError(f"blocks of {group.block_size} tokens and of {self.block_size} do not fit each other")

    @property
    def _state_sizes(self) -> list[int]:
        return [group.block_size for group in self.groups if group.kind is GroupKind.STATE]

    @property
    def page_words(self) -> int:
        """Digests of one block in one layer on one rank, the largest group's: one a token, or one state."""
        return max(1 if group.kind is GroupKind.STATE else group.block_size for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer on one rank, the same for all groups."""
        return self.page_words * 8

    @property
    def hash_tokens(self) -> int:
        """Tokens of one of the engine's hashes: a whole part of every group's block."""
        return gcd(self.block_size, *(group.block_size for group in self.groups))

    @property
    def keeps_everything(self) -> bool:
        """Whether there is one group, of full attention, whose blocks depend on no later token."""
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL and not self.groups[0].drops_last

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens has, in all groups."""
        of_drafts = self.draft_tokens * len(self._state_sizes)
        return of_drafts + sum(-(-num_tokens // group.block_size) for group in self.groups)

    def check_fits(self, request_id: str, num_tokens: int, keep_free: int) -> None:
        """Raises ConfigError if a request of `num_tokens` tokens could never run beside `keep_free` free blocks."""
        blocks = self.blocks_for(num_tokens)
        usable = self.num_blocks - 1 - keep_free
        if num_tokens > self.max_model_len or blocks > usable:
            raise ConfigError(
                f"request {request_id} needs {num_tokens} tokens in {blocks} blocks; "
                f"{self.max_model_len} tokens and {usable} blocks are the most"
            )

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of the longest request that surely fits into so many blocks."""
        whole = lcm(*(group.block_size for group in self.groups))
        of_drafts = self.draft_tokens * len(self._state_sizes)
        tokens = max(0, num_blocks - of_drafts) * whole // sum(whole // group.block_size for group in self.groups)
        while tokens and self.blocks_for(tokens) > num_blocks:
            tokens -= 1
        return tokens


NO_EXTRAS = RequestIdentity()
"""The identity of a plain request: no adapter, no salt, no media."""
