"""What only a GPU can prove: python scripts/run_gpu.py [--plan] [--out DIR] [--seconds S] [--only PART ...]

`--plan` runs nothing: it lists the parts in their order, which is that of their worth if the run is cut off, with the
seconds that each is expected to take and may take. Those with engines are left out where vLLM cannot be imported. Needs
torch for CUDA, the packages that kvpact and its tests import, and no network.

DIR/gpu-results.json has all that was found so far, and DIR/gpu-results.md a table for benchmarks/RESULTS.md: both are
written as results come, and are whole if this process is killed. It ends after S seconds, 570 unless told otherwise.
The exit status is 0 if all that was run is good, 1 if not, and 2 if nothing can be run here, which one line explains.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src", ROOT / "kit" / "src")
GRAPHS = "tests/worker/test_graphs.py"
SUITE = ("tests/worker", f"--ignore={GRAPHS}")
DEVICE_TESTS = ("-k", "cuda and not fake", "-v", "-p", "no:cacheprovider", "--color=no")

SECONDS = 570.0
"""Ten minutes, less what it takes to begin and to bring the results away."""

ON_THE_DEVICE = re.compile(r"(?:\[|(?<!fake)-)cuda[\]-]")
"""In the name of a test that runs on a real device: "cuda" as one of its parameters, and not "fake-cuda"."""

TEST = re.compile(r"(tests/.+?\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
"""A line of pytest's that says how a test ended."""

NEEDED = (
    "blake3",
    "hypothesis",
    "msgspec",
    "numpy",
    "prometheus_client",
    "pydantic",
    "pytest",
    "pytest_timeout",
    "xxhash",
)
"""What the tests and the examination import; the demonstration needs typer and rich too."""

LOOK = """
import contextlib, importlib.util, json, os, platform, re, sys
found = {"python": platform.python_version(), "kernel": platform.release(), "cores": len(os.sched_getaffinity(0))}
found["ram_gib"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
found["has_vllm"] = importlib.util.find_spec("vllm") is not None
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.version.cuda and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        with contextlib.suppress(OSError, TypeError):
            said = open("/proc/driver/nvidia/version").read()
            found["driver"] = re.search(r"Kernel Module.*?\\s(\\d+\\.\\d+(?:\\.\\d+)?)\\s", said)[1]
except ImportError as error:
    found["torch_error"] = str(error)
print(json.dumps(found))
"""

Results = dict[str, Any]

Run = Callable[[Results, float, Path], Iterator[Results]]
"""(the machine, when it must be over, where files may lie) -> what is found so far, again and again."""


@dataclass(frozen=True)
class Part:
    """A part of the run. `expected_seconds` are an estimate, also where no GPU has run it."""

    run: Run
    expected_seconds: int
    most_seconds: int
    """Its budget: it is ended then, with what it has found. Parts that `--only` names share the whole time."""
    proves: str


class Unusable(Exception):
    """Nothing can be run here. One line for people."""


def environment() -> dict[str, str]:
    """This process's, with the checkout's source first."""
    others = os.environ.get("PYTHONPATH")
    sampler = {} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # vLLM takes it to be there
    return {**sampler, **os.environ, "PYTHONPATH": os.pathsep.join([*map(str, SOURCES), *([others] if others else [])])}


class Child:
    """Python in the checkout. Iterate over its lines, which are printed too; `status` is then its exit status.

    It is killed when the time is over.
    """

    def __init__(self, until: float, *arguments: str) -> None:
        self.status, self.out_of_time = -1, False
        self._process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._timer = threading.Timer(max(0.0, until - time.monotonic()), self._kill)
        self._timer.daemon = True

    def _kill(self) -> None:
        self.out_of_time = True
        self._process.kill()

    def __iter__(self) -> Iterator[str]:
        assert self._process.stdout is not None
        self._timer.start()
        for line in self._process.stdout:
            print(line, end="", flush=True)
            yield line
        self.status = self._process.wait()
        self._timer.cancel()

    def ended(self) -> Results:
        """How it ended, for the results."""
        return {"exit_status": self.status} | ({"out_of_time": True} if self.out_of_time else {})


