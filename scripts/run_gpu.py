"""What only a GPU can prove: python scripts/run_gpu.py [--out DIR] [--only suite|doctor|demo ...]

In this order: the tests of the copies, which run on the real device too, `kvpact doctor --gpu`, and, where vLLM can be
imported, the demonstration, once more with two ranks where there are two GPUs. Needs torch for CUDA, the packages that
kvpact and its tests import, and no network. After each part DIR/gpu-results.json has all that was found, and
DIR/gpu-results.md a table for benchmarks/RESULTS.md.

The exit status is 0 if all that was run is good, 1 if not, and 2 if nothing can be run here, which one line explains.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/worker",)

ON_THE_DEVICE = re.compile(r"(?:\[|(?<!fake)-)cuda[\]-]")
"""In the name of a test that runs on a real device: "cuda" as one of its parameters, and not "fake-cuda"."""

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
import importlib.util, json, os, platform, sys
found = {"python": platform.python_version(), "kernel": platform.release(), "cores": len(os.sched_getaffinity(0))}
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
found["has_vllm"] = importlib.util.find_spec("vllm") is not None
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.version.cuda and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
except ImportError as error:
    found["torch_error"] = str(error)
print(json.dumps(found))
"""

Results = dict[str, Any]


class Unusable(Exception):
    """Nothing can be run here. One line for people."""


def environment() -> dict[str, str]:
    """This process's, with the checkout's source first."""
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *([others] if others else [])])}


def run(*arguments: str) -> int:
    """Run Python in the checkout with its output on ours. Returns the exit status."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment(), check=False).returncode


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


def suite(machine: Results, directory: Path) -> Results:
    """The tests of the copies. Good if they pass, and some ran on the device."""
    report = directory / "junit.xml"
    status = run("-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    counts: Counter[str] = Counter()
    on_device, bad = 0, []
    cases = ET.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        how = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        name = f"{case.get('classname')}::{case.get('name')}"
        counts[how] += 1
        on_device += how == "passed" and bool(ON_THE_DEVICE.search(name))
        bad += [name] if how in ("failure", "error") else []
    return {
        "good": status == 0 and on_device > 0,
        "exit_status": status,
        **{kind: counts[kind] for kind in ("passed", "failure", "error", "skipped")},
        "passed_on_the_device": on_device,
        "bad": bad,
    }


def doctor(machine: Results, directory: Path) -> Results:
    """What `kvpact doctor --gpu` found."""
    report = directory / "doctor.json"
    status = run("-m", "kvpact", "doctor", "--gpu", "--json", str(report))
    return {"good": status == 0, "exit_status": status, "report": read(report)}


def demo(machine: Results, directory: Path) -> Results:
    """The demonstration's figures with one rank, and with two."""
    if not machine["has_vllm"]:
        return {"good": True, "skipped": "vLLM cannot be imported here"}
    runs = {}
    for ranks in (1, 2)[: len(machine["gpus"])]:
        report = directory / f"demo-{ranks}.json"
        given = ("--tp", str(ranks), "--json", str(report), "--work", str(directory / f"demo-{ranks}"))
        status = run("-m", "kvpact", "demo", *given)
        runs[str(ranks)] = {"good": status == 0, "exit_status": status, "report": read(report)}
    return {"good": all(one["good"] for one in runs.values()), "ranks": runs}


def read(report: Path) -> Any:
    """What a part wrote; None if it ended before."""
    try:
        return json.loads(report.read_text())
    except (OSError, ValueError):
        return None


PARTS: dict[str, Callable[[Results, Path], Results]] = {"suite": suite, "doctor": doctor, "demo": demo}


def table(results: Results) -> Iterator[str]:
    """The lines for benchmarks/RESULTS.md."""
    machine = results["machine"]
    yield f"## On a GPU (`make gpu`){', ' + machine['commit'] if machine['commit'] else ''}"
    yield ""
    yield (
        f"{', '.join(machine['gpus'])}; torch {machine['torch']}, Python {machine['python']}, "
        f"{machine['cores']} cores, kernel {machine['kernel']}. All good: {'yes' if results['good'] else 'NO'}."
    )
    yield ""
    yield "| what | found | good |"
    yield "|---|---|---|"
    for name, part in results["parts"].items():
        for what, found, good in rows_of(name, part):
            yield f"| {what} | {found} | {good} |"


def rows_of(name: str, part: Results) -> Iterator[tuple[str, str, str]]:
    """A part's rows: what, the figure, and whether it is good."""
    good = "yes" if part["good"] else "NO"
    if "skipped" in part and name == "demo":
        yield "demonstration", part["skipped"], ""
    elif name == "suite":
        counts = ", ".join(f"{part[kind]} {kind}" for kind in ("passed", "failure", "error", "skipped"))
        yield "tests of the copies", f"{counts}; {part['passed_on_the_device']} passed on the device", good
    elif name == "doctor":
        report = part["report"] or {}
        yield "`kvpact doctor --gpu`", f"exit status {part['exit_status']}", good
        for section, figures in report.get("sections", {}).items():
            shown = (
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
            )
            yield section, ", ".join(shown), ""
    else:
        for ranks, one in part["ranks"].items():
            yield from demo_rows(ranks, one)


def demo_rows(ranks: str, one: Results) -> Iterator[tuple[str, str, str]]:
    """The demonstration's rows with this many ranks."""
    good, report = "yes" if one["good"] else "NO", one["report"] or {}
    yield f"demonstration, ranks: {ranks}", f"exit status {one['exit_status']}", good
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


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="What only a GPU can prove.")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="gets gpu-results.json and gpu-results.md"
    )
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), metavar="PART", help="suite, doctor or demo; repeatable"
    )
    given = parser.parse_args(arguments)
    try:
        machine = look()
    except Unusable as error:
        print(f"run_gpu: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    results: Results = {"format": 1, "good": True, "machine": machine, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="kvpact-gpu-") as directory:
        for name in given.only or PARTS:
            print(f"== {name}", flush=True)
            began = time.monotonic()
            part = PARTS[name](machine, Path(directory))
            results["parts"][name] = part | {"seconds": round(time.monotonic() - began, 1)}
            results["good"] = results["good"] and part["good"]
            write(results, given.out)
    print(*table(results), sep="\n")
    return 0 if results["good"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
