"""`OtherKernelsConnector`: kvpact in an engine whose attention packs keys and values as another processor's would.

Name it by `kv_connector_module_path`. One machine cannot run AMX and AVX2, so vLLM's choice is replaced: "vec16" packs
tiles of 16 tokens where this machine's own choice packs others, in blocks of the same shape and strides.
"""

from __future__ import annotations

from vllm.v1.attention.backends import cpu_attn

from kvpact.vllm import PactConnector


def other_isa(*_: object, **__: object) -> str:
    """In place of `_get_attn_isa`."""
    return "vec16"


cpu_attn._get_attn_isa = other_isa


class OtherKernelsConnector(PactConnector):
    """kvpact, unchanged."""
