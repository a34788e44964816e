"""A model with states under `kvpact serve` with vLLM's default block sizes: prompts that come again hit.

vLLM's scheduler believes blocks of 128 tokens there, and the states are kept every 384: no prompt's first step ends
where a state is kept, so that without being asked no prompt would ever hit.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from model_families import qwen3_next_like

from kvpact_testkit.demo.model import TINY_SHAPE
from servers.http_server import Answer, Server, users_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.proof]

UNIT = 384
LENGTHS = (520, 600, 1_700)
WITH_STATE = [384, 384, 1_536]
"""The last multiple of `UNIT` before the end of each prompt."""
WRITTEN_S = 1.5


def prompts(first_seed: int) -> list[list[int]]:
    """A prompt of each length; all differ from the first token on."""
    sources = map(random.Random, range(first_seed, first_seed + len(LENGTHS)))
    return [
        [source.randrange(1, TINY_SHAPE.vocabulary) for _ in range(length)]
        for source, length in zip(sources, LENGTHS, strict=True)
    ]


def ask_anew(server: Server, asked: list[list[int]]) -> list[Answer]:
    """Answers while vLLM's own cache is empty."""
    server.post("reset_prefix_cache")
    return [server.ask(tokens) for tokens in asked]


def cached(answers: list[Answer]) -> list[int]:
    """Tokens of each prompt that were not computed."""
    return [answer.cached_tokens for answer in answers]


def same(answers: list[Answer], others: list[Answer]) -> bool:
    """Whether tokens and log-probabilities are equal bit by bit."""
    return all(one.same_as(other) for one, other in zip(answers, others, strict=True))


def test_prompts_that_came_twice_hit_after_a_reset_and_after_a_kill(tiny_model: Path, tmp_path: Path) -> None:
    model = qwen3_next_like(tmp_path / "model", tiny_model)
    (tmp_path / "run").mkdir()
    environment = users_environment() | {
        "KVPACT_TIERS": f"disk://{tmp_path}/slabs?capacity=256MiB",
        "KVPACT_RECOMPUTE_IF_FASTER": "false",
        "VLLM_SERVER_DEV_MODE": "1",
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
    }
    kvpact = str(Path(sys.executable).with_name("kvpact"))
    command = [
        kvpact, "serve", str(model), "--memory", "64MiB", "--enforce-eager", "--max-model-len=2048",
        "--kv-cache-memory-bytes=67108864", "--enable-prompt-tokens-details",
    ]  # fmt: skip

    def shown(*arguments: str) -> str:
        """What the command says of the running server, on one line."""
        said = subprocess.run(
            [kvpact, *arguments], capture_output=True, text=True, check=True, env=os.environ | environment
        )
        return " ".join(said.stdout.split())

    asked = prompts(6_000)
    once = prompts(6_100)
    with Server(command, tmp_path / "first.log", environment).wait_ready() as server:
        first = [ask_anew(server, asked) for _ in range(3)]
        local = [server.ask(tokens) for tokens in asked]
        missed = server.metrics()["vllm:kvpact_misses_total{state_missing}"]
        status = shown("status")
        story = shown("why")
        server.post("reset_prefix_cache")
        asked_once = [server.ask(tokens) for tokens in once]
        time.sleep(WRITTEN_S)
        server.kill()
    log = (tmp_path / "first.log").read_text()
    assert [cached(answers) for answers in first] == [[0, 0, 0], [0, 0, 0], WITH_STATE]
    assert cached(local) == WITH_STATE
    assert same(first[2], local)
    assert missed == len(LENGTHS), "each at its second time"
    assert log.count(f"add --block-size {UNIT}") == 1
    note = f"start vLLM's scheduler cuts prompts for blocks of 128 tokens, and the model's states are kept every {UNIT}"
    assert note in status
    assert f"to change add --block-size {UNIT}" in status
    assert "state_missing" in story
    assert cached(asked_once) == [0, 0, 0]
    with Server(command, tmp_path / "second.log", environment).wait_ready() as server:
        restarted = [server.ask(tokens) for tokens in asked]
        later = [ask_anew(server, once) for _ in range(2)]
    assert cached(restarted) == WITH_STATE
    assert same(restarted, local)
    assert [cached(answers) for answers in later] == [[0, 0, 0], WITH_STATE], "their attention blocks are on disk"
