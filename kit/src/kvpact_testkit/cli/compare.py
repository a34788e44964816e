"""`kvpact compare`: engines with and without an external KV cache beside each other, on this machine.

Owns the command's options and its exit code; `kvpact_testkit.compare` does the work.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvpact.errors import ConfigError
from kvpact.units import parse_size
from kvpact_testkit.compare.subjects import QUICK, SUBJECTS, Subject

KEYS = ", ".join(subject.key for subject in SUBJECTS)


def compare(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Default: one made here.", show_default=False)] = "",
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM OPTIONS]", help="Options of all servers.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Choose sizes that end within ten minutes.")] = False,
    subjects: Annotated[
        str, typer.Option(metavar="A,B,...", help=f"Of {KEYS}; by default all there are.", show_default=False)
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Documents, or requests of a trace.")] = 16,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of a document.")] = 2048,
    turns: Annotated[int, typer.Option(min=1, help="Times that the load asks about each document.")] = 3,
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at once.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each server is started anew.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Load of a trace: Mooncake's, coding sessions, chat requests.")
    ] = None,
    scale: Annotated[int, typer.Option(min=1, help="Divide all lengths of the trace by this.")] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Host memory of a cache above its store.")] = "",
    kv_memory: Annotated[str, typer.Option(metavar="SIZE", help="KV memory of each engine.")] = "",
    tier: Annotated[str, typer.Option(metavar="URL", help="A tier, for one more row of kvpact.")] = "",
    estimate: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Hit rates over sizes of memory and disk; needs no engine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    work: Annotated[Path, typer.Option(help="Directory for model, stores, logs, table and chart.")] = Path(
        ".kvpact-compare"
    ),
) -> None:
    """Compare external KV caches on this machine: answers first, then seconds.

    Starts `vllm serve` with and without caches, one after the other, and prints one table. Exits with 1 if an answer
    was wrong, a store above its bound, or a server died; with 130 after Ctrl-C, with the rows so far.
    """
    if estimate is not None:
        print_estimates(estimate, as_json=as_json)
        return
    if find_spec("vllm") is None:
        raise ConfigError("vllm cannot be imported here; install vLLM beside kvpact: the comparison starts its servers")
    # Imported here so that the other commands need no client.
    from kvpact_testkit.compare.report import show
    from kvpact_testkit.compare.run import Wanted, run
    from kvpact_testkit.compare.sizes import Sizes

    chosen = chosen_subjects(subjects, quick=quick, tier=tier)
    wanted = Wanted(
        model=model,
        arguments=[*(vllm_arguments or ())],
        subjects=chosen,
        work=work.resolve(),
        sizes=Sizes(prompts, tokens, turns, clients, answer_tokens),
        rounds=rounds,
        quick=quick,
        trace=trace,
        scale=scale,
        memory=size_of("--memory", memory),
        kv_memory=size_of("--kv-memory", kv_memory),
        tier=tier,
    )
    result = run(wanted, Console(stderr=True))
    if as_json:
        print(json.dumps(result.document, indent=1))
    else:
        show(result.rows, result.prompts, result.unstable, Console())
        print(f"Figures, chart and the servers' logs: {wanted.work}")
    if result.interrupted:
        raise typer.Exit(130)
    if not result.is_good:
        raise typer.Exit(1)


def print_estimates(trace: Path, *, as_json: bool) -> None:
    """Hit rates of a trace through kvpact's own index."""
    from kvpact_testkit.compare.estimate import over_sizes, read_prompts
    from kvpact_testkit.compare.report import show_estimates

    found = list(over_sizes(list(read_prompts(trace))))
    if as_json:
        print(json.dumps([{**asdict(one), "served": one.served} for one in found], indent=1))
    else:
        show_estimates(found, Console())


def size_of(option: str, text: str) -> int:
    """Bytes; 0 of no text. Raises BadParameter."""
    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def chosen_subjects(words: str, *, quick: bool, tier: str) -> list[Subject]:
    """Named ones in the table's order, else all that are installed; always the one without a cache.

    With `quick` there are two beside it, unless others are named. Raises BadParameter.
    """
    known = {subject.key: subject for subject in SUBJECTS}
    asked = [word for word in words.split(",") if word]
    for word in asked:
        if word not in known:
            raise typer.BadParameter(f"{word} is not one of {KEYS}", param_hint="--subjects")
        if not known[word].is_installed:
            raise typer.BadParameter(f"{word} is not installed: {known[word].install}", param_hint="--subjects")
    if "tier" in asked and not tier:
        raise typer.BadParameter("the subject tier takes --tier URL", param_hint="--subjects")
    if not asked:
        asked = [*QUICK] if quick else [one.key for one in SUBJECTS if one.is_installed and one.key != "tier"]
    wanted = {"none", *asked, *(["tier"] if tier else [])}
    return [subject for subject in SUBJECTS if subject.key in wanted]
