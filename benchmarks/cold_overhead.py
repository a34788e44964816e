"""What kvpact costs the first prompts after a start, none of which it knows: CPU seconds of its own over the prompt's.

    python benchmarks/cold_overhead.py [--prompts 8] [--starts 1] [--in-a-row] [--memory 4GiB] [--no-disk]
                                       [--leave-out prefault|copy] [--json FILE]

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
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from measured_hooks import FOLDER, LEAVE_OUT, SECONDS, SUSPECTS
from tokenizers import Tokenizer

from kvpact.demo.cpu_time import Look, computed, look_at
from kvpact.demo.engine import EngineProcess, EngineSettings
from kvpact.demo.model import ensure_model
from kvpact.demo.phases import Plan, kvpact_config, settle
from kvpact.demo.text import corpus, prompts

PLAIN, KVPACT = "without", "with kvpact"

PARTS = {
    "kvpact-prefault": "pages",
    "kvpact-save": "copies",
    "kvpact-load": "copies",
    "kvpact-disk": "disk",
    "kvpact-stats": "counts",
}
"""The beginning of a thread's name -> what it is for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One cold prompt: seconds to its first token, CPU seconds, and minor page faults of the worker's own threads.

    `pages_at_rest` is CPU seconds for pages taken after the answer, `taken_mib` how much memory the arena took in all,
    `parts` are kvpact's other CPU seconds by what they were spent on.
    """

    first_token: float
    prompt_cpu: float
    worker_faults: int
    kvpact_faults: int
    pages_at_rest: float
    taken_mib: float
    parts: dict[str, float]

    @property
    def kvpact_cpu(self) -> float:
        """All of kvpact's CPU seconds but those for pages at rest."""
        return sum(self.parts.values())


class Meter:
    """One engine and what its threads have used."""

    def __init__(self, engine: EngineProcess, hook_times: Path | None) -> None:
        self.engine, self._hook_times = engine, hook_times

    def _looks(self) -> dict[int, Look]:
        return look_at(self.engine.processes())

    def _arena_mib(self) -> float:
        """What the arenas of all ranks have of the machine."""
        blocks = 0
        for pid in (pid for pid, name in self.engine.processes().items() if "Worker" in name):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    if "memfd:kvpact-arena" in os.readlink(descriptor):
                        blocks += descriptor.stat().st_blocks
        return blocks * 512 / (1 << 20)

    def _hooks(self) -> dict[str, float]:
        if self._hook_times is None:
            return {}
        files = {file.name.partition("-")[0]: file.read_bytes() for file in self._hook_times.iterdir()}
        return {f"hooks, {half}": SECONDS.unpack(content)[0] for half, content in files.items()}

    def ask(self, asked: Sequence[Sequence[int]]) -> Iterator[Cost]:
        """The cost of each prompt, of which one token is wanted; with several, all but the last are not waited for."""
        hooks, arena, before = self._hooks(), self._arena_mib(), self._looks()
        for number, prompt in enumerate(asked):
            (output,) = self.engine.generate([prompt], max_tokens=1)
            answered = self._looks()
            if output.cached_tokens:
                raise RuntimeError(f"{output.cached_tokens} tokens of a cold prompt came from a cache")
            rested = answered
            if number + 1 == len(asked):
                settle(self.engine)
                rested = self._looks()
            now, arena_now = self._hooks(), self._arena_mib()
            parts, faults = _kvpact_parts(before, rested)
            at_rest = _kvpact_parts(answered, rested)[0].get("pages", 0.0)
            parts["pages"] -= at_rest
            parts.update({name: now[name] - hooks[name] for name in now})
            workers = [look.since(before[pid]) for pid, look in answered.items() if look.computes]
            yield Cost(
                first_token=output.first_token_seconds,
                prompt_cpu=computed(before, answered),
                worker_faults=sum(
                    count for use in workers for name, count in use.minor_faults.items() if "kvpact" not in name
                ),
                kvpact_faults=faults,
                pages_at_rest=at_rest,
                taken_mib=arena_now - arena,
                parts=dict(parts) if self._hook_times is not None else {},
            )
            hooks, arena, before = now, arena_now, rested


def _kvpact_parts(before: dict[int, Look], after: dict[int, Look]) -> tuple[dict[str, float], int]:
    parts: defaultdict[str, float] = defaultdict(float)
    faults = 0
    for pid, look in after.items():
        use = look.since(before[pid])
        for name, seconds in use.cpu_seconds.items():
            if name.startswith("kvpact"):
                what = next((what for start, what in PARTS.items() if name.startswith(start)), name)
                parts[what] += seconds
        parts["ended threads"] += use.of_ended
        faults += sum(count for name, count in use.minor_faults.items() if name.startswith("kvpact"))
    return parts, faults


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
    config |= {"kv_connector": "MeasuredPactConnector", "kv_connector_module_path": "measured_hooks"}
    if chosen.no_disk:
        config["kv_connector_extra_config"]["tiers"] = []
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
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
    parser.add_argument("--json", type=Path, metavar="FILE")
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
    if chosen.json is not None:
        figures = [{name: [asdict(cost) for cost in costs] for name, costs in start.items()} for start in starts]
        chosen.json.write_text(json.dumps({"chosen": vars(chosen) | {"json": None}, "starts": figures}, indent=1))


if __name__ == "__main__":
    main()
