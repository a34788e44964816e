"""Keys that vLLM's own block hashes find again: for which requests, and that nobody gets another request's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import keys_by_hashes
import torch
from keys_by_hashes import BLOCK, NAME, RUN, identities, make, play
from vllm.lora.request import LoRARequest

from kvpact.identity import keys as keys_module
from kvpact.identity.keys import KnownRuns
from kvpact.vllm.request_identity import VllmRequest
from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release, releases_folder
from vllm_played_engine import PlayedEngine, answer, make_prompt


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short."""
    monkeypatch.setattr(keys_module, "RUN_TOKENS", RUN)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("hash_block", [BLOCK, BLOCK // 2])
def test_h24_requests_that_keys_tell_apart_share_none_that_were_found_by_a_hash(
    tmp_path: Path, algorithm: str, hash_block: int
) -> None:
    """Adapters, embeddings and sessions among requests with and without a salt, all with few different tokens."""
    assert play(tmp_path, algorithm, hash_block)["found"]


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=[] if one == installed_release() else pytest.mark.soak) for one in RELEASES]
)
@pytest.mark.timeout(900)
def test_h24_on_each_release_keys_found_by_a_hash_are_nobody_elses(tmp_path: Path, release: str) -> None:
    """Also where one hash stands for an adapter and a salt, or for two tokens of a session."""
    if release == installed_release():
        found = play(tmp_path)
    else:
        path = [str(fetch_release(release)), *(entry for entry in sys.path if entry)]
        cache = str(releases_folder() / f"{release}-cache")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "VLLM_CACHE_ROOT": cache}
        command = [sys.executable, str(keys_by_hashes.__file__)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
    minor = int(release.split(".")[1])
    assert found == {"an adapter is a salt": minor < 31, "a token of a session is another": minor < 32, "found": True}


OTHERS: dict[str, dict[str, Any]] = {
    "an adapter": {"lora_request": LoRARequest(NAME, 1, "/nowhere")},
    "embeddings": {"prompt_embeds": torch.zeros(RUN, 2)},
    "a session": {"resumable": True},
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_h24_a_request_with_more_than_tokens_and_a_salt_asks_nobody_by_hash(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    with closing(identities("sha256", BLOCK)) as engine:
        assert VllmRequest(make([1] * RUN, None, cache_salt=NAME), engine).identity.known is not None  # type: ignore[union-attr]
        identity = VllmRequest(make([1] * RUN, None, **fields), engine).identity
        assert identity is None or identity.known is None


def test_h24_a_session_that_vllm_has_ended_asks_nobody_by_hash() -> None:
    """vLLM says after an error that it cannot be resumed; its queue stays."""
    ended = make([1] * RUN, None, resumable=True)
    ended.resumable, ended.streaming_queue = False, ()
    with closing(identities("sha256", BLOCK)) as engine:
        assert VllmRequest(ended, engine).identity.known is None  # type: ignore[union-attr]


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_h24_hashes_that_may_collide_find_nothing(algorithm: str) -> None:
    with closing(identities(algorithm, BLOCK)) as engine:
        assert VllmRequest(make([1] * RUN, None), engine).identity.known is None  # type: ignore[union-attr]


def test_under_vllms_scheduler_a_prompt_that_came_before_finds_its_keys(
    start: Callable[..., PlayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "RUN_TOKENS", 64)
    kept, keep = list[int](), KnownRuns.keep

    def noted(known: KnownRuns, root: bytes, end: int, keys: Any, state: Any) -> None:
        kept.append(end)
        keep(known, root, end, keys, state)

    monkeypatch.setattr(KnownRuns, "keep", noted)
    engine, prompt = start(), make_prompt(1, 8)
    for times in range(3):
        assert list(engine.generate(prompt).request.output_token_ids) == answer(prompt, 3)
        assert kept == [64, 128], f"hashed again after {times}"
