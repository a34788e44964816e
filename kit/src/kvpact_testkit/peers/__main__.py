"""Judge one peer with this interpreter: `python -m kvpact_testkit.peers PEER [CHECK] [--report FILE]`.

Prints each check, and the steps that lead to what is broken; with --report it writes a report as JSON instead.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from kvpact_testkit.peers.registry import NOT_INSTALLED, PEERS, Peer, peer_named
from kvpact_testkit.results import Check, ConformanceReport, as_text
from kvpact_testkit.suite import run_suite


def judge(peer: Peer, only: str) -> Iterator[Check]:
    """Run the checks whose names match `only` on a peer that is installed."""
    module, _, name = peer.suite.partition(":")
    subject = getattr(import_module(module), name)
    if not peer.is_connector:
        return run_suite(subject, only)
    driver = subject()
    return (driver.check(scenario) for scenario in driver.scenarios() if re.search(only, scenario.name))


def main() -> int:
    """Exit code 1 if something is broken, 3 if the peer is not installed."""
    parser = argparse.ArgumentParser(prog=f"{Path(sys.executable).name} -m kvpact_testkit.peers")
    parser.add_argument("peer", choices=[peer.name for peer in PEERS])
    parser.add_argument("check", nargs="?", default="", help="a regular expression; by default all checks")
    parser.add_argument("--report", type=Path, help="a file for the report as JSON")
    wanted = parser.parse_args()
    peer = peer_named(wanted.peer)
    if not peer.release():
        print(f"{peer.name} is not installed; {peer.install}", file=sys.stderr)
        return NOT_INSTALLED
    logging.disable(logging.CRITICAL)  # the kit causes faults on purpose
    report = ConformanceReport(f"{peer.name}, {peer.what}", peer.release(), tuple(judge(peer, wanted.check)))
    if wanted.report:
        wanted.report.write_bytes(report.to_json())
    else:
        print(as_text(report))
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
