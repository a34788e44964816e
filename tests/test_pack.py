"""`scripts/pack_vllm.py`, and the `unpack.py` that it puts beside the pieces. The wheels are made up."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
MAX_BYTES = 20_000

KERNELS = random.Random(0).randbytes(50_000)
"""What does not get smaller."""

WHEELS = {
    "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl": {
        "vllm/__init__.py": b"print('vLLM')",
        "vllm/model_executor/layers/fused_moe/layer.py": b"experts = True",
        "vllm/third_party/pynvml.py": b"gpus = 1",
        "vllm/_C_stable_libtorch.abi3.so": KERNELS,
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": KERNELS[::-1],
        "vllm-0.32.0.dist-info/METADATA": b"Name: vllm",
    },
    "cuda_bindings-13.5.0-cp312-cp312-manylinux_2_24_x86_64.whl": {
        "cuda/bindings/driver.cpython-312-x86_64-linux-gnu.so": b"calls",
        "cuda/bindings/_internal/driver.cpython-312-x86_64-linux-gnu.so": b"the driver's",
    },
    "cachetools-8.0.1-py3-none-any.whl": {"cachetools/__init__.py": b"LRU = 1"},
    "blake3-1.0-cp312-cp312-manylinux_2_17_x86_64.whl": {
        "blake3-1.0.data/purelib/blake3/__init__.py": b"digest = 32",
        "blake3/blake3.so": b"compiled",
    },
    "kvpact-0.1.0-py3-none-any.whl": {"kvpact/__init__.py": b"__version__ = '0.1.0'"},
}
NO_CALLS = {"cuda/bindings/nvml.cpython-312-x86_64-linux-gnu.so", "cuda/bindings/driver.pxd"}
LEFT_OUT = {
    "vllm/third_party/deep_gemm/_C.so",
    "vllm/third_party/deep_gemm/__init__.py",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm_flash_attn/cute/flash_fwd.py",
    "vllm/model_executor/layers/fused_moe/configs/E=8,N=7168.json",
    "vllm/vllm-rs",
    "vllm-0.32.0.dist-info/RECORD",
}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, files in WHEELS.items():
        with zipfile.ZipFile(folder / name, "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)
            for path in LEFT_OUT if name.startswith("vllm") else NO_CALLS if name.startswith("cuda") else ():
                wheel.writestr(path, KERNELS)
    return folder


def pack(wheels: Path, *options: str) -> Path:
    out = wheels.parent / "pack"
    script = SCRIPTS / "pack_vllm.py"
    given: list[str | Path] = ["--wheels", wheels, "--out", out, "--python", HERE, "--max-mb", str(MAX_BYTES / 1e6)]
    subprocess.run([sys.executable, script, *given, *options], check=True, timeout=60, stdout=subprocess.DEVNULL)
    return out


def unpack(pieces: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, "-I", "-S", pieces / "unpack.py", pieces, target]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name[0] != ".")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_pieces_are_small_and_give_back_what_was_packed(wheels: Path, tmp_path: Path) -> None:
    pieces = pack(wheels)
    manifest = json.loads((pieces / "manifest.json").read_text())
    assert list(manifest["archives"]) == ["kvpact", "vllm", "vllm-connectors", "vllm-kernels", "vllm-flash-attention"]
    for archive in manifest["archives"].values():
        for piece in archive["pieces"]:
            assert (pieces / piece["name"]).stat().st_size == piece["bytes"] <= MAX_BYTES
    assert len(manifest["archives"]["vllm-kernels"]["pieces"]) == 3
    done = unpack(pieces, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"export PYTHONPATH={tmp_path / 'target'}"
    expected = {
        path.partition(".data/purelib/")[2] or path: one for files in WHEELS.values() for path, one in files.items()
    }
    assert contents(tmp_path / "target") == expected


def test_machine_code_for_other_gpus_is_zeroed_and_nothing_moves() -> None:
    sys.path.append(str(SCRIPTS))
    from pack_vllm import ARCHITECTURE, FAT_BINARY_MAGIC, for_one_architecture

    def fat(*architectures: int) -> bytes:
        pieces = b"".join(struct.pack("<HHIQ12xI32x", 2, 0, 64, 8, one) + b"\x07" * 8 for one in architectures)
        return FAT_BINARY_MAGIC + struct.pack("<HHQ", 1, 16, len(pieces)) + pieces

    library = b"\x7fELF" + fat(75, ARCHITECTURE, 120) + b"between" + fat(80) + b"the end"
    slim = for_one_architecture(library)
    assert len(slim) == len(library)
    assert slim.count(7) == 8
    at = len(b"\x7fELF") + 16 + 72 + 64
    assert slim[at : at + 8] == b"\x07" * 8
    assert slim.endswith(b"the end")
    assert b"between" in slim
    assert for_one_architecture(KERNELS) == KERNELS


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_piece_that_is_damaged_is_refused_by_its_hash(wheels: Path, tmp_path: Path, damage: str) -> None:
    pieces = pack(wheels)
    piece = pieces / "vllm-kernels.tar.xz.01"
    content = bytearray(piece.read_bytes())
    content[100] ^= 1
    piece.write_bytes(content if damage == "flipped" else content[:-1])
    done = unpack(pieces, tmp_path / "target")
    assert done.returncode == 1
    assert done.stderr.startswith("unpack: vllm-kernels.tar.xz.01 is damaged")
    assert "vllm/_C_stable_libtorch.abi3.so" not in contents(tmp_path / "target")


def test_another_python_than_it_was_packed_for_is_refused(wheels: Path, tmp_path: Path) -> None:
    done = unpack(pack(wheels, "--python", "3.9"), tmp_path / "target")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"unpack: packed for Python 3.9, this is {HERE}\n"
