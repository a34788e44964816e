"""A crowd on a real engine under `kvpact.vllm.scheduler`, with and without a cache; the tests judge what is returned.

Run in forks of `scene_host`. Who comes and leaves depends on the seed and the number of steps alone.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from company_engine import CompanyEngine, prompt_of, schedule_ahead
from vllm import LLM, SamplingParams

from kvpact_testkit.demo.engine import BASE_ARGUMENTS

BLOCK = 32
ARGUMENTS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 24,
    "max_model_len": 12 * BLOCK,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "dtype": "float32",
    "scheduler_cls": "kvpact.vllm.scheduler.pact_scheduler",
}
AT_ONCE, MAX_TOKENS = 12, 20
LEAVES, PATIENCE = 0.3, 25
"""The part of the users that leave, and the most steps after which they do."""

Answer = tuple[tuple[int, float, float], ...]
"""Of each token: itself, its log-probability, and that of the next best one."""


def crowd(
    model: Path, asked: list[list[int]], seed: int, cache: bool, overlap: bool
) -> tuple[dict[int, Answer], dict[str, Any]]:
    """Answer these prompts, of which at most `AT_ONCE` are in the engine; some users leave. What was seen, and counts.

    vLLM turns asynchronous scheduling off on CPUs, "not required"; with `overlap` that is undone.
    """
    if overlap:
        schedule_ahead()
    arguments = {**ARGUMENTS, "async_scheduling": overlap}
    settings = {"memory": "24MiB", "sync_load_budget": "512KiB"}
    company = CompanyEngine(model, kvpact=settings, **arguments) if cache else None
    llm = company.llm if company is not None else LLM(**{**BASE_ARGUMENTS, "model": str(model), **arguments})
    front: Any = llm.llm_engine
    choose_user, waiting, answers = Random(seed), list(enumerate(asked)), dict[int, Answer]()
    inside, leaving, step = set[int](), dict[int, int](), 0
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, seed=0, ignore_eos=True)
    while waiting or inside:
        while waiting and len(inside) < AT_ONCE:
            number, tokens = waiting.pop(0)
            front.add_request(str(number), prompt_of(tokens), sampling)
            inside.add(number)
            if choose_user.random() < LEAVES:
                leaving[number] = step + choose_user.randrange(PATIENCE)
        for output in front.step():
            if output.finished:
                number = int(output.request_id)
                inside.discard(number)
                leaving.pop(number, None)
                answers[number] = _answer(output)
        step += 1
        gone = [number for number, until in leaving.items() if until <= step]
        front.abort_request([str(number) for number in gone])
        for number in gone:
            inside.discard(number)
            del leaving[number]
    scheduler = front.engine_core.engine_core.scheduler
    seen: dict[str, Any] = {"scheduler": type(scheduler).__name__, "steps": step, "answers": len(answers)}
    if company is not None:
        (tracker,) = scheduler.exits.trackers
        seen |= {"dropped": dict(tracker.ends), "postponed": dict(tracker.postponed), "commits": tracker.commits}
        seen |= {"preemptions": company.metric("vllm:num_preemptions"), "counts": company.counts}
        seen["held"] = company.close()
    return answers, seen


def _answer(output: Any) -> Answer:
    (part,) = output.outputs
    said = []
    for token, place in zip(part.token_ids, part.logprobs, strict=True):
        others = [entry.logprob for other, entry in place.items() if other != token]
        said.append((token, place[token].logprob, max(others)))
    return tuple(said)
