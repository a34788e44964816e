"""The command line of an examination, and its exit status: 0 if kvpact may serve here, 1 if not or without a GPU.

Says why there is nothing to examine without importing torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpact.errors import ConfigError, KvpactError
from kvpact.own_files import replace_own
from kvpact.torch_cuda.doctor.children import TRIALS, run_trial
from kvpact.torch_cuda.doctor.examine import SECTIONS, Examination, child_of
from kvpact.torch_cuda.doctor.report import lines
from kvpact.torch_cuda.doctor.shapes import LAYERS, Shape, model_shapes, shapes_of, usual_shapes
from kvpact.torch_cuda.doctor.workspace import FULL, QUICK
from kvpact.units import parse_size
from kvpact.worker.cuda.driver import LIBRARY


class NoDevice(KvpactError):
    """There is no device that can be examined. One line for people."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for."""

    device: int = 0
    quick: bool = False
    json: Path | None = None
    page_bytes: tuple[str, ...] = ()
    """Sizes, as text."""
    model: Path | None = None
    ranks: int = 1
    block_tokens: int = 16
    only: tuple[str, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Raises ConfigError for what is no page, and no model."""
        if self.ranks < 1 or self.block_tokens < 1:
            raise ConfigError(f"--tp {self.ranks} and --block-size {self.block_tokens}: both must be at least 1")
        if self.model is not None:
            return model_shapes(self.model, self.block_tokens, self.ranks)
        if self.page_bytes:
            try:
                return shapes_of([parse_size(size) for size in self.page_bytes], LAYERS)
            except ValueError as error:
                raise ConfigError(f"--kv-page-bytes: {error}") from None
        return usual_shapes()


def require_device(device: int) -> None:
    """Raise NoDevice, within a second, where there is no torch for CUDA or no NVIDIA GPU."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise NoDevice("no torch here: a GPU is examined with the torch of the engine, built for CUDA")
    version = Path(found.origin).with_name("version.py")
    built = version.read_text() if version.is_file() else ""
    if re.search(r"^hip\b[^=]*= *['\"]", built, re.MULTILINE):
        raise NoDevice("torch is built for ROCm here: kvpact's copies call NVIDIA's driver, and have none for AMD's")
    if re.search(r"^cuda\b[^=]*= *None", built, re.MULTILINE):
        raise NoDevice("torch is built for CPUs here: a GPU is examined with the torch of the engine, built for CUDA")
    count = ctypes.c_int()
    try:
        library = ctypes.CDLL(LIBRARY)
        code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError) as error:
        raise NoDevice(f"no NVIDIA driver here: {error}") from None
    if code or not 0 <= device < count.value:
        what = f"the driver answers with error {code}" if code else f"the driver knows {count.value}"
        raise NoDevice(f"there is no NVIDIA GPU with number {device} here: {what}")


def _require_writable(file: Path) -> None:
    """Begin the file. Raises ConfigError if that cannot be: not after a minute of measurements."""
    try:
        replace_own(file, b"{}")
    except OSError as error:
        raise ConfigError(f"--json: {file} cannot be written: {error.strerror}") from None


def examine(wishes: Wishes, say: Callable[[str], None], tell: Callable[[str], None]) -> bool:
    """Examine a device: the report goes to `say`, what is going on to `tell`. Returns whether it is sound.

    Raises NoDevice and ConfigError.
    """
    shapes = wishes.shapes
    unknown = set(wishes.only).difference(SECTIONS)
    if unknown:
        raise ConfigError(f"there is no section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    require_device(wishes.device)
    if wishes.json is not None:
        _require_writable(wishes.json)
    from kvpact.torch_cuda.doctor.torch_bench import TorchBench

    amounts = QUICK if wishes.quick else FULL
    arguments = ["--device", str(wishes.device), *(["--quick"] if wishes.quick else [])]
    examination = Examination(TorchBench(wishes.device), amounts, shapes, child_of(arguments), wishes.json, tell)
    document = examination.run(wishes.only)
    for line in lines(document):
        say(line)
    return bool(document["sound"])


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvpact.torch_cuda.doctor", description="Examine a GPU.")
    parser.add_argument("--gpu", action="store_true", help="what is examined; there is nothing else yet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="gets all figures, section by section")
    parser.add_argument("--device", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--kv-page-bytes", action="append", default=[], metavar="SIZE", help="repeatable")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a model's config.json, or its directory")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share the model's heads")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--only", action="append", default=[], metavar="SECTION", help="repeatable")
    parser.add_argument("--trial", choices=list(TRIALS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    wishes = Wishes(
        given.device, given.quick, given.json, tuple(given.kv_page_bytes), given.model, given.tp, given.block_size,
        tuple(given.only),
    )  # fmt: skip
    if given.trial:
        from kvpact.torch_cuda.doctor.torch_bench import TorchBench

        run_trial(given.trial, TorchBench(given.device), QUICK if given.quick else FULL)
        return 0
    try:
        return 0 if examine(wishes, print, lambda line: print(line, file=sys.stderr, flush=True)) else 1
    except KvpactError as error:
        print(f"kvpact: {error}", file=sys.stderr)
        return 1 if isinstance(error, NoDevice) else 2
