"""The options that `kvpact serve` finds in vLLM's source are at least those that vLLM takes."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpact.cli.vllm_options import refuse_misspelt, vllm_options

MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where `vllm serve` makes its parser: from 0.32 on, and before."""


def test_every_option_of_vllm_is_known_and_none_is_refused() -> None:
    module = next(name for name in MODULES if find_spec(name.rpartition(".")[0]) and find_spec(name))
    parser = import_module(module).make_arg_parser(FlexibleArgumentParser())
    taken = re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_usage())
    assert len(taken) > 200
    assert {word[2:].removeprefix("no-") for word in taken} <= vllm_options() | {"help"}
    refuse_misspelt(taken)
    refuse_misspelt([word.replace("-", "_").replace("__", "--", 1) + "=1" for word in taken])
