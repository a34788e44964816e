"""What decides the content of a KV block under vLLM: the engine's namespace and a request's own identity.

Owns the translation from vLLM's configuration and requests into `Namespace` and `RequestIdentity`. What it does not
know it refuses: such a request is neither stored nor served. Floor 3.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3
from huggingface_hub.constants import HF_HUB_CACHE

from kvpact.background import start_background
from kvpact.blocks import MediaSpan, Namespace, RequestIdentity
from kvpact.errors import ConfigError
from kvpact.weights import adapter_digest, weights_digest

logger = logging.getLogger(__name__)

FORMAT = "1"
"""Version of a slot's content; raised when the meaning of its bytes changes."""

VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
"""Fields of a Hugging Face configuration that say where it came from, not what the model computes."""


SET_MODEL_ID = "set `model_id` in kv_connector_extra_config to a name that changes when the weights change"

COMMIT = re.compile("[0-9a-f]{40}")
"""The name that the hub gives to a commit, and to nothing else."""


def weights_identity(model_config: Any, load_config: Any, model_id: str | None) -> str:
    """The base weights by content: the user's own name, the hub's commit, or a digest over a local directory.

    Raises ConfigError if the weights cannot be told from others.
    """
    if model_id is not None:
        return f"id:{model_id}"
    if str(load_config.load_format) == "dummy":
        return f"dummy:{model_config.seed}"
    model = str(model_config.model)
    if Path(model).is_dir():
        try:
            return hub_snapshot(Path(model)) or f"digest:{weights_digest(Path(model))}"
        except FileNotFoundError as error:
            raise ConfigError(f"{error}; {SET_MODEL_ID}") from None
    commit = hub_commit(model, model_config.revision, load_config.download_dir)
    if commit is None:
        raise ConfigError(
            f"cannot tell which weights {model!r} has: it is no local directory, and its commit on the hub is not "
            f"known; {SET_MODEL_ID}"
        )
    return f"hub:{model}@{commit}"


def hub_commit(model: str, revision: str | None, cache: str | None) -> str | None:
    """The commit of a hub repository that the engine serves, never a branch or a tag; None if it is not known.

    vLLM resolves it once when it starts (0.28 and later, `ResolvedRevision` of huggingface_hub), so a branch that moves
    meanwhile changes nothing. Else the hub's `cache` tells (None: the usual folder), from which the engine has loaded.
    """
    resolved = getattr(revision, "resolved", revision)
    if resolved is not None and COMMIT.fullmatch(resolved):
        return str(resolved)
    repository = Path(cache or HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        return None
    return commit if COMMIT.fullmatch(commit) and (repository / "snapshots" / commit).is_dir() else None


def hub_snapshot(directory: Path) -> str | None:
    """What `weights_identity` calls a snapshot in the hub's cache, which vLLM serves when it is offline; else None.

    The folder is named after the commit: `models--<organisation>--<name>/snapshots/<commit>`.
    """
    commit, folder = directory.absolute().name, directory.absolute().parent
    repository = folder.parent.name
    if folder.name != "snapshots" or not repository.startswith("models--") or not COMMIT.fullmatch(commit):
        return None
    return f"hub:{'/'.join(repository.split('--')[1:])}@{commit}"


def architecture_digest(hf_config: Any) -> str:
    """Digest over a model's configuration; equal for equal architectures."""
    config = {key: value for key, value in hf_config.to_dict().items() if key not in VOLATILE_CONFIG}
    return blake3(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:32]


def engine_namespace(vllm_config: Any, workers: Mapping[str, str], model_id: str | None) -> Namespace:
    """Everything two engines must agree on to share KV bytes; `workers` is what these say of all ranks, by name."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return Namespace(
        {
            "engine": "vllm",
            "format": FORMAT,
            "weights": weights_identity(model, vllm_config.load_config, model_id),
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "quantization": str(model.quantization),
            "block_size": str(cache.block_size),
            "tensor_parallel": str(parallel.tensor_parallel_size),
            "pipeline_parallel": str(parallel.pipeline_parallel_size),
            **workers,
        }
    )


class AdapterDigests:
    """Content digests of LoRA adapters, computed once each on a thread of their own; unknown until then."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], str | None] = {}

    def find(self, lora_request: Any) -> str | None:
        """The adapter's digest, or None while it is not known (or can never be: its files are not here)."""
        if lora_request.load_inplace:
            return None  # the weights behind this id may change at any time
        name = (int(lora_request.lora_int_id), str(lora_request.lora_path))
        if name not in self._digests:
            self._digests[name] = None
            start_background("kvpact-adapter", partial(self._compute, name))
        return self._digests[name]

    def _compute(self, name: tuple[int, str]) -> None:
        try:
            self._digests[name] = adapter_digest(Path(name[1]))
        except OSError as error:
            logger.warning("kvpact: requests with the adapter at %s are not cached: %s", name[1], error)


def request_identity(request: Any, adapters: AdapterDigests, block_size: int) -> RequestIdentity | None:
    """What a vLLM request brings besides its tokens; None if any of it is unknown. `block_size` in tokens."""
    if request.pooling_params is not None:
        return None
    adapter = ""
    if request.lora_request is not None:
        found = adapters.find(request.lora_request)
        if found is None:
            return None
        adapter = found
    media = []
    for feature in request.mm_features:
        if not feature.identifier:
            return None
        place = feature.mm_position
        media.append(MediaSpan(place.offset, place.length, f"{feature.modality}:{feature.identifier}"))
    embeddings = {}
    if request.prompt_embeds is not None:
        embeddings = _embedding_digests(request.prompt_embeds, block_size)
    return RequestIdentity(adapter, request.cache_salt or "", tuple(media), embeddings)


def _embedding_digests(rows: Any, block_size: int) -> dict[int, bytes]:
    """Per block, a digest over the bytes of its rows; `rows` is a tensor [tokens, hidden]."""
    import torch

    digests = {}
    for block in range(-(-len(rows) // block_size)):
        part = rows[block * block_size : (block + 1) * block_size].detach().cpu().contiguous()
        digests[block] = blake3(part.view(torch.uint8).numpy().tobytes()).digest()
    return digests
