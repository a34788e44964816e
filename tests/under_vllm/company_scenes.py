"""kvpact together with everything else that vLLM does, each on a real engine; the tests judge what is returned.

Run in forks of `scene_host`. A scene that takes a folder and is run twice on it is a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from company_answers import Said, Thrice
from company_engine import CompanyEngine, prompt_of, said, schedule_ahead
from company_models import image_token, picture
from vllm import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from engines import BLOCK, BLOCK_BY_BLOCK
from kvpact_testkit.demo.engine import BASE_ARGUMENTS, counts_in
from kvpact_testkit.demo.model import TINY_SHAPE
from tiny_engine import kvpact_transfer_config, prompt

BLOCKS = 5
PLACE = 2 * BLOCK + 44
"""Of an image or a changed embedding: behind two blocks that have nothing of it."""

Held = dict[str, int]
Pages = dict[str, list[str]]
"""Digests of blocks, layer by layer."""


IMAGE_MARKS = 256
"""Below this a token stands for a byte, and for nothing of an image."""

WHOLE_PROMPTS: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 2048}
"""Engine arguments with which a prompt is computed in one step."""


def on_disk(folder: Path) -> dict[str, Any]:
    """kvpact's settings with a disk tier there."""
    return {"tiers": [f"disk://{folder}/slabs?capacity=256MiB"]}


# What a request brings


def adapters(model: Path, folder: Path, paths: list[Path]) -> tuple[list[Thrice], Held]:
    """One prompt without an adapter and with each of these, all of which have the name "style"."""
    engine = CompanyEngine(model, kvpact=on_disk(folder), enable_lora=True, max_lora_rank=8, max_loras=2)
    styles = [None, *(LoRARequest("style", number, str(path)) for number, path in enumerate(paths, 1))]
    seen = [engine.ask_thrice(prompt(1, BLOCKS), lora=style) for style in styles]
    return seen, engine.close()


def images(model: Path, folder: Path, seeds: list[int]) -> tuple[list[Thrice], Held]:
    """One prompt with each of these images behind its second block."""
    engine = CompanyEngine(model, kvpact=on_disk(folder), limit_mm_per_prompt={"image": 1})
    text = [token % IMAGE_MARKS for token in prompt(2, BLOCKS)]
    tokens = [*text[:PLACE], image_token(model), *text[PLACE:]]
    asked = [{"prompt_token_ids": tokens, "multi_modal_data": {"image": picture(seed)}} for seed in seeds]
    return [engine.ask_thrice(one) for one in asked], engine.close()


def embeddings(model: Path, folder: Path, changes: list[float]) -> tuple[list[Thrice], Held]:
    """A prompt of embeddings, to one row of which each of these is added."""
    engine = CompanyEngine(model, kvpact=on_disk(folder), enable_prompt_embeds=True)
    drawn = torch.randn(BLOCKS * BLOCK + 17, TINY_SHAPE.hidden, generator=torch.Generator().manual_seed(3))
    seen = []
    for change in changes:
        rows = drawn.to(torch.bfloat16)
        rows[PLACE] += change
        seen.append(engine.ask_thrice({"prompt_embeds": rows}))
    return seen, engine.close()


# How it is answered


def ngram_speculation(model: Path) -> tuple[Thrice, int, Held]:
    """A prompt that repeats itself; beside the answers, how many guessed tokens were right."""
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = CompanyEngine(model, speculative_config=guesses)
    asked = [*prompt(1, 2, tail=0), *prompt(1, 2, tail=0), *prompt(3, 1)]
    thrice = engine.ask_thrice(asked, max_tokens=40)
    return thrice, int(engine.metric("vllm:spec_decode_num_accepted_tokens")), engine.close()


def eagle_speculation(
    model: Path, draft: Path, folder: Path
) -> tuple[Thrice, list[Said], list[Pages], list[Said], Held]:
    """Answers with guesses of this model.

    Beside them a prompt twice, nothing of it in the engine's own prefix cache, and what then lay in its blocks, by
    layer; the last one is the draft model's. At last a prompt that begins like that one, loaded and computed.
    """
    guesses = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 3}
    engine = CompanyEngine(model, kvpact=on_disk(folder), speculative_config=guesses)
    answers, pages = [], []
    for _ in range(2):
        answer, table = engine.ask_and_look(prompt(1, BLOCKS))
        answers.append(answer)
        pages.append(engine.content(table[:BLOCKS]))
        engine.forget()
    thrice = engine.ask_thrice(prompt(2, BLOCKS), max_tokens=40)
    assert engine.metric("vllm:spec_decode_num_drafts") > 0
    goes_on = [*prompt(1, BLOCKS, tail=0), *prompt(3, 0, tail=17)]
    salts: list[dict[str, Any]] = [{}, {"cache_salt": f"nobody had {time.time_ns()}"}]
    otherwise = [engine.ask({"prompt_token_ids": goes_on, **salt}) for salt in salts]
    return thrice, answers, pages, otherwise, engine.close()


def structured_outputs(model: Path) -> tuple[list[Thrice], list[str], Held]:
    """By a regular expression and by a choice; beside the answers what they say."""
    engine = CompanyEngine(model)
    rules = [StructuredOutputsParams(regex="[ab]{12}"), StructuredOutputsParams(choice=["first", "second"])]
    seen = [
        engine.ask_thrice(prompt(10 + number, BLOCKS), structured_outputs=rule, max_tokens=40, ignore_eos=False)
        for number, rule in enumerate(rules)
    ]
    tokenizer = engine.llm.get_tokenizer()
    texts = [tokenizer.decode(one.loaded.tokens, skip_special_tokens=True) for one in seen]
    return seen, texts, engine.close()


