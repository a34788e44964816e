"""How engines differ in keeping the pact: each silent exit and rewrite of stock vLLM as a switch.

Owns the names and what they mean; the scheduler reads them. The presets follow vLLM's scheduler as read and measured
per release.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineQuirks:
    """All off: an engine that speaks the contract natively."""

    silent_aborts: bool = False
    """A match that is not used is dropped without a word to the cache."""
    ignores_commit_answer: bool = False
    """The engine counts on the number that it committed, whatever the cache returns."""
    commits_zero: bool = False
    """A match of which nothing is taken is committed with 0 tokens instead of aborted."""
    trusts_sync_loads: bool = False
    """A synchronous match counts as computed, and is published, when it is scheduled: before the load."""
    publishes_when_scheduled: bool = False
    """Computed blocks are published when their step is scheduled, not when it is done."""
    finishes_before_report: bool = False
    """A request's end is told to the cache before the same step's worker report."""
    async_scheduling: bool = False
    """A step is scheduled before the results and reports of the one before are taken in."""
    load_failure: Literal["recompute", "fail"] = "recompute"
    """What a failed load does to its request."""
    truncates_at_failure: bool = False
    """Blocks that arrived behind a failed one are computed again."""
    group_loads_fail_whole: bool = False
    """With several KV cache groups, or a sliding window, a failed load loses everything, local hits included."""
    windows_follow_loads: bool = False
    """Sliding-window groups drop blocks by where a load will end, before it has."""
    probes_after_failed_load: bool = False
    """A request whose load failed whole gives its blocks back and is probed again (a livelock if that fails too:
    H09)."""
    probes_unwilling_requests: bool = False
    """A request that must compute its prompt itself is probed all the same; the match is then dropped."""
    loads_unwilling_requests: bool = False
    """...and is even committed in full: the cache must look at `may_load` itself."""
    drops_hit_within_tokens: int = 0
    """A hit, local and external, of no more than so many tokens is dropped (sliding-window replay)."""
    local_tail_tokens: int = 0
    """An external match of no more than so many tokens is committed with 0: a local partial block reaches as far."""
    rounds_match_to_tokens: int = 1
    """An external match is rounded down to a multiple of this after it was given."""
    throttles_prefill_every: int = 0
    """In every so-manieth step the head of the queue is probed but not admitted (data-parallel throttle); 0: never."""
    decode_padding_tokens: int = 0
    """A request is probed but not admitted if the budget has no room for so many tokens besides (speculative
    decoding)."""
    encoder_tokens_per_step: int | None = None
    """Encoder budget of a step: a request that needs more of what is left is probed but not admitted. None: no
    bound."""
    skips_over_encoder: bool = False
    """...and the queue goes on behind it instead of stopping."""
    admits_only_whole_prompts: bool = False
    """A request is admitted only if all its tokens would find free blocks, though its first chunk needs fewer."""
    keeps_free_blocks: int = 0
    """Free blocks that an admission must leave (watermark)."""
    commits_async_late: bool = False
    """An asynchronous match is committed when the step's results are taken in, not when it is scheduled."""
    zeroes_after_hook: bool = False
    """New blocks are zeroed behind `before_update_states`, wiping what a worker supplied there (H93)."""
    reset_refuses_loading: bool = False
    """A reset with an asynchronous load under way raises RuntimeError."""

    @classmethod
    def native(cls) -> EngineQuirks:
        """The contract as written."""
        return cls()

    @classmethod
    def vllm_0_19(cls) -> EngineQuirks:
        """vLLM 0.19.1: what every stock release does, and requests that must not load are loaded in full."""
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
            reset_refuses_loading=True,
        )

    @classmethod
    def vllm_0_26(cls) -> EngineQuirks:
        """vLLM 0.26: as 0.19 here, and admission reserves room for the whole prompt."""
        return replace(cls.vllm_0_19(), admits_only_whole_prompts=True)

    @classmethod
    def vllm_0_32(cls) -> EngineQuirks:
        """vLLM 0.32: requests that must not load get their match dropped behind the cache's back."""
        return replace(cls.vllm_0_26(), loads_unwilling_requests=False)

    @classmethod
    def vllm_0_33(cls) -> EngineQuirks:
        """vLLM 0.33: a request without encoder budget is skipped over, and commits of asynchronous loads may come
        late."""
        return replace(cls.vllm_0_32(), skips_over_encoder=True, commits_async_late=True)

    @classmethod
    def presets(cls) -> dict[str, EngineQuirks]:
        """All presets by name."""
        return {
            "native": cls.native(),
            "vllm-0.19": cls.vllm_0_19(),
            "vllm-0.26": cls.vllm_0_26(),
            "vllm-0.32": cls.vllm_0_32(),
            "vllm-0.33": cls.vllm_0_33(),
        }
