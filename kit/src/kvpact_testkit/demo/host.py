"""The inside of an `EngineProcess`: holds `vllm.LLM` and answers one command line after the other.

Owns nothing but the engine; replies go to the pipe whose number is the first argument, because vLLM prints to standard
output. Never imported by anything: `python -m kvpact_testkit.demo.host`.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from kvpact_testkit.demo.engine import STOP_TIMEOUT
from kvpact_testkit.demo.messages import (
    Arrivals,
    Call,
    Command,
    Crowd,
    Generate,
    Output,
    ReadMetrics,
    Reply,
    Reset,
    Settings,
    Stop,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


def main() -> None:
    """Start the engine that the first line of standard input describes, then serve until told to stop or left alone."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a reader must see the end of the pipe when this process dies
    gc.disable()  # what is loaded stays: looking through it again and again takes a fifth of the time
    from vllm import LLM

    gc.freeze()
    gc.enable()
    replies = os.fdopen(descriptor, "wb")  # closed by the process's end, when it has said in the log why it ended

    def reply(message: Reply) -> None:
        replies.write(msgspec.json.encode(message) + b"\n")
        replies.flush()

    reply(Reply())
    first = sys.stdin.buffer.readline()
    if not first:
        return
    llm = LLM(**msgspec.json.decode(first, type=Settings).arguments)
    reply(Reply(block_size=llm.llm_engine.vllm_config.cache_config.block_size))
    commands = msgspec.json.Decoder(Command)
    for line in sys.stdin.buffer:
        command = commands.decode(line)
        if isinstance(command, Stop):
            break
        try:
            reply(_obey(llm, command))
        except Exception as error:
            reply(Reply(error=f"{type(error).__name__}: {error}"))
    # The default grace of 5 s is too short for a cache that still writes to disk.
    llm.llm_engine.engine_core.shutdown(timeout=STOP_TIMEOUT / 2)
    sys.stdout.flush()
    os._exit(0)  # the engine's processes are gone; taking vLLM's modules apart would take 2 s more


def _obey(llm: LLM, command: Generate | Crowd | Arrivals | ReadMetrics | Reset | Call) -> Reply:
    if isinstance(command, Call):
        module, _, name = command.function.partition(":")
        functions = [getattr(import_module(module), name)] if module else []
        getattr(llm, command.method)(*functions, *command.arguments)
        return Reply()
    if isinstance(command, Reset):
        return Reply(done=bool(llm.reset_prefix_cache(reset_connector=command.connector)))
    if isinstance(command, ReadMetrics):
        counters = [metric for metric in llm.get_metrics() if type(metric).__name__ == "Counter"]
        return Reply(metrics={_name(counter): float(counter.value) for counter in counters})
    if isinstance(command, Arrivals):
        return Reply(outputs=_answer_arrivals(llm, command))
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=command.max_tokens, logprobs=command.logprobs, seed=0, ignore_eos=True
    )
    if isinstance(command, Crowd):
        return Reply(outputs=_serve_crowd(llm, command, sampling))
    salt = {} if command.cache_salt is None else {"cache_salt": command.cache_salt}
    prompts = [{"prompt_token_ids": prompt, **salt} for prompt in command.prompts]
    batches = [prompts] if command.together else [[prompt] for prompt in prompts]
    return Reply(
        outputs=[_output(result) for batch in batches for result in llm.generate(batch, sampling, use_tqdm=False)]
    )


def _name(counter: Any) -> str:
    """One part of several of a name has the values of its labels besides: "vllm:kvpact_read_blocks{disk}"."""
    values = [value for label, value in counter.labels.items() if label not in ("model_name", "engine")]
    return str(counter.name) + (f"{{{','.join(values)}}}" if values else "")


def _serve_crowd(llm: LLM, crowd: Crowd, sampling: SamplingParams) -> list[Output]:
    """Step the engine as its front end does, taking in users and letting them go between steps."""
    engine, choose = llm.llm_engine, random.Random(crowd.seed)
    at_once = crowd.at_once or len(crowd.prompts)
    arriving = deque(range(len(crowd.prompts)))
    timeout = {number: choose.randrange(10 * at_once) for number in arriving if choose.random() < crowd.leaving}
    waiting: dict[int, float] = {}
    came: list[list[float]] = [[] for _ in crowd.prompts]
    outputs: dict[int, Output] = {}
    while arriving or waiting:
        while arriving and len(waiting) < at_once:
            number = arriving.popleft()
            engine.add_request(str(number), {"prompt_token_ids": crowd.prompts[number]}, sampling)
            waiting[number] = time.monotonic()
        for number in [number for number in waiting if number in timeout]:
            timeout[number] -= 1
            if timeout[number] < 0:
                engine.abort_request([str(number)])
                outputs[number] = Output((), (), "abort", 0, 0.0, time.monotonic() - waiting.pop(number))
        for result in engine.step() if waiting else ():
            number = int(result.request_id)
            if (began := waiting.get(number)) is None:
                continue
            came[number] += [time.monotonic() - began] * (len(result.outputs[0].token_ids) - len(came[number]))
            if result.finished:
                del waiting[number]
                times = {"seconds": time.monotonic() - began, "token_seconds": tuple(came[number])}
                outputs[number] = msgspec.structs.replace(_output(result), **times)
    return [outputs[number] for number in range(len(crowd.prompts))]


def _answer_arrivals(llm: LLM, command: Arrivals) -> list[Output]:
    """Step the engine; prompts come when all clients have their first tokens."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    came: dict[str, list[float]] = {}
    outputs: dict[str, Output] = {}

    def arrive(name: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        came[name] = [time.monotonic()]

    def step() -> None:
        if not engine.has_unfinished_requests():
            time.sleep(0.001)  # all clients have their last token: there is nothing to wait for
            return
        for result in engine.step():
            name = result.request_id
            came[name] += [time.monotonic()] * (len(result.outputs[0].token_ids) + 1 - len(came[name]))
            began, *times = came[name]
            seconds = tuple(at - began for at in times)
            outputs[name] = msgspec.structs.replace(_output(result), seconds=seconds[-1], token_seconds=seconds)

    clients = [f"client {number}" for number in range(len(command.clients))]
    for name, prompt in zip(clients, command.clients, strict=True):
        arrive(name, prompt, command.max_tokens)
    while any(len(came[name]) <= command.lead for name in clients):
        step()
    due = time.monotonic()
    prompts = [f"prompt {number}" for number in range(len(command.prompts))]
    for name, prompt in zip(prompts, command.prompts, strict=True):
        while time.monotonic() < due:
            step()
        arrive(name, prompt, 1)
        due = time.monotonic() + command.apart
        while name not in outputs:
            step()
    while time.monotonic() < due:
        step()
    engine.abort_request(clients)
    while engine.has_unfinished_requests():
        step()
    return [outputs[name] for name in (*prompts, *clients)]


def _output(result: RequestOutput) -> Output:
    completion = result.outputs[0]
    return Output(
        tokens=tuple(completion.token_ids),
        logprobs=tuple(
            tuple(sorted((token, entry.logprob) for token, entry in position.items()))
            for position in completion.logprobs or ()
        ),
        finish_reason=completion.finish_reason,
        cached_tokens=result.num_cached_tokens or 0,
        first_token_seconds=result.metrics.first_token_latency if result.metrics is not None else 0.0,
    )


if __name__ == "__main__":
    main()
