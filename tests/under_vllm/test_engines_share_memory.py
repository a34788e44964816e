"""Real engines on one host that load from each other's memory, without a server, a tier or a setting."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from model_families import deepseek_like, gemma_like, llama4_like, qwen3_next_like
from trainer import ARGUMENTS as TRAINED
from trainer import ENVIRONMENT, Trainer

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, leases_when, prompt
from forked_engine import ForkedEngine
from kvpact.metrics import series
from kvpact_testkit.demo.engine import CORES, EngineSettings, one_core_each
from kvpact_testkit.demo.messages import Output
from polling import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCKS = 6
ALL = BLOCKS * BLOCK
TWO_RANKS = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 27}
TWO_CORES = {CORES: one_core_each(2)}
LATENT = {**TWO_RANKS, "max_model_len": 1024, "max_num_batched_tokens": 1024}
MIXED = [prompt(160 + number, 3) for number in range(32)]
"""96 blocks; an engine's own cache has room for 16, and its memory for 64."""
MIXED_TOKENS = 4
ANSWERS = 2000
UPDATES = 8
STATES = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


@pytest.fixture
def start_all(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., list[ForkedEngine]]]:
    """Starts engines of one model, by default two, which have met."""
    with ExitStack() as stack:

        def start(
            make: Callable[[Path, Path], Path] | None = None,
            arguments: Mapping[str, Any] = BLOCK_BY_BLOCK,
            environment: Mapping[str, str] | None = None,
            count: int = 2,
        ) -> list[ForkedEngine]:
            model = make(tmp_path / "model", tiny_model) if make is not None else tiny_model
            engines = []
            for number in range(count):
                transfer = kvpact_transfer_config(memory="64MiB", stats_file=str(tmp_path / f"{number}.json"))
                settings = EngineSettings(model, transfer, arguments, environment or {})
                engines.append(stack.enter_context(ForkedEngine(settings, tmp_path / f"engine-{number}.log")))
            for engine in engines:
                engine.wait_ready()
            met = f"{count - 1} neighbour"
            until(lambda: all(met in engine.log.read_text() for engine in engines), every=0.1)
            return engines

        yield start