def several_answers(model: Path) -> tuple[Thrice, Held]:
    """Three to one prompt, drawn. vLLM cannot draw with a seed on CPUs where a prompt is computed in parts."""
    engine = CompanyEngine(model, **WHOLE_PROMPTS)
    return engine.ask_thrice(prompt(20, BLOCKS), n=3, temperature=1.0, max_tokens=8), engine.close()


# How it is scheduled


def priorities(model: Path) -> tuple[list[Said], list[Said], list[int], int, Held]:
    """A patient request that is loaded, an urgent one behind it, and memory for one of them when they grow.

    Returns the answers of each alone and together, the order in which they ended and how many preemptions there were.
    In float32, because together they are computed in other batches.
    """
    engine = CompanyEngine(
        model, dtype="float32", scheduling_policy="priority", num_gpu_blocks_override=2 * BLOCKS + 4, max_model_len=1024
    )
    asked = [prompt(30 + number, BLOCKS, tail=BLOCK - 20) for number in range(2)]
    alone = [engine.ask(one, max_tokens=40) for one in asked]
    engine.forget()
    front, outputs = engine.llm.llm_engine, dict[int, Any]()
    for number, one in enumerate(asked):
        front.add_request(str(number), prompt_of(one), engine.sampling(max_tokens=40), priority=5 - number)
    while front.has_unfinished_requests():
        outputs.update({int(output.request_id): output for output in front.step() if output.finished})
    together = [said(outputs[number]) for number in range(len(asked))]
    return alone, together, list(outputs), int(engine.metric("vllm:num_preemptions")), engine.close()


def scheduled(model: Path, arguments: dict[str, Any]) -> tuple[Thrice, dict[str, Any], Held]:
    """With these arguments; beside the answers what the engine made of them.

    With `async_scheduling` the line is undone by which vLLM turns that off on CPUs, "not required".
    """
    if arguments.get("async_scheduling"):
        schedule_ahead()
    engine = CompanyEngine(model, **arguments)
    thrice = engine.ask_thrice(prompt(1, BLOCKS), max_tokens=20)
    made = {
        "scheduler": type(engine.scheduler).__name__,
        "chunked prefill": engine.config.scheduler_config.enable_chunked_prefill,
        "prefix caching": engine.config.cache_config.enable_prefix_caching,
    }
    return thrice, made, engine.close()


def beside_another_connector(model: Path, folder: Path) -> tuple[Thrice, Held]:
    """Under MultiConnector, before vLLM's own connector that stores in files; kvpact has memory only."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "shared")},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [kvpact_transfer_config(memory="64MiB"), other]},
    }
    engine = CompanyEngine(model, transfer=transfer, **WHOLE_PROMPTS)
    return engine.ask_thrice(prompt(1, BLOCKS)), engine.close()


# Streaming sessions

CHUNKS = (0, 3 * BLOCK + 10, 6 * BLOCK + 3, 9 * BLOCK)
"""Where the parts of a session's input begin and end, in tokens."""

ANSWERED = 4
"""Tokens of an answer."""


def streaming(model: Path, folder: Path) -> tuple[list[list[Said]], Said, dict[str, float]]:
    """One session three times: computed, from the engine's own cache, with that one dropped; then its text at once.

    A session gives what was said to each part. The engine's core is a process of its own, so the counts come from a
    file.
    """
    return asyncio.run(_stream(model, folder))


async def _stream(model: Path, folder: Path) -> tuple[list[list[Said]], Said, dict[str, float]]:
    file = folder / "stats.json"
    arguments = {
        **BASE_ARGUMENTS,
        **BLOCK_BY_BLOCK,
        "model": str(model),
        "kv_cache_memory_bytes": 1 << 28,
        "kv_transfer_config": kvpact_transfer_config(memory="64MiB", stats_file=str(file)),
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    tokens = prompt(1, 9, tail=0)
    parts = [tokens[begin:end] for begin, end in pairwise(CHUNKS)]
    try:
        sessions = []
        for number in range(3):
            sessions.append(await _session(llm, str(number), parts))
            if number:
                await _forget(llm)
        first, second, _ = (one.tokens[:-1] for one in sessions[0])  # the last token of a part is not computed
        text = [*parts[0], *first, *parts[1], *second, *parts[2]]
        sampling = _streamed(RequestOutputKind.FINAL_ONLY)
        outputs = [output async for output in llm.generate(prompt_of(text), sampling, "at once")]
        await asyncio.sleep(1.0)
        return sessions, said(outputs[-1]), counts_in(file)
    finally:
        llm.shutdown()


def _streamed(kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=ANSWERED, logprobs=5, seed=None, ignore_eos=True, output_kind=kind
    )


async def _session(llm: AsyncLLM, name: str, parts: list[list[int]]) -> list[Said]:
    """What was said to each part; the next one comes when the last is answered."""
    answered = asyncio.Event()

    async def inputs() -> AsyncIterator[StreamingInput]:
        for part in parts:
            answered.clear()
            yield StreamingInput(prompt_of(part))
            await answered.wait()

    tokens, places = list[int](), list[Any]()
    async for output in llm.generate(inputs(), _streamed(RequestOutputKind.DELTA), name):
        word = said(output)  # of several tokens where this process was slow
        tokens += word.parts[0][0]
        places += word.parts[0][1]
        if len(tokens) % ANSWERED == 0:
            answered.set()
    spans = [slice(begin, begin + ANSWERED) for begin in range(0, len(tokens), ANSWERED)]
    return [Said(word.cached_blocks, ((tuple(tokens[span]), tuple(places[span])),)) for span in spans]


async def _forget(llm: AsyncLLM) -> None:
    until = time.monotonic() + 20.0
    while not await llm.reset_prefix_cache():
        assert time.monotonic() < until, "blocks are still protected"
        await asyncio.sleep(0.05)
