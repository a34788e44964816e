"""`kvpact conformance`: runs the kit on a cache or connector and prints the result as a table or as JSON.

Owns the import of "module:Class", the table and its texts. The kit judges.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Annotated, Any, Final, cast

import typer
from rich.console import Console
from rich.table import Column, Table

from kvpact.errors import ConfigError
from kvpact_testkit.catalogue import TITLES
from kvpact_testkit.results import Check, ConformanceReport, Verdict, concerned, verdicts


class EngineChoice(Enum):
    """Where the kit runs."""

    embedded = "embedded"
    vllm = "vllm"


HAZARD_WORDS: Final = {Verdict.KEPT: "avoided", Verdict.BROKEN: "happens", Verdict.NOT_OBSERVABLE: "not observable"}
"""A hazard's title tells the failure, not the promise."""

STYLES: Final = {Verdict.KEPT: "green", Verdict.BROKEN: "bold red", Verdict.NOT_OBSERVABLE: "dim"}


def conformance(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="With --peers: one peer, by default all.", show_default=False)
    ] = "",
    settings: Annotated[
        str, typer.Option("--settings", metavar="JSON", help="Those of the cache or connector.")
    ] = "{}",
    engine: Annotated[
        EngineChoice | None, typer.Option("--engine", help="Default: vllm for its connectors.", show_default=False)
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="REGEX", help='Run the checks whose name matches, such as "cancelled".')
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Judge other people's tiers, and kvpact's own.")] = False,
    peers_python: Annotated[
        list[str] | None,
        typer.Option(
            "--peers-python", metavar="NAME=PATH", help="The interpreter of a peer's environment; repeatable."
        ),
    ] = None,
) -> None:
    """Run the conformance kit against a cache, a connector, or other people's tiers.

    A cache is a class or function that takes a CacheContext, or a subclass of CacheConformance. Exit code 1 if a
    property of the pact is broken.
    """
    try:
        re.compile(only)
    except re.error as error:
        raise ConfigError(f'--only "{only}" is not a regular expression, such as "cancelled": {error}') from None
    if peers:
        from kvpact_testkit.cli.peers import judge_peers

        sound = judge_peers(target, peers_python or [], only, as_json=as_json)
    elif target:
        sound = check_conformance(target, settings, engine, only, as_json=as_json)
    else:
        raise ConfigError('say what to check: "module:Class", or --peers')
    if not sound:
        raise typer.Exit(1)


def check_conformance(target: str, settings: str, engine: EngineChoice | None, only: str, *, as_json: bool) -> bool:
    """Run the checks whose name matches `only` on `target`, "module:Class", print the result; whether none is broken.

    `settings` are JSON: those of the cache, or a connector's `kv_connector_extra_config`. Without `engine`, vLLM's
    connectors run under vLLM and everything else on the embedded engine.

    Raises:
        ConfigError: the target or the settings cannot be used, or no check has such a name.
    """
    given = _settings(settings)
    thing = _find(target)
    of_vllm = hasattr(thing, "get_num_new_matched_tokens")
    chosen = engine or (EngineChoice.vllm if of_vllm else EngineChoice.embedded)
    logging.disable(logging.CRITICAL)  # the kit causes faults on purpose, so the cache's log lines are noise
    try:
        run = _under_vllm if chosen is EngineChoice.vllm else _embedded
        report = run(target, thing, given, only)
    finally:
        logging.disable(logging.NOTSET)
    if not report.checks:
        raise ConfigError(f'--only "{only}" matches the name of no check; --json lists names')
    if as_json:
        print(json.dumps(_document(report), indent=2))
    else:
        _show(report)
    return not report.broken


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--settings are not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--settings must be a JSON object, not {text}")
    return settings


