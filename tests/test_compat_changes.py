"""The script that names what another release of vLLM changed of what kvpact uses."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from documents import ROOT, load_script

SCRIPT = ROOT / "scripts" / "compat_changes.py"

POOL = """
class BlockPool(Basis):
    def __init__(self):
        self.blocks = self.null_block = []

    def touch(self, blocks): ...

    def free_blocks(self, blocks):
        '''Free them.'''
        blocks.sort()

    def evict_blocks(self, blocks): ...
"""

BASE = {
    "__init__": "",
    "v1/__init__": "",
    "v1/core/__init__": "from .block_pool import BlockPool\n",
    "v1/core/basis": "class Basis:\n    free_queue: int\n    def __init__(self):\n        self.hash_block_size = 1\n",
    "v1/core/block_pool": f"from vllm.v1.core.basis import Basis\n{POOL}",
    "v1/core/kv_cache_utils": "if True:\n    def get_group_id(hash): ...\ndef get_block_hash(hash): ...\n",
    "v1/core/sched/__init__": "",
    "v1/core/sched/diffusion_scheduler": "class DiffusionScheduler: ...\n",
    "v1/request": "class Request:\n    cache_salt: str\n    def is_finished(self): return self._pause_state\n",
}


CHANGES = load_script("scripts/compat_changes.py")


def tree(place: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        file = place / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(place)


def run(base: dict[str, str], other: dict[str, str], place: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(SCRIPT), tree(place / "other", other), "--base", tree(place / "base", base)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_what_a_release_changed_is_named(tmp_path: Path) -> None:
    pool = (
        POOL.replace("def touch(self, blocks)", "def touch(self, blocks, owner)")
        .replace("Free them.", "Let them go.")
        .replace("evict_blocks(self, blocks): ...", "evict_blocks(self, blocks): blocks.clear()")
    )
    other = {
        **BASE,
        "v1/core/block_pool": f"from vllm.v1.core.basis import Basis\n{pool}",
        "v1/core/basis": "class Basis:\n    free_queue: int\n",
        "v1/core/kv_cache_utils": "from vllm.v1.core.hashes import get_block_hash\n",
        "v1/core/hashes": "def get_block_hash(hash): ...\n",  # moved, and still there
        "v1/request": "class Request:\n    cache_salt: str\n    is_finished: bool\n",
    }
    del other["v1/core/sched/diffusion_scheduler"]
    code, lines = run(BASE, other, tmp_path)
    assert code == 1
    assert lines[:-1] == [
        "gone       DiffusionScheduler  in no file",
        "gone       _pause_state  in no file",
        "gone       vllm.v1.core.block_pool:BlockPool.hash_block_size",
        "gone       vllm.v1.core.kv_cache_utils:get_group_id",
        "gone       vllm.v1.core.sched:diffusion_scheduler",
        "arguments  vllm.v1.core.block_pool:BlockPool.touch  (self, blocks) -> (self, blocks, owner)",
        "body       vllm.v1.core.block_pool:BlockPool.evict_blocks",
        "body       vllm.v1.request:Request.is_finished",
    ]
    assert lines[-1].endswith("5 gone, 1 with other arguments, 2 with another body")


def test_a_release_that_changed_bodies_alone_passes(tmp_path: Path) -> None:
    other = {**BASE, "v1/core/block_pool": BASE["v1/core/block_pool"].replace("blocks.sort()", "pass")}
    assert run(BASE, BASE, tmp_path / "same")[1][0].endswith("0 gone, 0 with other arguments, 0 with another body")
    code, lines = run(BASE, other, tmp_path)
    assert (code, lines[:-1]) == (0, ["body       vllm.v1.core.block_pool:BlockPool.free_blocks"])


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"compat_changes: {tmp_path} has no package vllm\n")


@pytest.mark.skipif(find_spec("vllm") is None, reason="no engine is installed; `make setup` installs one")
def test_every_name_is_read_in_the_installed_release() -> None:
    """What the script did not find in its base it would not miss in another release."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    sources = CHANGES.Sources(Path(spec.origin).parents[1])
    used = set(CHANGES.used())
    assert len(used) > 200
    unread = {f"{place} {'|'.join(names)}" for place, names in used if not sources.read(place, names)}
    assert unread == set()
