"""How engines differ from the contract: each silent exit and rewrite of stock vLLM as a switch.

Owns the names and their meaning; the scheduler reads them. The presets follow the source and the measured behaviour
of vLLM's scheduler, per release.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineQuirks:
    """All off: an engine that speaks the contract natively."""

    silent_aborts: bool = False
    """The cache is not told when a match is not used."""
    ignores_commit_answer: bool = False
    """The engine uses the number that it committed, whatever the cache returns."""
    commits_zero: bool = False
    """A match that is not used at all is committed with 0 tokens instead of aborted."""
    trusts_sync_loads: bool = False
    """A synchronous match counts as computed, and is published, when it is scheduled: before the load."""
    publishes_when_scheduled: bool = False
    """Computed blocks are published when their step is scheduled, not when it has run."""
    finishes_before_report: bool = False
    """The cache learns of a request's end before it gets the same step's worker report."""
    async_scheduling: bool = False
    """A step is scheduled before the results and reports of the previous step are applied."""
    load_failure: Literal["recompute", "fail"] = "recompute"
    """What happens to a request whose load failed."""
    truncates_at_failure: bool = False
    """Blocks that arrived after a failed block are computed again."""
    group_loads_fail_whole: bool = False
    """With several KV cache groups, or a sliding window, a failed load loses all blocks, local hits included."""
    windows_follow_loads: bool = False
    """Sliding-window groups drop blocks by the end of a load before the load has ended."""
    probes_after_failed_load: bool = False
    """A request whose load failed completely frees its blocks and is probed again (a livelock if that load fails
    too: H09)."""
    probes_unwilling_requests: bool = False
    """A request that must compute its prompt itself is probed too, and its match is dropped."""
    loads_unwilling_requests: bool = False
    """With `probes_unwilling_requests`: the match is committed in full, so the cache must check `may_load` itself."""
    drops_hit_within_tokens: int = 0
    """A hit, local and external, of at most this many tokens is dropped (sliding-window replay)."""
    local_tail_tokens: int = 0
    """An external match of at most this many tokens is committed with 0: a local partial block covers them."""
    rounds_match_to_tokens: int = 1
    """An external match is rounded down to a multiple of this after the cache promised it."""
    throttles_prefill_every: int = 0
    """In steps divisible by this number the queue's head is probed but not admitted (data-parallel throttle); 0:
    never."""
    decode_padding_tokens: int = 0
    """A request is probed but not admitted unless the budget has room for this many extra tokens (speculative
    decoding)."""
    encoder_tokens_per_step: int | None = None
    """Encoder budget of a step in tokens: a request that needs more than is left is probed but not admitted. None: no
    bound."""
    skips_over_encoder: bool = False
    """A request without encoder budget is skipped, and the requests after it are still admitted."""
    admits_only_whole_prompts: bool = False
    """A request is admitted only if there are free blocks for all its tokens, though its first chunk needs fewer."""
    keeps_free_blocks: int = 0
    """Number of blocks that must stay free after an admission (watermark)."""
    commits_async_late: bool = False
    """An asynchronous match is committed when the step's results are applied, not when the step is scheduled."""
    zeroes_after_hook: bool = False
    """New blocks are zeroed after `before_update_states`, which erases what a worker supplied there (H93)."""
    reset_refuses_loading: bool = False
    """A reset with an asynchronous load under way raises RuntimeError."""

    @classmethod
    def native(cls) -> EngineQuirks:
        """The contract as written."""
        return cls()

    @classmethod
    def vllm_0_30(cls) -> EngineQuirks:
        """vLLM 0.30: what every stock release does; requests that must not load are loaded in full."""
        return cls(
            silent_aborts=True,
            ignores_commit_answer=True,
            commits_zero=True,
            trusts_sync_loads=True,
            publishes_when_scheduled=True,
            finishes_before_report=True,
            async_scheduling=True,
            truncates_at_failure=True,
            group_loads_fail_whole=True,
            windows_follow_loads=True,
            probes_after_failed_load=True,
            probes_unwilling_requests=True,
            zeroes_after_hook=True,
            loads_unwilling_requests=True,
            admits_only_whole_prompts=True,
            reset_refuses_loading=True,
        )

    @classmethod
    def vllm_0_32(cls) -> EngineQuirks:
        """vLLM 0.32: the match of a request that must not load is dropped without telling the cache."""
        return replace(cls.vllm_0_30(), loads_unwilling_requests=False)

    @classmethod
    def vllm_0_33(cls) -> EngineQuirks:
        """vLLM 0.33: a request without encoder budget is skipped, and asynchronous loads may be committed late."""
        return replace(cls.vllm_0_32(), skips_over_encoder=True, commits_async_late=True)

    @classmethod
    def presets(cls) -> dict[str, EngineQuirks]:
        """All presets by name."""
        return {
            "native": cls.native(),
            "vllm-0.30": cls.vllm_0_30(),
            "vllm-0.32": cls.vllm_0_32(),
            "vllm-0.33": cls.vllm_0_33(),
        }
