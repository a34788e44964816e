"""Packs what a machine with torch 2.11 for CUDA 13 but no package registry lacks: python scripts/pack_vllm.py --out DIR

For `make gpu` there: kvpact with its dependencies, and its tests'; vLLM 0.32.0 without what a small text model does not
need, and the packages that it imports. The machine must have torch with Triton, and transformers, with what those need.
DIR then has files of at most --max-mb each, manifest.json with their sizes and hashes, and unpack.py, which joins them
there into a directory for PYTHONPATH. Of vLLM's compiled modules only the machine code for Hopper is packed, so that
all of it is 50 MB.

vLLM 0.32.0 asks for torch 2.13 by its metadata, as 0.30 and 0.31 do, and pip would not install it there. Its compiled
modules call torch by its stable interface alone, so that they load beside 2.11, too; docs/gpu.md says what was tried.

Asks pip for wheels, for Python --python on x86-64. --wheels DIR takes wheels that are at hand instead. --list only says
what would be packed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

VLLM = "vllm==0.32.0"

KVPACT = (
    "blake3",
    "msgspec",
    "prometheus_client",
    "pydantic>=2.12",
    "xxhash",
    "typer",
    "click",
    "shellingham",
    "annotated-doc",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "hypothesis",
    "sortedcontainers",
    "attrs",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
)
"""The first archive: kvpact's dependencies without numpy, which torch's machine has, and those of its tests there."""

WITH_DEPENDENCIES = ("pydantic",)
"""Its compiled half must be of the very release that it asks for."""

ENGINE = (
    "apache-tvm-ffi==0.1.11",
    "cachetools",
    "cbor2",
    "compressed-tensors==0.17.0",
    "distro",
    "fastapi>=0.133,<0.137",
    "jiter",
    "llguidance>=1.7,<1.8",
    "loguru",
    "openai>=2.25,<3",
    "oss-harmony",
    "partial-json-parser",
    "pybase64",
    "python-json-logger",
    "pyzmq",
    "setproctitle",
    "sniffio",
    "starlette",
    "xgrammar==0.2.8",
)
"""What vLLM imports before it serves, and torch's machine lacks: found by importing it beside these."""

CONNECTORS = ("cuda-bindings>=13,<14", "cuda-pathfinder>=1.4.2,<2")
"""What vLLM's SimpleCPUOffloadConnector imports when it copies: the driver's calls. torch's own wheels bring it, other
builds may not. OffloadingConnector imports nothing more than vLLM."""

CALLS = re.compile(
    r"(?!.*\.pxd$)cuda/(?:pathfinder/|bindings/(?:__init__|_version|(?:cy)?driver\.|utils/"
    r"|_internal/(?:__init__|_fast_enum|driver\.|utils\.)))"
)
"""Of `CONNECTORS`: the modules that `cuda.bindings.driver` loads, found by importing it."""

LEFT_OUT = re.compile(
    r"vllm/third_party/[^/]+/|vllm/model_executor/layers/fused_moe/configs/|vllm/vllm_flash_attn/cute/"
    r"|.*(\.so|/vllm-rs|\.hpp|\.h|\.cuh|\.cu|\.js|\.css|\.jpg)$"
)
"""Of vLLM: kernels in source for other models, the tuning of models with experts, and pages for browsers. What is
compiled is in archives of its own, or for other models."""

LIBRARIES = {
    "vllm-kernels": ("vllm/_C_stable_libtorch.abi3.so", "vllm/cumem_allocator.abi3.so", "vllm/spinloop.abi3.so"),
    "vllm-flash-attention": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",),
}
"""Archive -> vLLM's compiled modules in it. FlashAttention 3 is for Hopper; others fall back to Triton's kernels."""

ARCHITECTURE = 90
"""Hopper's, as the header of a piece of machine code says it."""

FAT_BINARY = struct.Struct("<IHHQ")
"""Head of a library's machine code for GPUs, in pieces: magic number, version, bytes of this head, bytes behind it."""

PIECE = struct.Struct("<4xIQ12xI")
"""What is read of a piece's head: its bytes, the bytes behind it, and the architecture."""

FAT_BINARY_MAGIC = bytes.fromhex("50ed55ba")

GLIBC = (*range(5, 40),)
"""pip takes no wheel for an older glibc than the one that it is told, so it is told of all."""

Keep = Callable[[str], bool]


def say(line: str) -> None:
    """For people."""
    print(f"[pack] {line}", flush=True)


