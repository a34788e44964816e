"""`kvpact conformance --peers`: what breaks in whom, each peer judged by a process of its own interpreter.

Owns the processes and the lines that are printed. The kit judges.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpact.errors import ConfigError
from kvpact_testkit.peers.registry import NOT_INSTALLED, PEERS, Peer, peer_named
from kvpact_testkit.results import Check, ConformanceReport, Verdict, concerned

NO_KIT = "No module named 'kvpact_testkit'"


@dataclass(frozen=True, slots=True)
class Judged:
    """A peer, the interpreter that judged it, and what it found; no report if the peer is not installed."""

    peer: Peer
    python: str
    report: ConformanceReport | None
    seconds: float

    def again(self, check: Check) -> str:
        """The command that repeats a check, with the steps that lead to what is broken."""
        return f"{self.python} -m kvpact_testkit.peers {self.peer.name} '^{check.name}$'"


def judge_peers(wanted: str, pythons: Sequence[str], only: str, *, as_json: bool) -> bool:
    """Judge all peers, or the one named, and print each as it ends; whether nothing is broken.

    `pythons` are "name=path": the interpreter of a peer's environment, by default this one. Checks are those whose name
    matches `only`.

    Raises:
        ConfigError: a peer or an interpreter cannot be used.
    """
    own = _interpreters(pythons)
    peers = [_peer(wanted)] if wanted else PEERS
    documents, sound = [], True
    for peer in peers:
        judged = _judge(peer, own.get(peer.name, sys.executable), only)
        sound = sound and not (judged.report and judged.report.broken)
        if as_json:
            documents.append(_document(judged))
        else:
            print("\n".join(_lines(judged)), flush=True)
    if as_json:
        print(json.dumps(documents, indent=2))
    return sound


def _peer(name: str) -> Peer:
    try:
        return peer_named(name)
    except KeyError:
        known = ", ".join(peer.name for peer in PEERS)
        raise ConfigError(f"--peers: there is no peer {name!r}; there are {known}") from None


def _interpreters(pythons: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for each in pythons:
        name, _, path = each.partition("=")
        if not Path(path).is_file():
            raise ConfigError(f"--peers-python {each}: write NAME=PATH, the path of a Python interpreter")
        found[_peer(name).name] = path
    return found


def _judge(peer: Peer, python: str, only: str) -> Judged:
    with tempfile.TemporaryDirectory(prefix="kvpact-peers-") as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "kvpact_testkit.peers", peer.name, *([only] if only else []), "--report", str(report)]
        began = time.monotonic()
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        if report.exists():
            return Judged(peer, python, ConformanceReport.from_json(report.read_bytes()), seconds)
    if ran.returncode == NOT_INSTALLED or NO_KIT in ran.stderr:
        return Judged(peer, python, None, seconds)
    last = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise ConfigError(f"{peer.name} cannot be judged by {python}, exit code {ran.returncode}: {last}")


def _lines(judged: Judged) -> Iterator[str]:
    report = judged.report
    if report is None:
        yield f"{judged.peer.name}: not installed for {judged.python}; {judged.peer.install}"
        return
    counts = ", ".join(f"{sum(check.verdict is verdict for check in report.checks)} {verdict}" for verdict in Verdict)
    yield f"{report.subject}, {report.engine}: {counts}, {judged.seconds:.0f} s"
    for check in report.broken:
        yield f"    {', '.join(concerned(check))}: {check.name}: {check.violations[0].what}"
        yield f"        {judged.again(check)}"


def _document(judged: Judged) -> dict[str, Any]:
    report = judged.report
    return {
        "peer": judged.peer.name,
        "python": judged.python,
        "seconds": round(judged.seconds, 1),
        "install": "" if report else judged.peer.install,
        "report": json.loads(report.to_json()) if report else None,
    }
