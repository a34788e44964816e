"""Joins the pieces that scripts/pack_vllm.py made: python3 unpack.py [PIECES] [TARGET]

PIECES is the directory with manifest.json and the pieces that were brought so far, this file's own unless named. What
is all there is checked and unpacked into TARGET, `packed` unless named, which then belongs on PYTHONPATH; the rest is
named and left out, so that pieces can come one after the other. Needs nothing but Python. The exit status is 0 if all
archives are unpacked by now, 3 if some are still missing, and 1 if a piece is not what the manifest says.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

CHUNK = 1 << 20


class Damaged(Exception):
    """A piece is not what the manifest says."""


def join(archive: dict[str, Any], pieces: Path, joined: Any) -> None:
    """Write the pieces of an archive one behind the other. Raises Damaged."""
    for piece in archive["pieces"]:
        found, size = hashlib.sha256(), 0
        with (pieces / piece["name"]).open("rb") as source:
            while chunk := source.read(CHUNK):
                found.update(chunk)
                size += len(chunk)
                joined.write(chunk)
        if (size, found.hexdigest()) != (piece["bytes"], piece["sha256"]):
            raise Damaged(
                f"{piece['name']} is damaged: {size} bytes instead of {piece['bytes']}, or others than were packed"
            )


def hash_of(archive: dict[str, Any]) -> str:
    """Of all its pieces, short."""
    return hashlib.sha256("".join(piece["sha256"] for piece in archive["pieces"]).encode()).hexdigest()[:16]


def unpack(manifest: dict[str, Any], pieces: Path, target: Path) -> list[str]:
    """Unpack what is there. Returns the names of the archives that are not unpacked yet. Raises Damaged."""
    missing = []
    for name, archive in manifest["archives"].items():
        done = target / f".{name}-{hash_of(archive)}"
        if done.exists():
            continue
        if not all((pieces / piece["name"]).exists() for piece in archive["pieces"]):
            missing.append(name)
            continue
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target) as joined:
            join(archive, pieces, joined)
            joined.seek(0)
            with tarfile.open(fileobj=joined, mode="r:xz") as tar:
                tar.extractall(target, filter="data")
        done.touch()
        print(f"unpacked {name}")
    return missing


def main(arguments: list[str]) -> int:
    """The exit status."""
    pieces = Path(arguments[0]) if arguments else Path(__file__).parent
    target = Path(arguments[1] if len(arguments) > 1 else "packed")
    manifest = json.loads((pieces / "manifest.json").read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != manifest["python"]:
        print(f"unpack: packed for Python {manifest['python']}, this is {here}", file=sys.stderr)
        return 1
    try:
        missing = unpack(manifest, pieces, target)
    except Damaged as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    for name in missing:
        print(f"not here yet: {name} ({', '.join(piece['name'] for piece in manifest['archives'][name]['pieces'])})")
    print(f"export PYTHONPATH={target.resolve()}")
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