def download(python: str, folder: Path) -> None:
    """Bring all wheels into `folder`, kvpact's own two among them. Raises CalledProcessError if pip fails."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"manylinux_2_{number}_x86_64" for number in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    chosen = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in platforms:
        chosen += ["--platform", platform]
    alone = [one for one in (VLLM, *KVPACT, *ENGINE, *CONNECTORS) if not one.startswith(WITH_DEPENDENCIES)]
    together = [one for one in KVPACT if one.startswith(WITH_DEPENDENCIES)]
    own = ("--wheel-dir", str(folder), str(ROOT), str(ROOT / "kit"))
    subprocess.run([*pip, "wheel", "-q", "--no-deps", *own], check=True)
    subprocess.run([*pip, "download", "-q", "--no-deps", *chosen, *alone], check=True)
    subprocess.run([*pip, "download", "-q", *chosen, *together], check=True)


def name_of(wheel: Path) -> str:
    """The distribution's, as the registry writes it."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def named(requirement: str) -> str:
    """The distribution's name in a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[; ]", requirement)[0]).lower()


def archives(wheels: Sequence[Path]) -> dict[str, list[tuple[Path, Keep]]]:
    """Archive -> its wheels, and which of their files belong into it."""
    engine = {named(one) for one in ENGINE}
    vllm = [wheel for wheel in wheels if name_of(wheel) == named(VLLM)]
    calls = {named(one) for one in CONNECTORS}
    ours = [wheel for wheel in wheels if name_of(wheel) not in {*engine, *calls, named(VLLM)}]
    found: dict[str, list[tuple[Path, Keep]]] = {"kvpact": [(wheel, is_kept) for wheel in ours]}
    theirs = [(wheel, is_kept) for wheel in wheels if name_of(wheel) in engine]
    found["vllm"] = [*((wheel, is_python_of_vllm) for wheel in vllm), *theirs]
    found["vllm-connectors"] = [(wheel, is_a_call) for wheel in wheels if name_of(wheel) in calls]
    for name, libraries in LIBRARIES.items():
        found[name] = [(wheel, libraries.__contains__) for wheel in vllm]
    return {name: parts for name, parts in found.items() if parts}


def is_kept(file: str) -> bool:
    """Whether a file of a wheel is of use where nobody installs it."""
    return not file.endswith("/RECORD") and (".data/" not in file or installed_as(file) != file)


def is_python_of_vllm(file: str) -> bool:
    """Whether a file of vLLM's wheel is part of what it needs beside its compiled modules."""
    return is_kept(file) and not LEFT_OUT.match(file)


def is_a_call(file: str) -> bool:
    """Whether a file of `CONNECTORS` is needed to call the driver."""
    return bool(CALLS.match(file))


def installed_as(file: str) -> str:
    """Where a file of a wheel belongs below the directory of packages; scripts and headers stay where they are."""
    return re.sub(r"^[^/]+\.data/(?:purelib|platlib)/", "", file)


def for_one_architecture(library: bytes) -> bytes:
    """A compiled module with the machine code for other GPUs zeroed: nothing moves, but it packs to a fourth."""
    slim = bytearray(library)
    begin = slim.find(FAT_BINARY_MAGIC)
    while begin >= 0:
        _, _, head, behind = FAT_BINARY.unpack_from(slim, begin)
        at, end = begin + head, begin + head + behind
        while at < end <= len(slim):
            piece, size, architecture = PIECE.unpack_from(slim, at)
            if architecture != ARCHITECTURE:
                slim[at + piece : at + piece + size] = bytes(size)
            at += piece + size
        begin = slim.find(FAT_BINARY_MAGIC, max(end, begin + 1))
    return bytes(slim)


def pack(parts: Sequence[tuple[Path, Keep]], archive: Path) -> int:
    """Write the wheels' files into an archive, in order. Returns their size in bytes."""
    size = 0
    with tarfile.open(archive, "w:xz", preset=lzma.PRESET_DEFAULT) as tar:
        for wheel, keep in parts:
            with zipfile.ZipFile(wheel) as source:
                for entry in sorted(source.infolist(), key=lambda entry: entry.filename):
                    if not entry.is_dir() and keep(entry.filename):
                        packed = tarfile.TarInfo(installed_as(entry.filename))
                        packed.size, packed.mode = entry.file_size, 0o644
                        content = source.read(entry)
                        slim = for_one_architecture(content) if entry.filename.startswith("vllm/") else content
                        tar.addfile(packed, BytesIO(slim))
                        size += entry.file_size
    return size


def pieces_of(archive: Path, out: Path, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Cut an archive into files of at most this size; yields what the manifest says of each."""
    with archive.open("rb") as source:
        number = 0
        while content := source.read(max_bytes):
            path = out / f"{archive.name}.{number:02d}"
            path.write_bytes(content)
            yield {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            number += 1


def pack_all(wheels: Sequence[Path], out: Path, python: str, max_bytes: int) -> None:
    """Write the pieces, the manifest and `unpack.py`."""
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {"format": 1, "python": python, "archives": {}}
    with tempfile.TemporaryDirectory(prefix="kvpact-pack-") as directory:
        for name, parts in archives(wheels).items():
            archive = Path(directory) / f"{name}.tar.xz"
            size = pack(parts, archive)
            pieces = list(pieces_of(archive, out, max_bytes))
            manifest["archives"][name] = {"bytes": size, "wheels": [one.name for one, _ in parts], "pieces": pieces}
            say(
                f"{name}: {size / 1e6:.1f} MB in {len(pieces)} pieces of {archive.stat().st_size / 1e6:.1f} MB together"
            )
            archive.unlink()
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(ROOT / "scripts" / "unpack.py", out)


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        description="Pack vLLM 0.32.0 and kvpact for a machine without a package registry."
    )
    parser.add_argument("--out", type=Path, default=Path("vllm-pack"), metavar="DIR")
    parser.add_argument("--max-mb", type=float, default=60, metavar="MB", help="of 10^6 bytes, for each file")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the other machine's")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="take these; download none")
    parser.add_argument("--list", action="store_true", help="say what would be packed, and pack nothing")
    given = parser.parse_args(arguments)
    if given.list:
        print(VLLM, "kvpact", *KVPACT, *ENGINE, *CONNECTORS, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="kvpact-wheels-") as directory:
        folder = given.wheels or Path(directory)
        if given.wheels is None:
            say(f"downloading wheels for Python {given.python}")
            download(given.python, folder)
        pack_all(sorted(folder.glob("*.whl")), given.out, given.python, int(given.max_mb * 1e6))
    say(f"bring the files of {given.out} there, and run: python3 unpack.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
