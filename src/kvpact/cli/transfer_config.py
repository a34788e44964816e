"""`kvpact config`: prints the value of vLLM's `--kv-transfer-config`, without secrets, and vLLM's other options.

Owns the messages about secrets: every user of the machine can read vLLM's command line, and vLLM logs the value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from kvpact.cli.offloading import offloading_json
from kvpact.cli.serve import COMMAND_LINE, options_beside
from kvpact.config import KvpactConfig, load_with_variables
from kvpact.errors import ConfigError
from kvpact.vllm.compat.platforms import OFFLOADING


def print_configuration(
    settings: Mapping[str, object], environ: Mapping[str, str], config_file: Path | None, through: str
) -> None:
    """Print the settings; on standard error vLLM's other options, and the variables that must hold the secrets.

    Raises:
        ConfigError: the configuration is wrong, or a secret is on the command line, where no engine can read it.
    """
    config, variables = load_with_variables(settings, environ, config_file, extra_source=COMMAND_LINE)
    refuse_secrets_of_the_command_line(config, variables)
    secrets = sorted(config.secret_keys())
    if through == OFFLOADING:
        print(offloading_json(config, variables))
    else:
        print(config.to_connector_json(without=secrets))
    beside = " ".join(f"{option} {value}" for option, value in options_beside(through).items())
    print(f"kvpact: start vLLM with {beside} too, as kvpact serve does", file=sys.stderr)
    for key in secrets:
        print(
            f"kvpact: {key} holds a secret and is not printed; start vLLM with {variables[key]} in its environment",
            file=sys.stderr,
        )


def refuse_secrets_of_the_command_line(config: KvpactConfig, variables: Mapping[str, str]) -> None:
    """Raise ConfigError if a secret value came from the command line; `variables` is from `load_with_variables`."""
    if "tiers" in config.secret_keys() and not variables["tiers"]:
        shown = next(str(tier) for tier in config.tiers if tier.holds_secret)
        raise ConfigError(
            f"--tier {shown} holds a secret, which vLLM's command line and log would show: put the URL into "
            "KVPACT_TIERS, a file that KVPACT_TIERS_FILE names or the configuration file, or the password into a file "
            "and its path into the URL's password_file"
        )
