"""Requests of all kinds, hashed by the release of vLLM that this process imports, whose keys are found by these hashes.

`keys_by_hashes.py` prints as JSON what `play` returns.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from kvpact.identity import keys as keys_module
from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact.vllm.request_identity import RequestIdentities, VllmRequest

BLOCK, RUN = 4, 8
LORA = SimpleNamespace(max_cpu_loras=2, lora_dtype="torch.float32", enable_tower_connector_lora=False)
NAME = "acme"
"""Of an adapter, and of a tenant."""


def identities(algorithm: str, hash_block: int) -> RequestIdentities:
    """Those of an engine that hashes blocks so."""
    cache_config = SimpleNamespace(block_size=BLOCK, prefix_caching_hash_algo=algorithm)
    others = {"scheduler_config": SimpleNamespace(encoder_cache_size=64), "ec_transfer_config": None}
    made = RequestIdentities(SimpleNamespace(cache_config=cache_config, lora_config=LORA, **others))
    made.use_engine_hashes(cache_config, hash_block)
    return made


def make(tokens: list[int], hasher: Any, **fields: Any) -> Request:
    """A request of vLLM."""
    return Request("r", list(tokens), SamplingParams(max_tokens=8), None, block_hasher=hasher, **fields)


def replace_last(session: Request, tokens: list[int], hash_block: int) -> None:
    """What vLLM's scheduler does when the next chunk of a session comes: the last token made way for it."""
    session.status = RequestStatus.RUNNING
    session.num_computed_tokens = session.num_tokens - 1
    scheduler: Any = SimpleNamespace(hash_block_size=hash_block, log_stats=False, num_waiting_for_streaming_input=0)
    update = StreamingUpdate(None, tokens, 8, 0.0, SamplingParams(max_tokens=8))
    Scheduler._update_request_as_session(scheduler, session, update)


def settled(view: VllmRequest) -> RequestIdentity:
    """The identity once its digests are there."""
    deadline = time.monotonic() + 60
    while (identity := view.identity) is None:
        assert time.monotonic() < deadline, "a digest never came"
        time.sleep(0.001)
    return identity


def require_keys(request: Request, engine: RequestIdentities) -> bool:
    """The request's keys are those that hashing its tokens makes; returns whether any of them were known."""
    identity = settled(VllmRequest(request, engine))
    before = len(engine.known.runs) if engine.known is not None else 0
    tokens = list(request.all_token_ids)
    found = BlockKeys(bytes(32), BLOCK, identity).extend(tokens)
    wanted = RequestIdentity(identity.adapter, identity.salt, identity.media, identity.embeddings)
    assert found == BlockKeys(bytes(32), BLOCK, wanted).extend(tokens), "another request's keys"
    after = len(engine.known.runs) if engine.known is not None else 0
    return identity.known is not None and after - before < len(tokens) // RUN


def play(folder: Path, algorithm: str = "sha256", hash_block: int = BLOCK, rounds: int = 200) -> dict[str, bool]:
    """What vLLM's hashes cannot tell apart, and whether keys were found by them."""
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = LoRARequest(NAME, 1, str(folder))
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    hasher = get_request_block_hasher(hash_block, function)
    source, known = random.Random(1), 0
    with closing(identities(algorithm, hash_block)) as engine:
        for _ in range(rounds):
            tokens = [token for _ in range(source.randrange(1, 6)) for token in source.choice([[1] * 4, [1, 1, 1, 2]])]
            match source.choice(["adapter", "embeddings", "session", *["tokens"] * 3]):
                case "adapter":
                    require_keys(make(tokens, hasher, lora_request=adapter), engine)
                case "embeddings":
                    rows = torch.full((len(tokens), 2), float(source.randrange(2)))
                    require_keys(make(tokens, hasher, prompt_embeds=rows), engine)
                case "session":
                    session = make(tokens, hasher, resumable=True)
                    replace_last(session, [2, 2], hash_block)
                    require_keys(session, engine)
                case _:
                    salt = source.choice([None, NAME, "other"])
                    known += require_keys(make(tokens, hasher, cache_salt=salt), engine)
    of_adapter, of_salt = make(tokens, hasher, lora_request=adapter), make(tokens, hasher, cache_salt=NAME)
    session = make([1] * BLOCK, hasher, resumable=True)
    before = list(session.block_hashes)
    replace_last(session, [2], hash_block)
    return {
        "an adapter is a salt": of_adapter.block_hashes == of_salt.block_hashes,
        "a token of a session is another": session.block_hashes == before,
        "found": known > rounds // 4,
    }


if __name__ == "__main__":
    vars(keys_module)["RUN_TOKENS"] = RUN
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(play(Path(scratch))))
