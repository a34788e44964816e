"""Whose weights these are, asked of vLLM's own configuration: a hub model is its commit, never its branch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from huggingface_hub import HfApi

from hub_cache import add_commit
from kvpact.errors import ConfigError
from kvpact.vllm import identity
from kvpact.vllm.identity import hub_snapshot, weights_identity

MODEL = "kvpact-tests/tiny"
LOAD = SimpleNamespace(load_format="auto", download_dir=None)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model's files, small enough to be copied; its weights are a word."""
    files = tmp_path / "repository"
    files.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "dtype": "float32"}
    (files / "config.json").write_text(json.dumps(kind | sizes))
    (files / "model.safetensors").write_bytes(b"one")
    return files


def push(repository: Path, cache: Path, weights: bytes) -> str:
    """Other weights on the branch main; the new commit."""
    (repository / "model.safetensors").write_bytes(weights)
    return add_commit(cache, MODEL, repository)


def named(model: str, revision: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(model=model, revision=revision)


def test_h39_a_hub_model_without_a_revision_is_its_commit_also_when_the_branch_moves(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr(identity, "HF_HUB_CACHE", str(cache))
    found = []
    for weights in (b"one", b"two"):
        commit = push(repository, cache, weights)
        revision = HfApi().resolve_revision(MODEL, cache_dir=cache, local_files_only=True)
        assert str(revision) == "main", "vLLM from 0.28 on has this; as text it is the branch"
        found.append(weights_identity(named(MODEL, revision), LOAD, None))
        assert found[-1] == f"hub:{MODEL}@{commit}"
        assert weights_identity(named(MODEL), LOAD, None) == found[-1], "vLLM 0.26, or a hub that could not be asked"
        assert weights_identity(named(MODEL, commit), LOAD, None) == found[-1]
        (snapshot,) = cache.glob(f"*/snapshots/{commit}")
        assert weights_identity(named(str(snapshot)), LOAD, None) == found[-1], "what vLLM serves when it is offline"
    assert found[0] != found[1]


@pytest.mark.parametrize("directory", ["/", "/model", "/mnt/model", "/snapshots/model", "model"])
def test_a_directory_of_any_depth_is_no_snapshot_of_the_hub(directory: str) -> None:
    assert hub_snapshot(Path(directory)) is None


def test_weights_that_cannot_be_told_are_one_message_that_names_model_id(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "HF_HUB_CACHE", str(tmp_path / "empty"))
    (repository / "model.safetensors").unlink()
    for model, revision in ((MODEL, None), (MODEL, "main"), (MODEL, "v1.0"), (str(repository), None)):
        with pytest.raises(ConfigError, match="set `model_id` in kv_connector_extra_config"):
            weights_identity(named(model, revision), LOAD, None)
        assert weights_identity(named(model, revision), LOAD, "mine") == "id:mine"


def test_h39_vllm_itself_serves_the_commit_that_we_name(repository: Path, tmp_path: Path) -> None:
    """vLLM's own reading of its arguments, in a process that has only this hub cache; the branch moves in between."""
    program = (
        "from vllm import EngineArgs\n"
        "from kvpact.vllm.identity import weights_identity\n"
        f"config = EngineArgs(model={MODEL!r}, enforce_eager=True).create_engine_config()\n"
        "print(weights_identity(config.model_config, config.load_config, None))\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    for weights in (b"one", b"two"):
        commit = push(repository, tmp_path / "hub", weights)
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.splitlines()[-1:] == [f"hub:{MODEL}@{commit}"], done.stderr[-2000:]
