"""`kvpact config --check`: what holds of machine, vLLM, model and settings, and what to set."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hub_cache import add_commit
from kvpact.cli import check, vllm_command
from kvpact.cli.model_bytes import kv_bytes_per_token
from kvpact_command import KVPACT, beside, fake_vllm_in, kvpact, refusal, without_settings

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


@pytest.fixture(autouse=True)
def a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 GiB free, no GPU, and vLLM 0.32.0, whatever is really here."""
    monkeypatch.setattr(check, "available_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(vllm_command, "answer_for_vllm", lambda: None)
    monkeypatch.setattr(check, "what_copies", lambda gpu, *, through: "kvpact: no NVIDIA GPU here.")
    monkeypatch.setattr(vllm_command, "distribution", lambda name: type("Vllm", (), {"version": "0.32.0+cpu"}))


def checked(*arguments: object) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and the finding and the text of each thing looked at."""
    result = kvpact("config", "--check", *arguments)
    lines = [
        line.removeprefix(word)
        for line in result.stdout.splitlines()
        for word in ("ok    ", "ERROR ")
        if line.startswith(word)
    ]
    words = [line[:6].strip() for line in result.stdout.splitlines()]
    named = [line.partition(": ") for line in lines]
    return result.exit_code, {what: (word, text) for word, (what, _, text) in zip(words, named, strict=True)}


def model_in(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return folder


def test_findings_as_json_are_those_of_the_lines() -> None:
    for arguments, code in (("--memory", "4GiB"), 0), (("--memory", "1TiB"), 1):
        result = kvpact("config", "--check", "--json", *arguments)
        found = json.loads(result.stdout)
        assert (result.exit_code, found["is_right"]) == (code, code == 0)
        lines = {each["subject"]: ("ok" if each["is_right"] else "ERROR", each["text"]) for each in found["findings"]}
        assert (code, lines) == checked(*arguments)


def test_what_holds_is_said_and_nothing_is_wrong(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model")
    code, found = checked(model, "--memory", "4GiB", "--tier", f"disk://{tmp_path}/tier?capacity=1GiB")
    assert code == 0, found
    assert {word for word, _ in found.values()} == {"ok"}
    assert found["vLLM"][1] == "0.32.0+cpu is among the tested releases, 0.30 to 0.33"
    assert found["memory"][1] == "4GiB configured, 64GiB free"
    assert "128KiB of keys and values per token" in found["model"][1]
    assert found["model"][1].endswith("memory holds 32,768 tokens")
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize(
    ("arguments", "what", "text"),
    [
        (("--memory", "900GiB"), "memory", "900GiB configured, 64GiB free; set `memory` below the free memory"),
        (("--memory", "lots"), "configuration", 'memory="lots" in the command line'),
        (("--tier", "disk:///no/where/at/all?capacity=1GiB"), "tier disk", "there is no directory /no/where/at"),
        (("--tier", "redis://u:hunter2@cache"), "configuration", "holds a secret"),
        (("/no/such/model",), "model", "/no/such/model is not on this machine"),
        (("--through", "offloading", "--tier", "disk:///tmp?capacity=1GiB"), "vLLM", "needs a GPU"),
    ],
)
def test_what_is_wrong_is_said_and_the_exit_code_is_1(arguments: tuple[str, ...], what: str, text: str) -> None:
    code, found = checked(*arguments)
    ((_, said),) = [found[name] for name in found if name.startswith(what) and found[name][0] == "ERROR"]
    assert text in said
    assert code == 1


@pytest.mark.parametrize(("version", "text"), [("0.29.1", "kvpact serves 0.30 and later"), ("0.99.0", "is not among")])
def test_a_release_that_is_not_tested_is_looked_at(version: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_command, "distribution", lambda name: type("Vllm", (), {"version": version}))
    code, found = checked()
    assert (code, found["vLLM"][0]) == (1, "ERROR")
    assert text in found["vLLM"][1]


def test_a_model_of_the_hubs_cache_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    add_commit(tmp_path / "hub", "someone/model", model_in(tmp_path / "model"))
    assert "128KiB" in checked("someone/model")[1]["model"][1]
    assert checked("someone/other") == (0, checked("someone/other")[1])
    assert checked("someone/other")[1]["model"] == ("ok", "someone/other is not on this machine: vLLM will fetch it")


def test_an_encoder_decoder_model_is_not_served(tmp_path: Path) -> None:
    code, found = checked(model_in(tmp_path / "model", is_encoder_decoder=True))
    assert (code, found["model"][0]) == (1, "ERROR")


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        (LLAMA, 2 * 32 * 8 * 128 * 2),
        ({"text_config": LLAMA, "torch_dtype": "float32"}, 2 * 32 * 8 * 128 * 4),
        (LLAMA | {"head_dim": 64}, 2 * 32 * 8 * 64 * 2),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 576 * 2),
        ({"num_hidden_layers": 2, "num_attention_heads": 0}, 0),
        ({"num_hidden_layers": "two"}, 0),
    ],
)
def test_the_bytes_of_a_token_are_those_of_the_models_layers(fields: dict[str, object], size: int) -> None:
    assert kv_bytes_per_token(fields) == size


QWEN = {
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Of Qwen3-Next 80B."""


def test_of_a_model_with_states_the_align_unit_a_states_bytes_and_sessions_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_in(tmp_path / "model", **QWEN)
    monkeypatch.setattr(vllm_command, "distribution", lambda name: type("Vllm", (), {"version": "0.32.0"}))
    code, found = checked(model, "--memory", "4GiB", "--tier", f"disk://{tmp_path}/tier?capacity=1GiB")
    word, text = found["model"]
    assert (code, word) == (0, "ok")
    assert text == (
        f"{model}: 36 layers keep a state, 37.69MiB in all, at multiples of 544 tokens (align unit), where alone a "
        "match ends; 24KiB of keys and values per token. vLLM keeps states of answers with "
        "--prefix-cache-retention-interval 544 alone. Sessions of 16,384 tokens with one state each: 9 in memory and 2 "
        "in disk. For one rank without speculative decoding"
    )


def test_a_build_for_cpus_has_larger_blocks(tmp_path: Path) -> None:
    _, found = checked(model_in(tmp_path / "model", **QWEN, mamba_ssm_dtype="bfloat16"))
    assert "at multiples of 640 tokens" in found["model"][1]


def test_a_family_whose_states_are_not_known_is_described_as_others_are(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", layer_types=["mamba", "attention"] * 16)
    assert "if all layers keep all tokens" in checked(model)[1]["model"][1]


def test_a_model_is_for_the_check_alone() -> None:
    assert "a model needs --check" in refusal("config", "some/model")


def test_neither_torch_nor_vllm_is_imported(tmp_path: Path) -> None:
    fake = fake_vllm_in(tmp_path, version="0.32.0")
    (fake / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    (fake / "torch.py").write_text("raise AssertionError('imported')")
    command = [str(KVPACT), "config", "--check", "--memory", "1MiB"]
    ended = subprocess.run(command, env=beside(fake), capture_output=True, text=True, timeout=60)
    assert "ok    vLLM: 0.32.0 is among" in ended.stdout, ended.stderr
    assert ended.returncode == 0
