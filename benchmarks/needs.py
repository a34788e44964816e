"""What benchmarks need beside kvpact: an engine, and the servers of the folder testbeds. Measures nothing."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from pathlib import Path


def require_vllm() -> None:
    """Raise ModuleNotFoundError if vLLM is not there, which the command says in one line."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


def require_known(option: str, words: Iterable[str], known: Collection[str]) -> None:
    """End the program with one line if the option names something else."""
    if unknown := set(words) - set(known):
        raise SystemExit(f"{option}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")


def require_at_least(option: str, least: int, numbers: Iterable[int]) -> None:
    """End the program with one line if a number of the option is less."""
    if low := [number for number in numbers if number < least]:
        raise SystemExit(f"{option}: at least {least}, not {low[0]}")


def find_testbeds() -> None:
    """The modules of testbeds can be imported from now on."""
    folder = str(Path(__file__).parents[1] / "testbeds")
    if folder not in sys.path:
        sys.path.append(folder)
