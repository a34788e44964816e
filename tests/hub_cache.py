"""A cache of the model hub, made on the spot: a model in it has a name, branches and commits."""

from __future__ import annotations

import shutil
from hashlib import sha1
from pathlib import Path


def add_commit(cache: Path, name: str, model: Path, *, branch: str = "main") -> str:
    """Put the files of `model` into `cache` as the newest commit of `name`'s branch; the commit, 40 hex digits."""
    repository = cache / f"models--{name.replace('/', '--')}"
    digest = sha1(name.encode())
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    commit = digest.hexdigest()
    shutil.copytree(model, repository / "snapshots" / commit, dirs_exist_ok=True)
    reference = repository / "refs" / branch
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return commit
