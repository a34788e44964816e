"""vLLM's SimpleCPUOffloadConnector, written anew over kvpact's scheduler context; see docs/scheduler-context.md.

    PYTHONPATH=examples vllm serve MODEL --kv-transfer-config '{"kv_connector": "SimpleCPUOffload",
        "kv_connector_module_path": "simple_cpu_offload", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"num_cpu_blocks": 4096, "lazy_offload": true}}'

What vLLM's connector does with the engine's block pool, its free queue and its requests' block tables, this one does
through the context alone; and the pool of blocks in host memory has the same interface as the engine's. Files:
`host_pool` is that pool, `offloader` decides what is copied, `host_memory` copies, `connector` translates for vLLM.
"""

from simple_cpu_offload.connector import SimpleCPUOffload

__all__ = ["SimpleCPUOffload"]