def look() -> Results:
    """The machine, as torch sees it. Raises Unusable without a GPU for CUDA, or without a package."""
    command = [sys.executable, "-c", LOOK, *NEEDED]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"{sys.executable} fails: {done.stderr.strip().rpartition(chr(10))[2]}")
    found: Results = json.loads(done.stdout)
    if "torch_error" in found:
        raise Unusable(
            f"{sys.executable} has no torch ({found['torch_error']}); ./scripts/setup_venv.sh engine=cuda dev brings it"
        )
    if not found["cuda"]:
        raise Unusable(
            f"torch {found['torch']} is not built for CUDA; ./scripts/setup_venv.sh engine=cuda dev takes one that is"
        )
    if not found.get("gpus"):
        raise Unusable(f"torch {found['torch']} sees no GPU: torch.cuda.is_available() is false")
    if found["missing"]:
        raise Unusable(
            f"{sys.executable} lacks {', '.join(found['missing'])}; scripts/pack_vllm.py packs them for a machine "
            "without network"
        )
    return {name: value for name, value in found.items() if name != "missing"} | {"commit": commit()}


def commit() -> str:
    """Of the checkout; "" where git does not know."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def tests(*which: str) -> Run:
    """A part that runs tests: good if they pass, and some ran on the device."""

    def run(machine: Results, until: float, out: Path) -> Iterator[Results]:
        counts: Counter[str] = Counter()
        on_device = 0
        bad: list[str] = []
        child = Child(until, "-m", "pytest", *which, *DEVICE_TESTS)

        def found(good: bool) -> Results:
            kinds = {kind.lower(): counts[kind] for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
            return {"good": good, **kinds, "passed_on_the_device": on_device, "bad": [*bad]}

        for line in child:
            if (test := TEST.search(line)) is not None:
                counts[test[2]] += 1
                on_device += test[2] == "PASSED" and bool(ON_THE_DEVICE.search(test[1]))
                bad += [test[1]] if test[2] in ("FAILED", "ERROR") else []
                yield found(good=False)
        yield found(good=child.status == 0 and on_device > 0 and not bad) | child.ended()

    return run


def doctor(machine: Results, until: float, out: Path) -> Iterator[Results]:
    """What `kvpact doctor --gpu` found."""
    yield from reporting(until, out / "doctor.json", "-m", "kvpact", "doctor", "--gpu")


def answers(machine: Results, until: float, out: Path) -> Iterator[Results]:
    """What engines answered with kvpact and without it."""
    if machine["has_vllm"]:
        yield from reporting(until, out / "answers.json", str(ROOT / "scripts" / "gpu_answers.py"))
    else:
        yield dict(NO_VLLM)


def reporting(until: float, report: Path, *command: str) -> Iterator[Results]:
    """A command that writes to `report`, as it goes on, what it finds."""
    report.unlink(missing_ok=True)
    child = Child(until, *command, "--output", str(report))
    for _ in child:
        yield {"good": False, "report": read(report)}
    yield {"good": child.status == 0, "report": read(report)} | child.ended()


def benchmark(name: str, *options: str) -> Run:
    """A part whose rows are a benchmark's, as they are printed; "{out}" in an option is a folder for files."""

    def run(machine: Results, until: float, out: Path) -> Iterator[Results]:
        if not machine["has_vllm"]:
            yield dict(NO_VLLM)
            return
        rows: list[Results] = []
        child = Child(until, "-m", "benchmarks", name, *(option.format(out=out) for option in options))
        for line in child:
            if line.startswith("{'"):
                rows.append(ast.literal_eval(line) | {"gpu": machine["gpus"][0]})
                yield {"good": False, "rows": [*rows]}
        yield {"good": child.status == 0 and bool(rows), "rows": rows} | child.ended()

    return run


def demo(machine: Results, until: float, out: Path) -> Iterator[Results]:
    """The demonstration's figures with one rank, and with two."""
    if not machine["has_vllm"]:
        yield dict(NO_VLLM)
        return
    runs: Results = {}
    for ranks in (1, 2)[: len(machine["gpus"])]:
        with tempfile.TemporaryDirectory(prefix="kvpact-demo-") as work:
            command = ("-m", "kvpact_testkit", "demo", "--tp", str(ranks), "--work", str(Path(work) / "work"))
            for found in reporting(until, Path(work) / "demo.json", *command):
                runs[str(ranks)] = found
                yield {"good": False, "ranks": runs}
    yield {"good": all(one["good"] for one in runs.values()), "ranks": runs}


