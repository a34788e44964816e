"""On a GPU: time to first token of a Llama-3-8B's shape, computed, from kvpact's memory or disk, and from its own KV.

Random weights (`--load-format dummy`), made on the GPU. Each prompt is new: computed ("cold"), asked again ("local
hit"), asked once more after the engine's own prefix cache is emptied ("memory"), and with `disk` asked of a second
process that never computed it. `over_local` is the time over the local hit's of the same prompt, `of_cold` over the
cold one's. Then `decoding` clients decode while prompts are computed or come from memory: `token_ms` are the gaps
between their tokens, `p99_ms` their 99th percentile.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import quote

from benchmarks.needs import find_testbeds, require_vllm
from benchmarks.table import spread
from kvpact.config import load_config
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.gpu import cuda_devices
from kvpact_testkit.demo.model import ModelShape, ensure_model
from kvpact_testkit.demo.phases import class_arguments, drop_page_cache, settle

find_testbeds()

ONE_LAYER = ModelShape(
    layers=1, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=2048, positions=1 << 17
)
LAYERS = 32
TOKEN_BYTES = LAYERS * ONE_LAYER.token_bytes("bfloat16")
ANSWER = 64


def _prompts(seed: int, number: int, tokens: int) -> list[list[int]]:
    source = random.Random(seed)
    return [source.choices(range(16, ONE_LAYER.vocabulary), k=tokens) for _ in range(number)]


def _settings(model: Path, folder: Path, tokens: Sequence[int], readings: int, disk: bool) -> EngineSettings:
    kept = TOKEN_BYTES * (sum(tokens) * readings + max(tokens) * 4)
    said: dict[str, Any] = {"memory": f"{kept}B", "recompute_if_faster": False, "stats_file": str(folder / "stats")}
    if disk:
        said["tiers"] = [f"disk://{quote(str(folder / 'disk'))}?capacity={2 * kept}B"]
    arguments: dict[str, Any] = class_arguments() | {
        "load_format": "dummy",
        "hf_overrides": {"num_hidden_layers": LAYERS},
        "max_model_len": max(tokens) + 2 * ANSWER,
        "max_num_batched_tokens": 8192,
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "kv_cache_memory_bytes": TOKEN_BYTES * max(tokens) * 8,
    }
    return EngineSettings(model, load_config(said, {}).kv_transfer_config(), arguments)


def _first_tokens(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
    """(ms to the first token, cached tokens) of each, one after the other."""
    outputs = [engine.generate([prompt], max_tokens=1)[0] for prompt in prompts]
    return [(output.first_token_seconds * 1e3, output.cached_tokens) for output in outputs]


def _row(tokens: int, what: str, ours: Sequence[tuple[float, int]], **others: Sequence[tuple[float, int]]) -> Any:
    row: dict[str, Any] = {"tokens": tokens, "what": what} | spread("ttft_ms", [ms for ms, _ in ours])
    for name, other in others.items():
        row |= spread(name, [mine / its for (mine, _), (its, _) in zip(ours, other, strict=True)])
    return row | {"cached_tokens": min(cached for _, cached in ours)}


def _beside_decodes(engine: EngineProcess, what: str, arriving: Sequence[Sequence[int]], decoding: int) -> Any:
    """Gaps of clients who decode while the prompts behind them are computed or loaded, in ms."""
    clients = _prompts(77, decoding, 128)
    outputs = engine.crowd([*clients, *arriving], max_tokens=ANSWER, logprobs=0)[:decoding]
    gaps = [(later - sooner) * 1e3 for out in outputs for sooner, later in pairwise(out.token_seconds)]
    row = {"what": f"{decoding} decode beside {what}"} | spread("token_ms", gaps)
    return row | {"p99_ms": round(quantiles(gaps, n=100)[98], 3), "most_ms": round(max(gaps), 3)}


def rows(
    tokens: tuple[int, ...] = (2048, 8192, 32768), readings: int = 5, decoding: int = 16, disk: bool = True
) -> Iterator[dict[str, Any]]:
    """A row of each length and way, then one of each crowd."""
    require_vllm()
    from tiny_engine import TOKENIZER_TEXT

    if not cuda_devices():
        raise ModuleNotFoundError("no GPU", name="torch for CUDA, and a GPU")
    with tempfile.TemporaryDirectory(prefix="kvpact-gpu-") as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        settings = _settings(ensure_model(folder, ONE_LAYER, TOKENIZER_TEXT), folder, tokens, readings, disk)
        asked = {length: _prompts(length, readings, length) for length in tokens}
        cold, local = {}, {}
        with EngineProcess(settings, folder / "log") as engine:
            _warm(engine, max(tokens))
            for length, prompts in asked.items():
                cold[length], local[length] = _first_tokens(engine, prompts), _first_tokens(engine, prompts)
                _forget(engine)
                yield _told(_row(length, "cold", cold[length]))
                yield _told(_row(length, "local hit", local[length], of_cold=cold[length]))
                warm = _first_tokens(engine, prompts)
                yield _told(_row(length, "memory", warm, over_local=local[length], of_cold=cold[length]))
                _forget(engine)
            new = _prompts(5, readings, tokens[0])
            for what, arriving in (("nothing", []), ("computed prompts", new), ("loaded prompts", asked[tokens[0]])):
                yield _told(_beside_decodes(engine, f"{what} of {tokens[0]} tokens", arriving, decoding))
                _forget(engine)
        if not disk:
            return
        drop_page_cache(folder / "disk")
        with EngineProcess(settings, folder / "log-2") as engine:
            _warm(engine, max(tokens))
            for length, prompts in asked.items():
                warm = _first_tokens(engine, prompts)
                yield _told(_row(length, "disk, new process", warm, over_local=local[length], of_cold=cold[length]))


def _forget(engine: EngineProcess) -> None:
    """What comes next comes from kvpact, which has stored everything by now."""
    settle(engine)
    engine.reset_prefix_cache()


def _warm(engine: EngineProcess, longest: int) -> None:
    """Kernels are loaded and copies proven before anything is timed."""
    first = _prompts(1, 70, 64)
    for together in (True, True, False):
        engine.generate(first, max_tokens=1, together=together)
        _forget(engine)
    engine.generate(_prompts(2, 1, longest), max_tokens=2)
    _forget(engine)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed as soon as it is there: the machine may be lent for minutes."""
    print(row, flush=True)
    return row
