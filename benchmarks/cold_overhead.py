"""What kvpact adds to prompts that it does not know yet: the time to first token with it over that without it.

    python benchmarks/cold_overhead.py [--prompts 8]

Three real vLLM engines on one core of the CPU, the model and documents of `kvpact demo`: one with kvpact (memory and
disk) and two without. Each prompt is new to all three and is answered by one engine while the others stand still, the
order changing from prompt to prompt. The two engines without kvpact differ by what the machine does to such a
comparison, which is printed beside kvpact's ratio. Beside the time itself there are the CPU seconds of the worker that
computes, which exclude the time that a host machine gave to others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from tokenizers import Tokenizer

from kvpact.demo.engine import EngineProcess, EngineSettings
from kvpact.demo.model import ensure_model
from kvpact.demo.phases import Plan, kvpact_config, settle
from kvpact.demo.text import corpus, prompts

PLAIN, KVPACT, CONTROL = "without", "with kvpact", "without, again"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """One cold prompt: seconds to its first token, and CPU seconds of the worker until the answer."""

    first_token: float
    worker_cpu: float


def cpu_seconds(engine: EngineProcess) -> float:
    """What the processes that compute have used so far."""
    workers = [pid for pid, name in engine.processes().items() if "Worker" in name]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in workers]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def ask(engine: EngineProcess, prompt: Sequence[int]) -> Cost:
    """The cost of one prompt, of which one token is wanted."""
    before = cpu_seconds(engine)
    (output,) = engine.generate([prompt], max_tokens=1)
    cost = Cost(output.first_token_seconds, cpu_seconds(engine) - before)
    settle(engine)
    if output.cached_tokens:
        raise RuntimeError(f"{output.cached_tokens} tokens of a cold prompt came from a cache")
    return cost


def turns(engines: dict[str, EngineProcess], asked: Sequence[Sequence[int]]) -> dict[str, list[Cost]]:
    """Each prompt on each engine alone; who begins changes with every prompt."""
    costs: dict[str, list[Cost]] = {name: [] for name in engines}
    names = list(engines)
    for number, prompt in enumerate(asked):
        for name in names:
            with ExitStack() as still:
                for other in names:
                    if other != name:
                        still.enter_context(engines[other].frozen())
                costs[name].append(ask(engines[name], prompt))
        print(f"prompt {number + 1}: " + ", ".join(f"{name} {costs[name][-1].first_token:.2f} s" for name in engines))
        names = [*names[1:], names[0]] if number % 2 else names[::-1]
    return costs


def line(name: str, over: Sequence[float], under: Sequence[float]) -> str:
    """The median and quartiles of a ratio, prompt by prompt, as a surcharge."""
    ratios = [a / b - 1 for a, b in zip(over, under, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return f"{name}: median {median(ratios):+.1%}, quartiles {low:+.1%} to {high:+.1%}"


def main() -> None:
    """Print each prompt's times, then the surcharges of kvpact and of a second engine without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    wanted = parser.parse_args().prompts
    text, plan = corpus(), Plan.for_this_machine()
    with tempfile.TemporaryDirectory(prefix="kvpact-cold-") as directory, ExitStack() as stack:
        work = Path(directory)
        (work / "disk").mkdir()
        model = ensure_model(work, plan.shape, text)
        configs = {PLAIN: None, KVPACT: kvpact_config(work / "disk", work / "stats.json", plan.memory), CONTROL: None}
        engines = {
            name: EngineProcess(EngineSettings(model, config, plan.engine_arguments()), work / f"{number}.log")
            for number, (name, config) in enumerate(configs.items())
        }
        for engine in engines.values():
            stack.callback(engine.kill)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        body = tokenizer.encode(text).ids

        def make(reading: str, count: int, tokens: int) -> list[list[int]]:
            return prompts(tokenizer, body, reading=reading, document_tokens=tokens, count=count)

        warm_up, asked = make("to warm up", 2, plan.document_tokens // 8), make("cold", wanted, plan.document_tokens)
        for engine in engines.values():
            engine.generate(warm_up)
            settle(engine)
        costs = turns(engines, asked)
    for what, of in (("time to first token", lambda cost: cost.first_token), ("CPU", lambda cost: cost.worker_cpu)):
        figures = {name: [of(cost) for cost in each] for name, each in costs.items()}
        print(line(f"{what}, with kvpact over without", figures[KVPACT], figures[PLAIN]))
        print(line(f"{what}, without over without (the noise)", figures[CONTROL], figures[PLAIN]))


if __name__ == "__main__":
    main()