@pytest.mark.parametrize(
    ("make", "arguments", "environment"),
    [
        pytest.param(None, BLOCK_BY_BLOCK, {}, marks=pytest.mark.proof, id="one rank"),
        pytest.param(None, {**BLOCK_BY_BLOCK, **TWO_RANKS}, TWO_CORES, marks=pytest.mark.soak, id="two ranks"),
        pytest.param(deepseek_like, LATENT, TWO_CORES, marks=pytest.mark.soak, id="two ranks with equal bytes"),
        pytest.param(gemma_like, BLOCK_BY_BLOCK, {}, marks=pytest.mark.soak, id="windows"),
        pytest.param(
            llama4_like,
            BLOCK_BY_BLOCK,
            {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"},
            marks=pytest.mark.soak,
            id="chunks",
        ),
        pytest.param(qwen3_next_like, {**BLOCK_BY_BLOCK, **STATES}, {}, marks=pytest.mark.soak, id="states"),
    ],
)
def test_a_prompt_that_one_engine_computed_is_loaded_by_the_other_at_once(
    start_all: Callable[..., list[ForkedEngine]],
    make: Callable[[Path, Path], Path] | None,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
) -> None:
    """Tokens and log-probabilities are those of a local prefix hit."""
    one, other = start_all(make, arguments, environment)
    asked = prompt(130, BLOCKS)
    (computed,) = one.generate([asked], max_tokens=8)
    (local,) = one.generate([asked], max_tokens=8)
    (loaded,) = other.generate([asked], max_tokens=8)
    assert computed.cached_tokens == 0
    assert loaded.same_answer(local)
    assert loaded.cached_tokens == local.cached_tokens >= ALL
    assert leases_when(other, series("used_tokens_from", "neighbours"), loaded.cached_tokens) == 0


@dataclass
class Asker:
    """Asks one engine random prompts, one behind the other, and knows how each is answered by its weights of now.

    Prompts of the same number are equal for all engines.
    """

    engine: ForkedEngine
    by_weights: Sequence[Sequence[Output]]
    """Answers that were computed with the weights of each seed."""
    chance: random.Random
    seed: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def ask(self, count: int) -> None:
        """Ask for so many answers."""
        for _ in range(count):
            number = self.chance.randrange(len(MIXED))
            (answer,) = self.engine.generate([MIXED[number]], max_tokens=MIXED_TOKENS)
            self.answers += 1
            if not answer.same_answer(self.by_weights[self.seed][number]):
                self.wrong.append(f"prompt {number}, weights {self.seed}: {answer}")

    def from_neighbours(self) -> int:
        """Tokens that were loaded from neighbours, of the idle engine."""
        return int(until(self.engine.stats)[series("used_tokens_from", "neighbours")])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_of_three_engines_one_gets_other_weights_and_no_answer_is_of_the_wrong_ones(
    start_all: Callable[..., list[ForkedEngine]],
) -> None:
    """The weights of one change to others and back, each time with a reset, while all three answer the same prompts.

    The engines' own caches and memories hold a part of them, so that the other two load from each other all the time.
    """
    engines = start_all(None, {**TRAINED, "kv_cache_memory_bytes": 1 << 24, "max_model_len": 512}, ENVIRONMENT, 3)
    first = engines[0]

    def computed(seed: int) -> list[Output]:
        Trainer(first).overwrite(seed)
        first.reset_prefix_cache()
        found = [first.generate([tokens], max_tokens=MIXED_TOKENS)[0] for tokens in MIXED]
        assert not any(answer.cached_tokens for answer in found)
        return found

    by_weights = [computed(seed) for seed in (0, 1)]
    assert not any(one.same_answer(other) for one, other in zip(*by_weights, strict=True))
    askers = [Asker(engine, by_weights, random.Random(number)) for number, engine in enumerate(engines)]
    each = ANSWERS // (3 * (UPDATES + 1)) + 1
    with ThreadPoolExecutor(3) as pool:
        for turn in range(UPDATES + 1):
            running = [pool.submit(asker.ask, each) for asker in askers[1:]]
            askers[0].seed = (turn + 1) % 2
            Trainer(first).overwrite(askers[0].seed)
            first.reset_prefix_cache()
            running.append(pool.submit(askers[0].ask, each))
            for one in running:
                one.result()
    assert [asker.wrong for asker in askers] == [[]] * 3
    assert sum(asker.answers for asker in askers) >= ANSWERS
    loaded = [asker.from_neighbours() for asker in askers]
    print(f"{[asker.answers for asker in askers]} answers, {UPDATES + 3} updates, {loaded} tokens from neighbours")
    assert loaded[0] == 0, "nobody has said that the weights that it has are those of others"
    assert min(loaded[1:]) > 0
    until(lambda: not any(engine.stats()["leases_held"] for engine in engines))


@pytest.mark.proof
def test_engines_that_have_other_weights_by_now_load_only_what_the_old_ones_computed(
    start_all: Callable[..., list[ForkedEngine]],
) -> None:
    """One engine's weights are overwritten without a word; later the other one's."""
    one, other = engines = start_all(None, TRAINED, ENVIRONMENT)
    asked = [prompt(140 + number, BLOCKS) for number in range(4)]
    old, new = asked[:2], asked[2:]
    before = [one.generate([tokens], max_tokens=8)[0] for tokens in old]
    Trainer(one).overwrite(1)
    one.reset_prefix_cache()
    after = [one.generate([tokens], max_tokens=8)[0] for tokens in asked]
    assert [output.cached_tokens for output in after] == [0] * 4, "its own are of the old weights"
    assert not any(output.same_answer(then) for output, then in zip(after, before, strict=False))
    there = [other.generate([tokens], max_tokens=8)[0] for tokens in asked]
    assert [output.cached_tokens for output in there] == [ALL, ALL, 0, 0], (
        "it has the old ones, which no other asks for"
    )
    assert all(output.same_answer(then) for output, then in zip(there, before, strict=False))
    Trainer(other).overwrite(1)
    other.reset_prefix_cache()
    again = [other.generate([tokens], max_tokens=8)[0] for tokens in new]
    assert [output.cached_tokens for output in again] == [0] * 2, "nobody has said that they are the same"
    assert all(output.same_answer(there) for output, there in zip(again, after[2:], strict=True))
    assert [leases_when(engine, "lookups", lookups) for engine, lookups in zip(engines, (6, 6), strict=True)] == [0, 0]
