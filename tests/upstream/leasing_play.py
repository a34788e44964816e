"""The load of docs/internals/findings.md on `examples/leasing_connector.py`: 40 requests of 192 tokens, 160 stored.

In a process of its own, on the vLLM that it imports first. Usage: leasing_play.py SCHEDULER BLOCKS, where SCHEDULER is
vLLM's `scheduler_cls` or "". On the way something happens to matches that are open, see `EVENTS`. Prints a `Play`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

from kvpact.contract import POSTPONED_STEPS
from kvpact_testkit.vllm.compat import EngineSettings, release
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt

REQUESTS, PROMPT_BLOCKS, STORED_BLOCKS, OUTPUT_TOKENS = 40, 12, 10, 24
TRANSFER = {"kv_connector": "LeasingConnector", "kv_connector_module_path": "leasing_connector"}


@dataclass(slots=True)
class Play:
    """What the connector was told, and what it holds when all requests have ended."""

    release: str
    prepared: int = 0
    matches: int = 0
    """Plans made."""
    ends: list[tuple[str, str]] = field(default_factory=list)
    """Request, and "commit" or the reason of the abort, in order."""
    leases: int = 0
    plans: int = 0
    wrong: list[str] = field(default_factory=list)
    """Requests whose answers are not those without a cache."""


def listen(play: Play) -> None:
    """Note the three calls of a match's life, of requests whose names begin with "r"."""
    from leasing_connector import LeasingConnector

    plans: list[object] = []

    def noting(name: str, note: Callable[..., None]) -> None:
        method = getattr(LeasingConnector, name)

        @wraps(method)
        def noted(connector: Any, request: Any, *arguments: Any) -> Any:
            answer = method(connector, request, *arguments)
            if request.request_id.startswith("r"):
                note(answer, request, *arguments)
            return answer

        setattr(LeasingConnector, name, noted)

    def prepared(answer: Any, request: Any, computed: int) -> None:
        play.prepared += 1
        if answer.num_tokens and not any(plan is answer.query_result for plan in plans):
            plans.append(answer.query_result)
            play.matches += 1

    noting("prepare_external_match", prepared)
    noting("commit_external_match", lambda _, request, *rest: play.ends.append((request.request_id, "commit")))
    noting(
        "abort_external_match",
        lambda _, request, match, reason: play.ends.append((request.request_id, reason.value)),
    )


def cancel(engine: VllmEngine, name: str) -> None:
    """The request's user leaves."""
    engine.abort(name)


def lose_tail(engine: VllmEngine, name: str) -> None:
    """Storage fails: the next lookup finds less."""
    del engine.connector.stored[engine.connector.plans[name][-1]]


def lose_head(engine: VllmEngine, name: str) -> None:
    """Storage fails: the next lookup finds nothing."""
    del engine.connector.stored[engine.connector.plans[name][0]]


def pause(engine: VllmEngine, name: str) -> None:
    """Nothing is looked up for longer than matches are kept."""
    engine.pause(True)
    engine.step(POSTPONED_STEPS + 1)
    engine.pause(False)


def reset(engine: VllmEngine, name: str) -> None:
    """vLLM's prefix cache is emptied, as after a change of weights."""
    engine.reset(running=True, connector=False)


EVENTS = {3: cancel, 7: lose_tail, 11: lose_head, 15: pause, 19: reset, 23: cancel}
"""What happens to the first open match, by the number of requests that have ended."""


def main(scheduler: str, num_blocks: int) -> None:
    """Play it."""
    play, events = Play(release()), dict(EVENTS)
    listen(play)
    settings = EngineSettings(num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=16, scheduler=scheduler)
    engine = VllmEngine(settings, TRANSFER, lambda line: None)
    prompts = [prompt(seed + 1, PROMPT_BLOCKS, tail=0) for seed in range(REQUESTS)]
    for number, tokens in enumerate(prompts):
        engine.add(f"first{number}", tokens[: STORED_BLOCKS * BLOCK + 1], max_tokens=1)
        engine.finish(f"first{number}")
    engine.drain()
    engine.forget_computed()
    names = [f"r{number}" for number in range(REQUESTS)]
    for name, tokens in zip(names, prompts, strict=True):
        engine.add(name, tokens, max_tokens=OUTPUT_TOKENS)
    while not all(map(engine.ended, names)):
        engine.step()
        due = [count for count in events if count <= sum(map(engine.ended, names))]
        waiting = [name for name in engine.connector.plans if engine.status(name) == "WAITING"]
        if due and waiting:
            events.pop(due[0])(engine, waiting[0])
    engine.drain()
    play.leases, play.plans = engine.connector.leases.total(), len(engine.connector.plans)
    answered = [name for name in names if engine.observed.finished[name] != "abort"]
    play.wrong = [name for name in answered if engine.observed.outputs[name] != engine.expected(name)]
    engine.close()
    print(json.dumps(asdict(play)))


if __name__ == "__main__":
    for number in sys.argv[2:]:
        main(sys.argv[1], int(number))
