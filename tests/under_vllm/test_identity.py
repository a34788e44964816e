"""Whose weights these are, asked of vLLM's own configuration: a hub model is its commit, never its branch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from huggingface_hub import HfApi
from vllm import EngineArgs
from vllm.config import LoadConfig, VllmConfig

from hub_cache import add_commit
from kvpact.errors import ConfigError
from kvpact.identity.base_weights import process_start_ns
from kvpact.identity.weights import WeightsUnknown
from kvpact.vllm import base_weights as base_weights_module
from kvpact.vllm.base_weights import base_weights, snapshot_commit
from kvpact.vllm.identity import architecture_digest, engine_namespace

MODEL = "kvpact-tests/tiny"
TOLD = "set `model_id` in kv_connector_extra_config"
NO_TENSORS = b"\2\0\0\0\0\0\0\0{}"
"""The shortest safetensors file."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model's files, small enough to be copied; its weights are a word."""
    files = tmp_path / "repository"
    files.mkdir()
    configure(files)
    (files / "model.safetensors").write_bytes(b"one")
    return files


def configure(files: Path, **fields: object) -> None:
    """Write a model's configuration, with these fields over those of a Llama."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "dtype": "float32"}
    (files / "config.json").write_text(json.dumps({**kind, **sizes, **fields}))


@pytest.fixture
def loaded_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process began long before the files of its tests were made; let it be as if each load were of now.

    Digests are remembered elsewhere than in the user's folder.
    """
    monkeypatch.setattr("kvpact.identity.base_weights.process_start_ns", time.time_ns)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(base_weights_module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def push(repository: Path, cache: Path, weights: bytes, name: str = MODEL) -> str:
    """Other weights on the branch main; the new commit."""
    (repository / "model.safetensors").write_bytes(weights)
    return add_commit(cache, name, repository)


def configured(model: object, *, load: object = None, auto_map: object = None, **fields: Any) -> Any:
    """As much of a `VllmConfig` as tells the weights, for a model that is on no disk here."""
    told: dict[str, Any] = {"revision": None, "model_weights": "", "trust_remote_code": False, "code_revision": None}
    model_config = SimpleNamespace(model=str(model), hf_config=SimpleNamespace(auto_map=auto_map), **{**told, **fields})
    return SimpleNamespace(model_config=model_config, load_config=load or LoadConfig(), speculative_config=None)


def identity(config: Any, model_id: str | None = None) -> str:
    return base_weights(config, model_id).identity()


def vllm_config(model: Path, **arguments: Any) -> VllmConfig:
    """vLLM's own, read from the files."""
    return EngineArgs(
        model=str(model), enforce_eager=True, skip_tokenizer_init=True, **arguments
    ).create_engine_config()


# The hub


def test_h39_a_hub_model_without_a_revision_is_its_commit_also_when_the_branch_moves(
    repository: Path, cache: Path
) -> None:
    found = []
    for weights in (b"one", b"two"):
        commit = push(repository, cache, weights)
        revision = HfApi().resolve_revision(MODEL, cache_dir=cache, local_files_only=True)
        assert str(revision) == "main", "as text it is the branch"
        found.append(identity(configured(MODEL, revision=revision)))
        assert found[-1] == f"hub:{MODEL}@{commit}"
        assert identity(configured(MODEL)) == found[-1], "a hub that could not be asked"
        assert identity(configured(MODEL, revision=commit)) == found[-1]
        (snapshot,) = cache.glob(f"*/snapshots/{commit}")
        assert identity(configured(snapshot)) == found[-1], "what vLLM serves when it is offline"
    assert found[0] != found[1]


def test_h39_the_commit_that_vllm_resolved_counts_when_the_branch_has_moved_since(
    repository: Path, cache: Path
) -> None:
    commit = push(repository, cache, b"one")
    revision = HfApi().resolve_revision(MODEL, cache_dir=cache, local_files_only=True)
    push(repository, cache, b"two")
    assert identity(configured(MODEL, revision=revision)) == f"hub:{MODEL}@{commit}"


def test_h39_a_commit_of_another_repository_says_nothing(repository: Path, cache: Path) -> None:
    push(repository, cache, b"other", "kvpact-tests/other")
    commit = push(repository, cache, b"one")
    revision = HfApi().resolve_revision("kvpact-tests/other", cache_dir=cache, local_files_only=True)
    assert identity(configured(MODEL, revision=revision)) == f"hub:{MODEL}@{commit}"


def test_h39_weights_from_a_download_folder_are_its_commit(repository: Path, cache: Path, tmp_path: Path) -> None:
    push(repository, cache, b"one")
    commit = push(repository, tmp_path / "downloads", b"two")
    load = LoadConfig(download_dir=str(tmp_path / "downloads"))
    assert identity(configured(MODEL, load=load)) == f"hub:{MODEL}@{commit}"


@pytest.mark.parametrize("directory", ["/", "/model", "/mnt/model", "/snapshots/model", "model"])
def test_a_directory_of_any_depth_is_no_snapshot_of_the_hub(directory: str) -> None:
    assert snapshot_commit(Path(directory), None) is None


@pytest.mark.usefixtures("loaded_now")
def test_h39_a_folder_that_is_called_like_a_snapshot_is_read(repository: Path, cache: Path, tmp_path: Path) -> None:
    commit = push(repository, cache, b"one")
    (snapshot,) = cache.glob(f"*/snapshots/{commit}")
    elsewhere = shutil.copytree(snapshot, tmp_path / "models--kvpact-tests--tiny" / "snapshots" / commit)
    assert identity(configured(snapshot)) == f"hub:{MODEL}@{commit}"
    before = identity(configured(elsewhere))
    (elsewhere / "model.safetensors").write_bytes(b"changed by hand")
    assert before.startswith("files:")
    assert identity(configured(elsewhere)) != before


@pytest.mark.proof
def test_h39_vllm_itself_serves_the_commit_that_we_name(repository: Path, tmp_path: Path) -> None:
    """vLLM's own reading of its arguments, by processes that have only this hub cache; the branch moves in between.

    They are forked from one that has loaded vLLM's modules and nothing else.
    """
    program = (
        "import os, sys\n"
        "from vllm import EngineArgs\n"
        "from kvpact.vllm.base_weights import base_weights\n"
        "for line in sys.stdin:\n"
        "    if os.fork() == 0:\n"
        f"        config = EngineArgs(model={MODEL!r}, enforce_eager=True).create_engine_config()\n"
        "        print('\\n', base_weights(config, None).identity(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    print('read', flush=True)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as vllm,
    ):
        assert vllm.stdin is not None
        assert vllm.stdout is not None
        for weights in (b"one", b"two"):
            commit = push(repository, tmp_path / "hub", weights)
            print("read", file=vllm.stdin, flush=True)
            said = [*map(str.strip, iter(vllm.stdout.readline, "read\n"))]
            assert f"hub:{MODEL}@{commit}" in said, log.read_text()[-2000:]


# What cannot be told


def no_weights(repository: Path) -> Any:
    (repository / "model.safetensors").unlink()
    return configured(repository)


CANNOT_BE_TOLD: dict[str, Callable[[Path], Any]] = {
    "unknown to the hub's cache": lambda _: configured(MODEL),
    "a branch": lambda _: configured(MODEL, revision="main"),
    "a tag": lambda _: configured(MODEL, revision="v1.0"),
    "no weights": no_weights,
    "a directory that is missing": lambda files: configured(files / "missing"),
    "another place": lambda files: configured(files, model_weights="s3://bucket/model"),
    "a loader of its own": lambda files: configured(files, load=LoadConfig(load_format="tensorizer")),
    "code of an unknown commit": lambda files: configured(
        files, trust_remote_code=True, auto_map={"AutoModel": "org/code--modeling.Model"}
    ),
}


@pytest.mark.parametrize("case", CANNOT_BE_TOLD)
def test_h39_weights_that_cannot_be_told_are_one_message_that_names_model_id(
    case: str, repository: Path, cache: Path
) -> None:
    config = CANNOT_BE_TOLD[case](repository)
    with pytest.raises(ConfigError, match=TOLD) as error:
        identity(config)
    assert "\n" not in str(error.value)
    assert identity(config, "mine") == "id:mine"


def test_h39_modelscope_is_not_the_hub(repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(repository, cache, b"one")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match=TOLD):
        identity(configured(MODEL))


def test_h39_files_that_changed_since_the_process_began_do_not_say_what_it_has_loaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert process_start_ns() < time.time_ns() - 10**8
    with pytest.raises(WeightsUnknown, match="changed after the engine began to start"):
        identity(configured(repository))


# Files


@pytest.mark.usefixtures("loaded_now")
def test_h39_a_directory_is_its_content_wherever_it_lies(repository: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(repository, tmp_path / "copy")
    found = identity(vllm_config(repository))
    assert found.startswith("files:")
    assert identity(vllm_config(copy)) == found
    (copy / "model.safetensors").write_bytes(b"two")
    assert identity(vllm_config(copy)) != found


@pytest.mark.usefixtures("loaded_now")
def test_h39_python_files_belong_to_the_weights_where_they_are_trusted(repository: Path) -> None:
    (repository / "modeling.py").write_text("scale = 1")
    both = [identity(vllm_config(repository, trust_remote_code=trusted)) for trusted in (False, True)]
    (repository / "modeling.py").write_text("scale = 2")
    after = [identity(vllm_config(repository, trust_remote_code=trusted)) for trusted in (False, True)]
    assert [one == other for one, other in zip(both, after, strict=True)] == [True, False]


@pytest.mark.usefixtures("loaded_now")
def test_h39_code_of_another_repository_is_its_commit(repository: Path, cache: Path) -> None:
    auto_map = {"AutoConfig": "configuration.Config", "AutoModel": "org/code--modeling.Model"}
    found = []
    for weights in (b"one", b"two"):
        commit = push(repository, cache, weights, "org/code")
        (repository / "model.safetensors").write_bytes(b"always the same")
        config = configured(repository, trust_remote_code=True, auto_map=auto_map)
        found.append(identity(config))
        assert found[-1].endswith(f" + code:org/code@{commit}")
        config.model_config.trust_remote_code = False
        assert "code" not in identity(config)
    assert found[0] != found[1]


@pytest.mark.usefixtures("loaded_now")
def test_h39_a_draft_models_weights_belong_to_it(repository: Path, tmp_path: Path) -> None:
    """It writes keys and values of its own layers."""
    draft = shutil.copytree(repository, tmp_path / "draft")
    found = []
    for weights in (b"one", b"two"):
        (draft / "model.safetensors").write_bytes(weights)
        config = vllm_config(repository)
        drafting: Any = SimpleNamespace(draft_model_config=vllm_config(draft).model_config)
        config.speculative_config = drafting
        found.append(identity(config))
    assert found[0] != found[1]
    assert all(one.startswith(identity(vllm_config(repository)) + " + files:") for one in found)


# What else the namespace says


def fields(config: Any) -> dict[str, str]:
    """What the scheduler's half knows, with what a worker says of the configuration."""
    return dict(engine_namespace(config, {"architecture": architecture_digest(config.model_config.hf_config)}).fields)


def differing(one: Any, other: Any) -> set[str]:
    """The fields of the namespace in which two configurations differ."""
    mine, theirs = fields(one), fields(other)
    return {name for name in mine if mine[name] != theirs[name]}


def test_h39_keys_of_blocks_do_not_depend_on_when_the_weights_are_known(repository: Path) -> None:
    config = vllm_config(repository)
    before = fields(config)
    assert "weights" not in before
    (repository / "model.safetensors").write_bytes(b"two")
    assert fields(config) == before


def test_h39_dtypes_and_quantisation_on_loading_are_told_apart(repository: Path) -> None:
    plain = vllm_config(repository, dtype="bfloat16")
    assert differing(plain, vllm_config(repository, dtype="float32")) == {"dtype"}
    assert differing(plain, vllm_config(repository, dtype="bfloat16", revision="main", seed=3)) == set()
    one = vllm_config(repository, dtype="bfloat16", quantization="fp8_per_tensor")
    assert differing(plain, one) == {"quantization"}
    kinds = [{"linear": "fp8_per_tensor"}, {"linear": "fp8_per_tensor", "ignore": ["lm_head"]}]
    online = [
        vllm_config(repository, dtype="bfloat16", quantization="online", quantization_config=kind) for kind in kinds
    ]
    assert differing(*online) == {"quantization"}
    assert differing(online[0], one) == {"quantization"}


def test_h39_the_kernels_of_quantised_weights_are_told_apart(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quantised = vllm_config(repository), vllm_config(repository, quantization="fp8_per_tensor")
    before = fields(plain), fields(quantised)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MarlinLinearKernel")
    assert fields(plain) == before[0]
    assert fields(quantised) != before[1]
    monkeypatch.undo()
    quantised.kernel_config.linear_backend = "marlin"
    assert fields(quantised) != before[1]


def test_h39_the_settings_of_a_quantised_checkpoint_are_told_apart(repository: Path, tmp_path: Path) -> None:
    (repository / "model.safetensors").write_bytes(NO_TENSORS)
    found = []
    for bits in (4, 8):
        settings = {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, "sym": True}
        configure(repository, quantization_config=settings)
        found.append(vllm_config(repository, dtype="bfloat16"))
    assert differing(*found) == {"architecture"}
    config = found[0]
    settings_file = tmp_path / "settings.json"
    config.model_config.hf_overrides = {"quantization_config_file": str(settings_file)}
    with pytest.raises(ConfigError, match=TOLD):
        fields(config)
    settings_file.write_text("{}")
    before = fields(config)
    settings_file.write_text('{"bits": 3}')
    assert fields(config) != before
