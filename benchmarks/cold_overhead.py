"""What kvpact costs the first prompts after a start, none of which it knows: CPU seconds of its own over the prompt's.

    python benchmarks/cold_overhead.py [--prompts 8] [--starts 1] [--in-a-row] [--memory 4GiB] [--no-disk]
                                       [--leave-out prefault|copy] [--output FILE]

Two real vLLM engines on one core of the CPU, the model and documents of `kvpact demo`: one with kvpact (memory and
disk) and one without. Nothing warms them up. Each prompt is new to both and is answered by one engine while the other
stands still; who begins changes with every prompt and start. With `--in-a-row` an engine answers all its prompts one
directly after the other, so that what is left of one happens during the next.

A prompt's CPU seconds are those of the worker's own threads from the question to the answer. kvpact's are those of its
threads in both processes from the question until the cache rests, and those inside its hooks on the engine's threads
(`measured_hooks.py`). Pages that the arena takes after the answer, while the engine rests, have a column of their own
and are no part of the ratio. Neither contains time that the machine gave to others; times to first token do, and are
printed beside them as a witness.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cold_costs import FOLDER, Cost, Meter
from benchmarks.measured_hooks import LEAVE_OUT, SUSPECTS
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.model import ensure_model
from kvpact_testkit.demo.phases import Plan, kvpact_config
from kvpact_testkit.demo.text import corpus, prompts

PLAIN, KVPACT = "without", "with kvpact"


def one_start(
    directory: Path,
    model: Path,
    asked: Sequence[Sequence[int]],
    plan: Plan,
    chosen: argparse.Namespace,
    *,
    kvpact_first: bool,
) -> dict[str, list[Cost]]:
    """Both engines' costs of each prompt, from their start on."""
    for name in ("disk", "hooks"):
        (directory / name).mkdir()
    config = kvpact_config(directory / "disk", directory / "stats.json", chosen.memory or plan.memory)
    config |= {"kv_connector": "MeasuredPactConnector", "kv_connector_module_path": "benchmarks.measured_hooks"}
    if chosen.no_disk:
        config["kv_connector_extra_config"]["tiers"] = []
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, FOLDER: str(directory / "hooks"), LEAVE_OUT: chosen.leave_out}
    arguments = plan.engine_arguments()
    settings = {
        PLAIN: EngineSettings(model, None, arguments),
        KVPACT: EngineSettings(model, config, arguments, environment),
    }
    with ExitStack() as stack:
        meters = {}
        for number, (name, setting) in enumerate(settings.items()):
            # One after the other, as in life; the one with kvpact last, because what it does first is looked at.
            engine = EngineProcess(setting, directory / f"{number}.log")
            stack.callback(engine.kill)
            engine.wait_ready()
            meters[name] = Meter(engine, directory / "hooks" if name == KVPACT else None)
        costs: dict[str, list[Cost]] = {name: [] for name in meters}
        groups = [asked] if chosen.in_a_row else [[prompt] for prompt in asked]
        names = [KVPACT, PLAIN] if kvpact_first else [PLAIN, KVPACT]
        for group in groups:
            for name in names:
                with ExitStack() as still:
                    for other in names:
                        if other != name:
                            still.enter_context(meters[other].engine.frozen())
                    costs[name].extend(meters[name].ask(group))
            names.reverse()
        return costs


def show(starts: Sequence[dict[str, list[Cost]]]) -> None:
    """Print, for each prompt number, the median over starts of all figures."""
    parts = sorted({name for start in starts for cost in start[KVPACT] for name in cost.parts})
    headings = [
        "prompt",
        "CPU without, s",
        "with, s",
        *(f"{name}, ms" for name in parts),
        "kvpact / prompt",
        "pages at rest, ms",
    ]
    headings += ["faults without", "with", "of kvpact's", "taken, MiB", "first token, ratio"]
    print("| " + " | ".join(headings) + " |")
    print("|" + "---|" * len(headings))
    for number in range(len(starts[0][KVPACT])):
        plain, ours = ([start[name][number] for start in starts] for name in (PLAIN, KVPACT))
        cells = [f"{number + 1}", *(f"{median(cost.prompt_cpu for cost in each):.2f}" for each in (plain, ours))]
        cells += [f"{median(cost.parts.get(name, 0.0) for cost in ours) * 1e3:.1f}" for name in parts]
        cells.append(f"{median(cost.kvpact_cpu / cost.prompt_cpu for cost in ours):.2%}")
        cells.append(f"{median(cost.pages_at_rest for cost in ours) * 1e3:.1f}")
        cells += [f"{median(cost.worker_faults for cost in each):,.0f}" for each in (plain, ours)]
        cells.append(f"{median(cost.kvpact_faults for cost in ours):,.0f}")
        cells.append(f"{median(cost.taken_mib for cost in ours):,.0f}")
        ratios = [our.first_token / other.first_token - 1 for our, other in zip(ours, plain, strict=True)]
        print("| " + " | ".join([*cells, f"{median(ratios):+.1%}"]) + " |")


def main() -> None:
    """Print the table, medians over starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--in-a-row", action="store_true")
    parser.add_argument("--memory", default="")
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--leave-out", choices=[*SUSPECTS], default="")
    parser.add_argument("--output", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    text, plan = corpus(), Plan.for_this_machine()
    starts = []
    with tempfile.TemporaryDirectory(prefix="kvpact-cold-") as directory:
        model = ensure_model(Path(directory), plan.shape, text)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        body = tokenizer.encode(text).ids
        asked = prompts(tokenizer, body, reading="cold", document_tokens=plan.document_tokens, count=chosen.prompts)
        for number in range(chosen.starts):
            began = time.monotonic()
            folder = Path(directory, f"start-{number}")
            folder.mkdir()
            begins = number % 2 == 0
            starts.append(one_start(folder, model, asked, plan, chosen, kvpact_first=begins))
            print(f"start {number + 1} of {chosen.starts}: {time.monotonic() - began:.0f} s", flush=True)
    show(starts)
    if chosen.output is not None:
        figures = [{name: [asdict(cost) for cost in costs] for name, costs in start.items()} for start in starts]
        chosen.output.write_text(json.dumps({"chosen": vars(chosen) | {"output": None}, "starts": figures}, indent=1))


if __name__ == "__main__":
    main()
