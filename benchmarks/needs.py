"""What benchmarks need beside kvpact: an engine, and the servers of the folder testbeds. Measures nothing."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def require_vllm() -> None:
    """Raise ModuleNotFoundError if vLLM is not there, which the command says in one line."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


def find_testbeds() -> None:
    """The modules of testbeds can be imported from now on."""
    folder = str(Path(__file__).parents[1] / "testbeds")
    if folder not in sys.path:
        sys.path.append(folder)
