"""The embedded engine's reference cache behind a connector under vLLM: `"cache": "kvpact_testkit.vllm.reference:make"`.

With it a connector's hooks are judged for several KV cache groups whatever kvpact's own cache does.
"""

from __future__ import annotations

from kvpact.contract import CacheSpec
from kvpact_testkit.engine.reference import ReferenceCache


def make(spec: CacheSpec) -> ReferenceCache:
    """The cache. Its loads are asynchronous: vLLM is told of one that failed."""
    return ReferenceCache(
        spec.block_size,
        spec.num_slots,
        num_ranks=spec.num_ranks,
        groups=spec.groups,
    )
