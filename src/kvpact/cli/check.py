"""`kvpact config --check`: checks this machine, vLLM, a model and the configuration, and prints what to change.

Starts nothing and imports neither torch nor vLLM; probes tiers as `kvpact tiers` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Final, NamedTuple

from kvpact.border import json_object
from kvpact.cli.model_bytes import CPU, CPU_BF16, GPU, Build, StateBytes, kv_bytes_per_token, state_bytes
from kvpact.cli.offloading import offloading_json
from kvpact.cli.screen import BAD, busy, console, print_json
from kvpact.cli.serve import COMMAND_LINE, what_copies
from kvpact.cli.stores import probe_all
from kvpact.cli.transfer_config import refuse_secrets_of_the_command_line
from kvpact.cli.vllm_command import installed_release
from kvpact.config import KvpactConfig, check_cache, load_with_variables
from kvpact.errors import ConfigError, DataError
from kvpact.identity.tenants import load_tenants
from kvpact.memory.limits import available_memory_bytes
from kvpact.tiers.registry import load_seal
from kvpact.units import format_size
from kvpact.vllm.compat.platforms import OFFLOADING
from kvpact.vllm.compat.releases import SERIES, is_known

SESSION_TOKENS: Final = 16_384
"""Tokens of the sessions that are counted."""


class Finding(NamedTuple):
    """One thing that was checked, and the result; `is_right` if nothing need be changed."""

    is_right: bool
    subject: str
    text: str


def check_everything(
    settings: Mapping[str, object],
    environ: Mapping[str, str],
    config_file: Path | None,
    through: str,
    model: str,
    *,
    as_json: bool = False,
) -> bool:
    """Print a line for each thing that was checked, or one JSON document; returns whether all are right."""
    screen = console()
    with busy("checking"):
        findings = [*_findings(settings, environ, config_file, through, model)]
    right = all(each.is_right for each in findings)
    if as_json:
        print_json({"is_right": right, "findings": [each._asdict() for each in findings]})
        return right
    for each in findings:
        line = f"{'ok' if each.is_right else 'ERROR':<6}{each.subject}: {each.text}"
        screen.print(line, style=None if each.is_right else BAD)
    return right


def _findings(
    settings: Mapping[str, object], environ: Mapping[str, str], config_file: Path | None, through: str, model: str
) -> Iterator[Finding]:
    room = available_memory_bytes()
    cores = len(os.sched_getaffinity(0))
    yield Finding(True, "machine", f"Linux {os.uname().release}, {cores} cores, {format_size(room)} of memory free")
    yield _vllm(through)
    try:
        config, variables = load_with_variables(settings, environ, config_file, extra_source=COMMAND_LINE)
        refuse_secrets_of_the_command_line(config, variables)
        check_cache(config)
        load_seal(config.record_key_file)
        load_tenants(config.tenants)
        if through == OFFLOADING:
            offloading_json(config, variables)
    except ConfigError as error:
        yield Finding(False, "configuration", str(error))
        return
    yield Finding(True, "configuration", config.described())
    enough = config.memory <= room
    limit = "" if enough else "; set `memory` below the free memory, and leave room for the model"
    yield Finding(enough, "memory", f"{format_size(config.memory)} configured, {format_size(room)} free{limit}")
    copies = what_copies(config.gpu, through=through).removeprefix("kvpact: ")
    yield Finding(config.gpu != "off" or copies.startswith("no "), "GPU", copies)
    for row in probe_all(config.tiers):
        yield Finding(row["usable"], f"tier {row['tier']}", row["state"])
    if model:
        yield _model(model, config)


def _vllm(through: str) -> Finding:
    try:
        version = installed_release(through)
    except PackageNotFoundError:
        return Finding(False, "vLLM", f"not installed in this environment; install one of {SERIES[0]} to {SERIES[-1]}")
    except ConfigError as error:
        return Finding(False, "vLLM", str(error))
    tested = f"among the tested releases, {SERIES[0]} to {SERIES[-1]}"
    return Finding(is_known(version), "vLLM", f"{version} is {'' if is_known(version) else 'not '}{tested}")


def _model(model: str, config: KvpactConfig) -> Finding:
    file = _config_file(model)
    if file is None:
        is_path = model.startswith((".", "/", "~"))
        return Finding(
            not is_path, "model", f"{model} is not on this machine{'' if is_path else ': vLLM will fetch it'}"
        )
    try:
        found = json_object(file.read_bytes())
    except (OSError, DataError) as error:
        return Finding(False, "model", f"{file} cannot be read: {error}; give a model's folder or its name on the hub")
    if found.get("is_encoder_decoder"):
        return Finding(False, "model", f"{model} is an encoder-decoder model: serve it without kvpact")
    states = state_bytes(found, _build())
    if states is not None:
        return Finding(True, "model", f"{model}: {_of_states(states, config)}")
    size = kv_bytes_per_token(found)
    if not size:
        return Finding(True, "model", f"{model}: its config.json does not give the bytes of a token's keys and values")
    return Finding(
        True,
        "model",
        f"{model}: {format_size(size)} of keys and values per token, if all layers keep all tokens; memory holds "
        f"{config.memory // size:,} tokens",
    )


def _build() -> Build:
    """Defaults of the vLLM that is installed, else of one for GPUs."""
    with suppress(PackageNotFoundError, ConfigError):
        if "cpu" in installed_release("connector"):
            with suppress(OSError):
                return CPU_BF16 if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else CPU
    return GPU


def _of_states(states: StateBytes, config: KvpactConfig) -> str:
    session = SESSION_TOKENS * states.token + states.state
    places = [("memory", config.memory), *((tier.scheme, tier.capacity) for tier in config.tiers if tier.capacity)]
    room = " and ".join(f"{size // session:,} in {name}" for name, size in places)
    return (
        f"{states.layers} layers keep a state, {format_size(states.state)} in all, at multiples of {states.unit:,} "
        f"tokens (align unit), where alone a match ends; {format_size(states.token)} of keys and values per token. "
        f"vLLM keeps states of answers with --prefix-cache-retention-interval {states.unit} alone. "
        f"Sessions of {SESSION_TOKENS:,} tokens with one state each: {room}. For one rank without speculative decoding"
    )


def _config_file(model: str) -> Path | None:
    """Path of a model's config.json: in its folder, or in its newest commit in the hub's cache."""
    if (file := Path(model).expanduser() / "config.json").is_file():
        return file
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    with suppress(OSError):
        file = kept / "snapshots" / (kept / "refs" / "main").read_text().strip() / "config.json"
        return file if file.is_file() else None
    return None