def read(report: Path) -> Any:
    """What a part has written so far; None if it has not."""
    try:
        return json.loads(report.read_text())
    except (OSError, ValueError):
        return None


NO_VLLM = {"good": True, "left_out": "vLLM cannot be imported here"}

PARTS: dict[str, Part] = {
    "graphs": Part(tests(GRAPHS), 35, 60, "captured graphs read what was loaded before they were replayed"),
    "suite": Part(tests(*SUITE), 55, 80, "the other tests of the copies; resets and failed checks with the proof on"),
    "answers": Part(answers, 140, 180, "engines say the same with kvpact and without it, with groups and with states"),
    "first_token": Part(benchmark("gpu_first_token"), 95, 130, "first tokens of five subjects in turns; a hit in time"),
    "gaps": Part(
        benchmark("gpu_gaps", "--compiled", "--steps", "{out}/steps"),
        130, 170, "gaps of others beside 100 prompts of each kind; then under vLLM's default compilation",
    ),
    "offloading": Part(
        benchmark("gpu_restart", "--readings", "2", "--through", "offloading"),
        60, 80, "first tokens from a disk below vLLM's own offloading (`--through offloading`)",
    ),
    "restart": Part(benchmark("gpu_restart", "--readings", "2"), 55, 80, "first tokens from a disk, in a new process"),
    "demo": Part(demo, 90, 120, "the demonstration, with a restart, and two ranks where there are two GPUs"),
    "doctor": Part(doctor, 60, 75, "`kvpact doctor --gpu`: loads, saves and pinning by page size and layout"),
}  # fmt: skip
"""By name, in the order of their worth."""

BY_NAME = ("demo", "doctor")
"""Parts that run if `--only` names them."""


def table(results: Results) -> Iterator[str]:
    """The lines for benchmarks/RESULTS.md."""
    machine = results["machine"]
    yield f"## On a GPU (`make gpu`){', ' + machine['commit'] if machine['commit'] else ''}"
    yield ""
    yield (
        f"{', '.join(machine['gpus'])}, driver {machine.get('driver', 'unknown')}; torch {machine['torch']}, "
        f"Python {machine['python']}, "
        f"{machine['cores']} cores, {machine['ram_gib']} GiB, kernel {machine['kernel']}. "
        f"All good: {'yes' if results['good'] else 'NO'}."
    )
    yield ""
    yield "| what | found | good |"
    yield "|---|---|---|"
    for name, part in results["parts"].items():
        for what, found, good in rows_of(name, part):
            yield f"| {what} | {found} | {good} |"


def rows_of(name: str, part: Results) -> Iterator[tuple[str, str, str]]:
    """A part's rows: what, the figure, and whether it is good."""
    good = verdict(part)
    if "left_out" in part:
        yield name, part["left_out"], "" if part["good"] else "NO"
    elif name in ("graphs", "suite"):
        counts = ", ".join(f"{part[kind]} {kind}" for kind in ("passed", "failed", "error", "skipped") if kind in part)
        on_device = part.get("passed_on_the_device", 0)
        yield f"tests of the copies, {name}", f"{counts or 'none'}; {on_device} passed on the device", good
    elif name == "doctor":
        report = part.get("report") or {}
        yield "`kvpact doctor --gpu`", report.get("error", report.get("device", "")), good
        for section, figures in report.get("sections", {}).items():
            yield section, shown(figures), ""
    elif name in BENCHMARKS:
        yield BENCHMARKS[name], "", good
        for row in part.get("rows", ()):
            what = " ".join(str(row[key]) for key in ("tokens", "what") if key in row)
            yield what, shown({key: value for key, value in row.items() if key not in ("tokens", "what")}), ""
    elif name == "answers":
        yield "answers with kvpact and without", "", good
        for scene, found in ((part.get("report") or {}).get("scenes", {})).items():
            for what, figures in found.items():
                said = shown({key: value for key, value in figures.items() if key not in ("good", "cached tokens")})
                yield f"{scene}: {what}", said, {True: "yes", False: "NO"}.get(figures.get("good"), "")
    else:
        for ranks, one in part.get("ranks", {}).items():
            yield from demo_rows(ranks, one)


