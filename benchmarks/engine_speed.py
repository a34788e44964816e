"""How many steps a second the embedded engine makes on one core, with 64 requests running and no cache.

Each run fills the engine with 64 requests of 64 prompt tokens, lets them all start, and times decode steps in which
every one of them gets a token and every written digest is checked. Prints median and spread over the runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

from kvpact_testkit.engine import Engine, EngineConfig, Request

RUNNING = 64
PROMPT_TOKENS = 64


def steps_per_second(oracle: str, steps: int) -> float:
    """One run: steps a second over `steps` decode steps."""
    length = PROMPT_TOKENS + steps + 32
    blocks = RUNNING * (-(-length // 16) + 1) + 1
    config = EngineConfig(
        num_blocks=blocks,
        max_model_len=length,
        max_running=RUNNING,
        max_tokens_per_step=RUNNING * PROMPT_TOKENS,
        oracle="full" if oracle == "full" else "incremental",
    )
    engine = Engine(config)
    for number in range(RUNNING):
        prompt = [number * PROMPT_TOKENS + token for token in range(PROMPT_TOKENS)]
        engine.add_request(Request(f"request-{number}", prompt, steps + 32))
    for _ in range(8):
        engine.step()
    if len(engine.scheduler.running) != RUNNING:
        raise RuntimeError(f"{len(engine.scheduler.running)} requests run, not {RUNNING}")
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return steps / (time.perf_counter() - begin)


def main() -> None:
    """Print one line for each kind of oracle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    for oracle in ("incremental", "full"):
        figures = [steps_per_second(oracle, arguments.steps) for _ in range(arguments.runs)]
        print(
            f"oracle {oracle:<11}  median {statistics.median(figures):7.0f} steps/s  "
            f"(min {min(figures):.0f}, max {max(figures):.0f}, {arguments.runs} runs of {arguments.steps} steps)"
        )


if __name__ == "__main__":
    main()
