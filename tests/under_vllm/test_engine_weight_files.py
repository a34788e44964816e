"""Real engines tell their weights by content: what old weights computed is never served, and nothing waits for it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from hub_cache import add_commit
from kvpact.metrics import series
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from polling import until

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
MODEL = "kvpact-tests/tiny"
BLOCKS = 3
PROMPTS = [prompt(4_400 + number, BLOCKS) for number in range(2)]
WRITTEN = series("written_blocks", "disk")


def change_embeddings(model: Path) -> None:
    """Other values in most rows of the embedding table, none in its first and middle ones; sizes stay."""
    import torch
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"]
    rows = len(table)
    for start, end in ((8, rows // 2 - 8), (rows // 2 + 8, rows)):
        table[start:end] = torch.roll(table[start:end], 1, dims=0)
    save_file(tensors, path, metadata={"format": "pt"})


def has_written(engine: EngineProcess, blocks: int) -> bool:
    return bool(engine.stats().get(WRITTEN, 0) == blocks)


def start(model: object, directory: Path, environment: Mapping[str, str], **transfer: Any) -> EngineProcess:
    """An engine with a tier on disk that is the same for all of them."""
    (directory / "stats.json").unlink(missing_ok=True)
    tiers = [f"disk://{directory}/slabs?capacity=256MiB"]
    config = kvpact_transfer_config(memory="32MiB", tiers=tiers, stats_file=str(directory / "stats.json"))
    places = {"XDG_CACHE_HOME": str(directory / "cache"), **environment}
    settings = EngineSettings(Path(str(model)), {**config, **transfer}, BLOCK_BY_BLOCK, places)
    return ForkedEngine(settings, directory / f"engine-{time.monotonic_ns()}.log").wait_ready()


def same_answers(one: list[Output], other: list[Output]) -> bool:
    return all(mine.same_answer(theirs) for mine, theirs in zip(one, other, strict=True))


def cached(outputs: list[Output]) -> list[int]:
    return [output.cached_tokens for output in outputs]


@pytest.mark.proof
def test_h39_an_engine_serves_before_its_weights_are_told_and_a_restart_finds_what_it_computed_then(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    goes_on = tmp_path / "goes-on"
    slow = {
        "SLOW_WEIGHTS": str(goes_on),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    faulty = {"kv_connector": "SlowWeights", "kv_connector_module_path": "slow_weights"}
    with start(model, tmp_path, slow, **faulty) as engine:
        assert cached(engine.generate(PROMPTS)) == [0, 0]
        local = engine.generate(PROMPTS)
        engine.reset_prefix_cache()
        from_memory = engine.generate(PROMPTS)
        assert cached(from_memory) == [BLOCKS * BLOCK] * 2
        assert same_answers(from_memory, local)
        assert not (tmp_path / "slabs").exists()
        goes_on.touch()
        until(lambda: "identified the model's weights" in engine.log.read_text())
        # An idle engine takes no step, and the tier may open only after the next one.
        until(lambda: bool(engine.generate([prompt(4_500, 0)])) and engine.stats().get(WRITTEN, 0) == 2 * BLOCKS)
        engine.discard()
    goes_on.unlink()
    with start(model, tmp_path, slow, **faulty) as engine:
        found = engine.generate(PROMPTS)
        assert cached(found) == [BLOCKS * BLOCK] * 2, "its weights were remembered"
        assert same_answers(found, local)
        engine.discard()


@pytest.mark.soak
def test_h39_where_rows_of_the_embedding_have_changed_nothing_of_the_old_weights_is_served(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    assert_nothing_in_common(lambda: str(model), model, tmp_path, {})


@pytest.mark.soak
def test_h39_after_a_branch_of_the_hub_has_moved_nothing_of_the_old_weights_is_served(
    tiny_model: Path, tmp_path: Path
) -> None:
    """By the same command, over the same directory."""
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    model = shutil.copytree(tiny_model, tmp_path / "model")

    def push() -> str:
        add_commit(tmp_path / "hub", MODEL, model)
        return MODEL

    assert_nothing_in_common(push, model, tmp_path, hub)


def assert_nothing_in_common(
    publish: Callable[[], str], model: Path, directory: Path, environment: Mapping[str, str]
) -> None:
    """Two engines, one after the other, over one directory on disk; in between the embeddings of `model` change.

    `publish` gives the name under which the model is served.
    """
    answers = []
    for _ in range(2):
        with start(publish(), directory, environment) as engine:
            cold = engine.generate(PROMPTS)
            assert cached(cold) == [0, 0]
            engine.reset_prefix_cache()
            answers.append(engine.generate(PROMPTS))
            assert cached(answers[-1]) == [BLOCKS * BLOCK] * 2
            until(partial(has_written, engine, 2 * BLOCKS))
            engine.discard()
        change_embeddings(model)
    assert not same_answers(*answers), "the weights are others"
    assert len(list((directory / "slabs").glob("kvpact/*.slab"))) == 2