BENCHMARKS = {
    "first_token": "first tokens, in turns",
    "gaps": "gaps of clients who decode",
    "offloading": "first tokens after a restart, through vLLM's offloading",
    "restart": "first tokens after a restart",
}
"""Part -> its head in the table."""


def verdict(part: Results) -> str:
    """Whether a part is good, or did not come to its end."""
    return "NOT FINISHED" if not part["finished"] or part.get("out_of_time") else "yes" if part["good"] else "NO"


def shown(figures: Results) -> str:
    """For a table's cell: one line."""
    texts = (f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items())
    return " ".join(", ".join(texts).split()).replace("|", "/")[:400]


def demo_rows(ranks: str, one: Results) -> Iterator[tuple[str, str, str]]:
    """The demonstration's rows with this many ranks."""
    good, report = "yes" if one["good"] else "NO", one["report"] or {}
    yield f"demonstration, ranks: {ranks}", f"exit status {one.get('exit_status', 'none')}", good
    for phase in report.get("phases", ()):
        low, high = phase["ttft_ms_quartiles"]
        tokens = f"{phase['cached_tokens']} of {phase['reusable_tokens']} tokens from a cache"
        figures = f"{phase['ttft_ms']:.1f} ms to the first token ({low:.1f}-{high:.1f}), {tokens}"
        yield f"{phase['name']}, ranks: {ranks}", figures, "identical" if phase["identical"] else "DIFFERS"
    for failure in report.get("failures", ()):
        yield "failed", failure, "NO"


def write(results: Results, out: Path) -> None:
    """Both files, complete or not at all."""
    for name, text in (
        ("gpu-results.json", json.dumps(results, indent=1)),
        ("gpu-results.md", "\n".join(table(results))),
    ):
        beside = out / f".{name}"
        beside.write_text(f"{text}\n")
        beside.replace(out / name)


def chosen() -> list[str]:
    """Parts of a run for which none was named."""
    return [name for name in PARTS if name not in BY_NAME]


def planned(only: list[str] | None, seconds: float) -> Iterator[str]:
    """Lines that say what a run does, with the seconds that each part has."""
    left = seconds
    for name in only or chosen():
        part = PARTS[name]
        most = left if only else min(left, part.most_seconds)
        expected = min(most, part.expected_seconds)
        yield f"{name:12} {expected:4.0f} s expected, {most:4.0f} s at most: {part.proves}"
        left -= expected
    yield f"{'all':12} {seconds - left:4.0f} s expected, {seconds:4.0f} s at most; rows are written as they come"


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="What only a GPU can prove.")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="gets gpu-results.json and gpu-results.md"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="for all parts together")
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)}; repeatable"
    )
    parser.add_argument("--plan", action="store_true", help="say what a run would do, and end")
    given = parser.parse_args(arguments)
    if given.plan:
        print(*planned(given.only, given.seconds), sep="\n", flush=True)
    until = time.monotonic() + given.seconds
    try:
        machine = look()
    except Unusable as error:
        print(f"run_gpu: {error}", file=sys.stderr)
        return 0 if given.plan else 2
    if given.plan:
        print(f"here: {', '.join(machine['gpus'])}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Results] = {}
    results: Results = {"format": 2, "good": False, "machine": machine, "parts": parts}
    for name in given.only or chosen():
        print(f"== {name}", flush=True)
        began = time.monotonic()
        parts[name] = {"good": False, "finished": False}
        write(results, given.out)
        if began > until:
            parts[name] |= {"finished": True, "left_out": "out of time"}
            continue
        part_until = until if given.only else min(until, began + PARTS[name].most_seconds)
        for found in PARTS[name].run(machine, part_until, given.out.resolve()):
            parts[name] = found | {"finished": False, "seconds": round(time.monotonic() - began, 1)}
            write(results, given.out)
        parts[name]["finished"] = True
    results["good"] = all(part["good"] for part in parts.values())
    write(results, given.out)
    print(*table(results), sep="\n")
    return 0 if results["good"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
