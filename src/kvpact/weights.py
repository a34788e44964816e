"""Identity of weights by content: a digest that two directories share only if they hold the same weights.

Reads safetensors indexes and samples of every tensor, never a whole base model; adapters are small and read whole.
Touches the file system, so it never runs on a scheduler's thread. Floor 0.
"""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

SAMPLE_BYTES = 4096
"""Read from the start and from the middle of each tensor: fine-tuning changes nearly every value of a tensor that it
touches, so thousands of values that all stayed equal by chance, in every tensor, is not a case to plan for."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CHUNK_BYTES = 1 << 26


def weights_digest(directory: Path) -> str:
    """Hex digest over the weight files in `directory`: names, sizes, tensor indexes and samples of the content.

    Equal content gives an equal digest wherever the directory lies. Raises FileNotFoundError if there are no weights.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no weight files ({', '.join(WEIGHT_SUFFIXES)}) in {directory}")
    digest = blake3()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        _sample(path, digest)
    return digest.hexdigest()


def adapter_digest(directory: Path) -> str:
    """Hex digest over all bytes of an adapter's files. Raises OSError if the directory cannot be read."""
    digest = blake3()
    files = sorted(path for path in directory.iterdir() if path.suffix in (*WEIGHT_SUFFIXES, ".json"))
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise FileNotFoundError(f"no adapter weights in {directory}")
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _sample(path: Path, digest: blake3) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in _sample_offsets(path, size, digest):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))


def _sample_offsets(path: Path, size: int, digest: blake3) -> list[int]:
    if path.suffix != ".safetensors":
        return list(range(0, size, max(SAMPLE_BYTES, size // 4096)))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = file.read(header_bytes)
    digest.update(header)
    offsets: list[int] = []
    for name, tensor in sorted(json.loads(header).items()):
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            offsets += [8 + header_bytes + start, 8 + header_bytes + (start + end) // 2]
    return offsets
