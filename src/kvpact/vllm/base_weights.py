"""Identity of vLLM's weights: a name from the user, a commit of the model hub, or a digest over files.

Owns the translation from vLLM's configuration into one of these, remote code included. A branch or a tag never
identifies weights; what cannot be identified raises one ConfigError that names `model_id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from kvpact.identity.base_weights import BaseWeights, cannot_tell
from kvpact.identity.weights import DigestMemory, WeightFiles
from kvpact.vllm.compat.configuration import (
    code_references,
    draft_model,
    load_format,
    resolved_revision,
)

COMMIT = re.compile("[0-9a-f]{40}")
"""The form of a commit's name on the hub, which nothing else has."""

FROM_THE_MODEL = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "runai_streamer",
        "mistral",
        "pt",
        "bitsandbytes",
        "gguf",
        "sharded_state",
    }
)
"""Load formats that read the files of `model`; other formats may read weights from anywhere."""


def base_weights(vllm_config: Any, model_id: str | None) -> BaseWeights:
    """The weights that the engine has loaded. Looks at directories, reads no file.

    Raises ConfigError if they cannot be identified.
    """
    if model_id is not None:
        return BaseWeights((f"id:{model_id}",))
    parts = _weights_of(vllm_config.model_config, vllm_config.load_config)
    draft = draft_model(vllm_config)
    if draft is not None and str(draft[0].model) != str(vllm_config.model_config.model):
        parts += _weights_of(*draft)
    return BaseWeights(tuple(parts))


def _weights_of(model_config: Any, load_config: Any) -> list[str | WeightFiles]:
    kind = load_format(load_config)
    if kind == "dummy":
        return [f"dummy:{model_config.seed}"]
    model = str(model_config.model)
    cache = load_config.download_dir
    source = str(model_config.model_weights or model_config.model)
    if source != model:
        raise cannot_tell(f"they come from {source!r}")
    if kind not in FROM_THE_MODEL:
        raise cannot_tell(f'load_format "{kind}" may have them from anywhere')
    code = _remote_code(model_config, cache)
    place = Path(model)
    if not place.exists():
        return [f"hub:{_hub_model(model, model_config.revision, cache)}", *code]
    commit = snapshot_commit(place, cache)
    if commit is not None:
        return [f"hub:{commit}", *code]
    try:
        return [WeightFiles(place, DigestMemory.of_user(), with_code=bool(model_config.trust_remote_code)), *code]
    except OSError as error:
        raise cannot_tell(error) from None


def _hub_model(model: str, revision: str | None, cache: str | None) -> str:
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        raise cannot_tell(f"{model!r} is on ModelScope, which does not report the loaded commit")
    commit = hub_commit(model, revision, cache)
    if commit is None:
        raise cannot_tell(f"{model!r} is no file or directory, and its commit on the hub is not known")
    return f"{model}@{commit}"


def hub_commit(repository: str, revision: str | None, cache: str | None) -> str | None:
    """The commit of a hub repository that the engine serves, never a branch or a tag; None if it is not known.

    vLLM resolves it once when it starts (`ResolvedRevision` of huggingface_hub), so a branch that moves
    meanwhile changes nothing. Otherwise the hub's `cache` (None: the usual folder), from which the engine has loaded,
    has it.
    """
    revision = resolved_revision(revision, repository)
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    folder = hub_folder(repository, cache)
    try:
        commit = (folder / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir() else None


def hub_folder(repository: str, cache: str | None) -> Path:
    """The folder where the hub's cache (None: the usual one) keeps a model's repository."""
    return Path(cache or HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def snapshot_commit(directory: Path, cache: str | None) -> str | None:
    """`repository@commit` of a snapshot in the hub's cache, which vLLM serves when it is offline; else None.

    A folder elsewhere may have any name.
    """
    commit = directory.absolute().name
    snapshots = directory.absolute().parent
    repository = snapshots.parent.name.removeprefix("models--").replace("--", "/")
    if snapshots.name != "snapshots" or not COMMIT.fullmatch(commit):
        return None
    caches = (cache, None)
    found = any(snapshots.parent == hub_folder(repository, one).absolute() for one in caches)
    return f"{repository}@{commit}" if found else None


def _remote_code(model_config: Any, cache: str | None) -> list[str]:
    """The commits of the Python files that the engine runs and that do not come with the weights."""
    if not model_config.trust_remote_code:
        return []
    model = str(model_config.model)
    found = set()
    for reference in _references(code_references(model_config)):
        repository = reference.rpartition("--")[0] or model
        if repository == model and (model_config.code_revision is None or Path(model).exists()):
            continue
        commit = hub_commit(repository, model_config.code_revision, cache)
        if commit is None:
            raise cannot_tell(f"its code comes from {repository!r}, whose commit on the hub is not known")
        found.add(f"code:{repository}@{commit}")
    return sorted(found)


def _references(auto_map: Any) -> Iterator[str]:
    """The class references of a configuration: "module.Class", or "owner/name--module.Class"; tokenizers have lists."""
    if isinstance(auto_map, str):
        yield auto_map
    elif isinstance(auto_map, dict | list | tuple):
        for item in auto_map.values() if isinstance(auto_map, dict) else auto_map:
            yield from _references(item)
