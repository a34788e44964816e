"""CPU time of a connector's hooks in a step in which running requests get one more token each, and others wait.

vLLM's own scheduler drives kvpact's scheduler half and, in the same run and in turn, those of two connectors of vLLM.
`hooks_us` is that of all hooks in one step, from `schedule()` to the taking in of its outcome, `schedule_us` all of
`schedule()`. All prompts are equally long: of `--block-size` steps one fills, and saves, a block of every request, the
others change nothing. Medians are therefore of the others, and `hooks_mean_us` is of all. `calls` are the functions of
Python that the hooks call in such a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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


def rows(
    running: Sequence[int] = (10, 64, 256, 800),
    waiting: Sequence[int] = (0, 4000),
    subjects: Sequence[str] = SUBJECTS,
    block_size: int = 128,
    steps: int = 256,
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
