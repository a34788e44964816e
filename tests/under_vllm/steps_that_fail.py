"""Plays a lost copy of a step on the release that this process imports; `steps_that_fail.py [NAME ...]` prints JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpact.config import load_config
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt

SETTINGS: dict[str, dict[str, Any]] = {
    "one step at a time": {},
    "drafts": {"draft_tokens": 2},
    "asynchronous": {"overlap": True},
    "asynchronous drafts": {"overlap": True, "draft_tokens": 2},
    "two stages": {"overlap": True, "stages": 2, "layers": 3},
    "prompts in parts": {"overlap": True, "chunk": 7 * BLOCK},
    "few blocks": {"overlap": True, "num_blocks": 34, "chunk": 7 * BLOCK},
}
FINDER = prompt(1, 8)
SHARER = [*FINDER[: 6 * BLOCK], *prompt(2, 3)]
"""Shares the stem with `FINDER`."""
STRANGER = prompt(3, 5)
TOKENS = 6


def asks(store: Path) -> dict[str, Any]:
    """Settings of an engine that asks this store when a step begins."""
    tiers = [f"dir://{store}?capacity=64MiB"]
    return {"memory": "4MiB", "model_id": "testkit", "tiers": tiers, "match_at": "step", "step_deadline": "8s"}


@contextmanager
def engine_over(config: dict[str, Any], **settings: Any) -> Iterator[VllmEngine]:
    """An engine with these settings of kvpact, and with its scheduler class."""
    transfer = {**load_config({}, {}).kv_transfer_config(), "kv_connector_extra_config": config}
    transfer["kv_load_failure_policy"] = settings.get("failure_policy", "recompute")
    scheduler = "kvpact.vllm.scheduler.pact_scheduler"
    engine = VllmEngine(EngineSettings(scheduler=scheduler, **settings), transfer, lambda line: None)
    try:
        yield engine
    finally:
        engine.close()


def break_next_load(engine: VllmEngine) -> list[int]:
    """The next copy into the last stage's blocks fails; the list gets an item when it did."""
    copier: Any = engine.ranks[-1].connector.cache_worker.transfers.engine.copier
    scatter, failed = copier.scatter, list[int]()

    def fail(*arguments: Any) -> None:
        if not failed:
            failed.append(1)
            raise RuntimeError("injected")
        scatter(*arguments)

    copier.scatter = fail
    return failed


def play(name: str, *, cancelled: str = "", failure_policy: str = "recompute") -> dict[str, Any]:
    """Two requests share a stem whose copy fails; a third one runs. What came of it."""
    settings = {**SETTINGS[name], "failure_policy": failure_policy}
    layers = {key: value for key, value in settings.items() if key in ("stages", "layers")}
    with tempfile.TemporaryDirectory() as folder:
        with engine_over(asks(Path(folder)), **layers) as engine:
            engine.add("writer", FINDER)
            assert engine.finish()
            assert engine.drain()
        with engine_over(asks(Path(folder)), **settings) as engine:
            told = tell_cached(engine)
            engine.add("stranger", STRANGER, max_tokens=8 * TOKENS)
            engine.step(2)
            failed = break_next_load(engine)
            engine.add("finder", FINDER, max_tokens=TOKENS)
            engine.add("sharer", SHARER, max_tokens=TOKENS)
            engine.step()
            assert failed, "the step loads from the store"
            if cancelled:
                engine.abort(cancelled, during_step=True)
            stranger = engine.scheduler.requests["stranger"]
            assert engine.finish()
            assert engine.drain()
            engine.add("later", SHARER, max_tokens=TOKENS)
            assert engine.finish()
            assert engine.drain()
            asked = engine.connector.scheduler_side.mounted
            asked.cache.check()
            names = ("stranger", "finder", "sharer", "later")
            return {
                "wrong": [
                    one for one in names if one != cancelled and engine.observed.outputs[one] != engine.expected(one)
                ],
                "said": {one: engine.observed.outputs[one] for one in ("finder", "sharer")},
                "published": engine.wrong_published(),
                "cached": told,
                "preempted": stranger.num_preemptions,
                "ended": engine.observed.finished,
                "held": engine.held_blocks,
                "leases": asked.observe()["leases_held"],
            }


def tell_cached(engine: VllmEngine) -> dict[str, int]:
    """Request -> `num_cached_tokens`, as soon as its first answer is out."""
    told: dict[str, int] = {}
    schedule, update = engine.scheduler.schedule, engine.scheduler.update_from_output

    def checked(*arguments: Any) -> Any:
        output = schedule(*arguments)
        cached = output.scheduled_cached_reqs
        assert cached.resumed_req_ids <= cached.all_token_ids.keys(), "vLLM's first model runner needs their tokens"
        return output

    def watched(*arguments: Any) -> Any:
        results = update(*arguments)
        for one in (one for each in results.values() for one in each.outputs if one.prefill_stats is not None):
            assert one.request_id not in told
            told[one.request_id] = one.prefill_stats.num_cached_tokens
        return results

    engine.scheduler.schedule, engine.scheduler.update_from_output = checked, watched
    return told


if __name__ == "__main__":
    print(json.dumps({name: play(name) for name in sys.argv[1:] or SETTINGS}))