def _find(target: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(f'{target!r} names nothing; write "module:Class", such as "kvpact.cache.cache:PactCache"')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the author's module is in the working directory
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{target}: {error}") from None
    except AttributeError:
        raise ConfigError(f"{target}: module {module} has no {name}") from None


def _embedded(target: str, thing: Any, settings: Mapping[str, Any], only: str) -> ConformanceReport:
    from kvpact.cache.cache import PactCache
    from kvpact_testkit.cache.conformance import CacheConformance, CacheFactory, run_conformance, run_suite_as_report
    from kvpact_testkit.cache.subjects import pact_cache, reference_cache
    from kvpact_testkit.engine import ReferenceCache

    if hasattr(thing, "get_num_new_matched_tokens"):
        raise ConfigError(f"{target} is a connector of vLLM's: use --engine vllm")
    if isinstance(thing, type) and issubclass(thing, CacheConformance):
        if settings:
            raise ConfigError(f"{target} says itself how its cache is made; it takes no --settings")
        return run_suite_as_report(thing, target, only=only, progress=_progress)
    if not callable(thing):
        raise ConfigError(f"{target} is neither a class nor a function that makes a cache for a CacheContext")
    own: dict[Any, Any] = {PactCache: pact_cache, ReferenceCache: reference_cache}
    factory = cast(CacheFactory, partial(own.get(thing, thing), **settings))
    return run_conformance(factory, subject=target, only=only, progress=_progress)


def _under_vllm(target: str, thing: Any, settings: Mapping[str, Any], only: str) -> ConformanceReport:
    try:
        from kvpact_testkit.vllm.compat import release
        from kvpact_testkit.vllm.driver import VllmDriver
    except ImportError as error:
        raise ConfigError(f"--engine vllm needs vLLM in this environment: {error}") from None
    if not hasattr(thing, "get_num_new_matched_tokens"):
        raise ConfigError(f"{target} is not a connector of vLLM's: use --engine embedded")
    driver = VllmDriver(target, settings)
    checks = []
    for scenario in (each for each in driver.scenarios() if re.search(only, each.name)):
        checks.append(driver.check(scenario))
        _progress(checks[-1])
    return ConformanceReport(target, f"vLLM {release()}", tuple(checks))


def _progress(check: Check) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{check.name}: {check.verdict}", end="", file=sys.stderr, flush=True)


def _document(report: ConformanceReport) -> dict[str, Any]:
    properties = {
        name: {
            "title": TITLES[name],
            "verdict": verdict,
            "script": list(_shortest(report, name).script) if verdict is Verdict.BROKEN else [],
        }
        for name, verdict in verdicts(report.checks).items()
    }
    return {**json.loads(report.to_json()), "properties": properties}


def _shortest(report: ConformanceReport, name: str) -> Check:
    """Return the check with the shortest script of those that break `name`."""
    return min((check for check in report.broken if name in concerned(check)), key=lambda check: len(check.script))


def _show(report: ConformanceReport) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{report.subject} on {report.engine}\n")
    table = Table(Column(no_wrap=True), Column(no_wrap=True), Column(), box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.show_header = False
    for name, verdict in verdicts(report.checks).items():
        word = HAZARD_WORDS[verdict] if name.startswith("H") else verdict
        table.add_row(name, word, TITLES[name], style=STYLES[verdict])
    console.print(table)
    shown: set[tuple[str, ...]] = set()
    for name, verdict in verdicts(report.checks).items():
        if verdict is Verdict.BROKEN:
            check = _shortest(report, name)
            if check.script not in shown:
                shown.add(check.script)
                _show_broken(console, check)
    reasons = {check.note for check in report.checks if check.verdict is Verdict.NOT_OBSERVABLE}
    if reasons:
        console.print("\nnot observable, because")
        for reason in sorted(reasons):
            console.print(f"    {reason}")
    counts = [f"{sum(check.verdict is verdict for check in report.checks)} {verdict}" for verdict in Verdict]
    console.print(f"\n{len(report.checks)} checks: {', '.join(counts)}")


def _show_broken(console: Console, check: Check) -> None:
    console.print(f"\n{', '.join(concerned(check))}: seen by {check.name}")
    for what in dict.fromkeys(violation.what for violation in check.violations):
        console.print(f"    {what}")
    for line in check.script:
        console.print(f"        {line}", style="dim")
