"""Offline inference with kvpact: the second run of this script finds the document's prefix on disk.

Usage: python examples/offline.py MODEL [TEXT FILE]
"""

import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvpact import load_config

QUESTIONS = ("What is this text about?", "Who should read it?")


def main() -> None:
    model = sys.argv[1]
    document = Path(sys.argv[2] if len(sys.argv) > 2 else __file__).read_text(encoding="utf-8")
    cache = Path("kvpact-cache").absolute()
    config = load_config({"memory": "2GiB", "tiers": [f"disk://{cache}?capacity=10GiB"]}, os.environ)
    llm = LLM(
        model=model,
        kv_transfer_config=KVTransferConfig(**config.kv_transfer_config()),
        worker_cls="kvpact.vllm.worker.KvpactWorker",
        scheduler_cls="kvpact.vllm.scheduler.pact_scheduler",
    )
    prompts = [f"{document}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.generate(prompts, SamplingParams(max_tokens=64)), strict=True):
        print(f"{question} {output.outputs[0].text.strip()}")
        print(f"  {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were not computed")


if __name__ == "__main__":
    main()
