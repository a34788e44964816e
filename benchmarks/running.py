"""CPU time of a connector's hooks in a step in which running requests get one more token each, and others wait.

vLLM's own scheduler drives kvpact's scheduler half and, in the same run and in turn, those of two connectors of vLLM.
`hooks_us` is that of all hooks in one step, from `schedule()` to the taking in of its outcome, `schedule_us` all of
`schedule()`. All prompts are equally long: of `--block-size` steps one fills, and saves, a block of every request, the
others change nothing. Medians are therefore of the others, and `hooks_mean_us` is of all. `calls` are the functions of
Python that the hooks call in such a step.

The last rows are those of KV events: `events_us` is what they add to the hooks, `take_events` with them, for each
block that memory gets or loses. "prompts" has prompts of `--event-tokens`, all blocks of which come in one step, and
memory for one of them, so that each block stored is one removed; "decodes" has requests that store a block at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from statistics import mean, median
from typing import Any

from benchmarks.lifecycle import SUBJECTS, random_prompts, started
from benchmarks.needs import require_vllm
from benchmarks.table import ratio, spread

WARM_UP = 16
"""Steps after the one that computes the prompts, before the first that counts."""
COUNTED = 5
"""Steps in which calls are counted."""


def _measure(
    half: Any, running: int, waiting: int, block_size: int, steps: int
) -> tuple[list[float], list[float], list[int]]:
    """Seconds of the hooks and of `schedule()` in each step, and the calls in some."""
    prompts = random_prompts(running, block_size + 1, running)
    for number, prompt in enumerate(prompts):
        half.add(f"running {number}", prompt, max_tokens=steps + WARM_UP + COUNTED + 8)
    half.step()
    for number in range(waiting):
        half.add(f"waiting {number}", prompts[number % running], max_tokens=1)
    for _ in range(WARM_UP):
        half.step()
    calls = [half.calls_in_step() for _ in range(COUNTED)]
    measured = half.measured_steps(steps)
    return [hooks for hooks, _ in measured], [schedule for _, schedule in measured], calls


def _serve_prompts(half: Any, tokens: int, rounds: int) -> list[float]:
    """Seconds of the hooks for each of so many new prompts."""
    spent = []
    for number in range(rounds):
        (prompt,) = random_prompts(number, tokens, 1)
        spent.append(half.serve({f"prompt {number}": prompt}).total)
        half.forget()
    return spent[WARM_UP:]


def _decode(half: Any, running: int, block_size: int, steps: int) -> list[float]:
    """Seconds of the hooks in steps in which all running requests fill a block, with the step that takes the reports;
    for all of them."""
    hooks, _, _ = _measure(half, running, 0, block_size, steps)
    return [sum(hooks[first : first + block_size]) for first in range(0, steps, block_size)]


def _events_rows(tokens: int, running: int, block_size: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What KV events cost for each block that memory gets or loses: hooks with events beside hooks without, in turn."""
    from benchmarks.lifecycle import transfer
    from benchmarks.scheduler_halves import SchedulerHalf

    steps = 8 * block_size
    for name in ("prompts", "decodes"):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        blocks = tokens // block_size if name == "prompts" else running
        for turn in range(4):
            has_events = turn % 2 == 1
            room = blocks + blocks // 16 if name == "prompts" else running * (steps // block_size + 8)
            shape = {"tokens": tokens, "block_size": block_size, "chunk": 0, "requests": 1}
            if name == "decodes":
                shape |= {"tokens": 2 * block_size + steps + WARM_UP + COUNTED, "requests": running}
            half = SchedulerHalf(transfer("kvpact", room, block_size, None), has_events, **shape)
            with closing(half):
                seconds[has_events] += (
                    _serve_prompts(half, tokens, rounds // 2 + WARM_UP)
                    if name == "prompts"
                    else _decode(half, running, block_size, steps)
                )
        changed = blocks * (2 if name == "prompts" else 1)
        added = (median(seconds[True]) - median(seconds[False])) / changed
        yield {"who": "kvpact's KV events", "of": name, "blocks": changed, "events_us": round(added * 1e6, 3)}


def rows(
    running: Sequence[int] = (10, 64, 256, 800),
    waiting: Sequence[int] = (0, 4000),
    subjects: Sequence[str] = SUBJECTS,
    block_size: int = 128,
    steps: int = 256,
    event_tokens: int = 16_384,
    event_rounds: int = 32,
) -> Iterator[dict[str, Any]]:
    """One row for each connector, number of running and number of waiting requests."""
    require_vllm()
    logging.disable(logging.WARNING)
    for number in running:
        for others in waiting:
            ours = 0.0
            for subject in subjects:
                shape = {"tokens": 2 * block_size + steps + WARM_UP + COUNTED, "block_size": block_size, "chunk": 0}
                with started((subject,), 1, None, 0, **shape, requests=number) as halves:
                    hooks, schedule, calls = _measure(halves[subject], number, others, block_size, steps)
                found = spread("hooks_us", [each * 1e6 for each in hooks])
                found |= {"hooks_mean_us": round(mean(hooks) * 1e6, 4)}
                found |= spread("schedule_us", [each * 1e6 for each in schedule]) | {"calls": median(calls)}
                ours = found["hooks_us"] if subject == "kvpact" else ours
                beside = {"kvpact_over": ratio(ours, found["hooks_us"])} if ours else {}
                yield {"who": subject, "running": number, "waiting": others, **found, **beside}
    if "kvpact" in subjects:
        yield from _events_rows(event_tokens, 256, 16, event_rounds)
