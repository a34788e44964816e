"""vLLM's own ExampleConnector, asked when the step begins: its scheduler half never looks at the store.

The connector keeps each prompt in files. In vLLM it looks for them in the scheduler's process, which is right only if
that process sees the same disk as the workers. Here each worker looks on its own, in `before_update_states`, and the
ranks skip what all of them found. Any connector can do the same; nothing of kvpact's cache is used.

Usage: python examples/step_hook_connector.py MODEL
"""

import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


@dataclass
class StepMetadata(ExampleConnectorMetadata):
    names: list[str] = field(default_factory=list)  # of the requests, in their order


class StepExampleConnector(ExampleConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hits: dict[str, int] = {}

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        metadata = StepMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            tokens = new.prompt_token_ids or []
            if new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id] < len(tokens):
                continue  # the step computes a part of the prompt: a file holds all of it
            media = [feature.identifier for feature in new.mm_features]
            metadata.add_request(tokens, new.block_ids[0], self._block_size, is_store=True, mm_hashes=media)
            metadata.names.append(new.req_id)
        return metadata

    # Worker

    def before_update_states(self, scheduler_output: Any) -> dict[str, int]:
        """Tokens that this worker can supply, behind those that the engine has. Nothing is loaded yet."""
        metadata = scheduler_output.kv_connector_metadata
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        found = {}
        for name, prompt in zip(metadata.names, metadata.requests, strict=True):
            folder = Path(self._generate_foldername_debug(prompt.token_ids, prompt.mm_hashes))
            if folder.exists() and len(prompt.token_ids) > computed[name]:
                found[name] = len(prompt.token_ids) - computed[name]
        return found

    def external_hits_applied(self, hits: dict[str, int]) -> None:
        """What is really skipped: the minimum over ranks, at least one token of each request left out."""
        self.hits = hits

    def bind_connector_metadata(self, metadata: StepMetadata) -> None:
        """A prompt that was found is loaded, in `start_load_kv`; the others are stored."""
        requests = [
            replace(request, is_store=name not in self.hits)
            for name, request in zip(metadata.names, metadata.requests, strict=True)
        ]
        super().bind_connector_metadata(StepMetadata(requests, metadata.names))


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    with tempfile.TemporaryDirectory() as store:
        llm = LLM(
            model=sys.argv[1],
            dtype="float32",  # in 16 bits, computing one token or many may decide between two near tokens
            enforce_eager=True,
            worker_cls="kvpact.vllm.worker.KvpactWorker",
            scheduler_cls="kvpact.vllm.scheduler.pact_scheduler",  # counts what the workers found
            kv_transfer_config=KVTransferConfig(
                kv_connector="StepExampleConnector",
                kv_connector_module_path="step_hook_connector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": store},
            ),
        )
        tokens = llm.get_tokenizer().encode(Path(__file__).read_text(encoding="utf-8"))[:4000]  # one step's
        for attempt in ("computed", "found in files"):
            llm.reset_prefix_cache()
            (output,) = llm.generate(TokensPrompt(prompt_token_ids=tokens), SamplingParams(temperature=0, max_tokens=8))
            found = output.num_cached_tokens
            print(f"{attempt}: {len(tokens)} tokens, {found} not computed, answer {output.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
