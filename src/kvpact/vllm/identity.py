"""What decides the content of all KV blocks of an engine under vLLM: its namespace.

Owns the translation from vLLM's configuration into `Namespace`. Floor 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from huggingface_hub.constants import HF_HUB_CACHE

from kvpact.blocks import Namespace
from kvpact.errors import ConfigError
from kvpact.weights import weights_digest

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
