"""What a failing store does to a real vLLM engine under load: fault by fault, beside an engine without kvpact.

    python benchmarks/store_faults.py [--phases killed,s3-503,...] [--seconds 10] [--answer-tokens 2] [--json]

Eight clients ask at once, in shuffled rounds over more prompts than memory holds, so that the store is really used.
Both engines forget their own prefix caches after every turn, so that the one without kvpact computes everything. A step
computes one block of one request, so that every answer must be bit for bit what the engine without kvpact gave before.
Times to first token include the wait for the other seven, on both sides. Needs the servers of `testbeds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from kvpact_testkit.demo.model import TINY_SHAPE, ensure_model
from servers.object_server import CREDENTIALS
from store_failing import ANSWER_TOKENS, HEADER, PHASES, STOPPED_S, chosen_places, explain_steps, row, run_place
from store_sharing import engines, print_table
from tiny_engine import TOKENIZER_TEXT


def main() -> None:
    """Run the chosen phases; leaves with an error if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phases", default=",".join(PHASES), help="any of %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help=f"of a fault; a stop takes {STOPPED_S:g} or more")
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS, help="default: %(default)s")
    parser.add_argument("--slow-steps", type=Path, help="keep here, as JSON lines, what each slow step did")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    phases = arguments.phases.split(",")
    if unknown := set(phases) - set(PHASES):
        parser.error(f"unknown phases: {', '.join(sorted(unknown))}")
    os.environ.update(CREDENTIALS)
    found, ended = [], []
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpact-faults-"))
        model = ensure_model(Path(directory), TINY_SHAPE, TOKENIZER_TEXT)
        (plain,) = stack.enter_context(engines(model, Path(directory), None))
        for place, names in chosen_places(phases).items():
            work = Path(directory, place.replace(" ", "-"))
            work.mkdir()
            try:
                found += run_place(
                    place, names, plain, work, arguments.seconds, _say, arguments.slow_steps, arguments.answer_tokens
                )
            except Exception as error:  # the other places are still worth a run
                ended.append(f"{place}: {type(error).__name__}: {error}")
                _say(ended[-1])
    if arguments.json:
        print(json.dumps([asdict(phase) | {"broken": phase.broken} for phase in found], indent=2))
    else:
        print_table(HEADER, [row(phase) for phase in found])
        for phase in found:
            if phase.broken:
                print(f"\n{phase.name}: {', '.join(phase.broken)}. {phase.trouble}\n  {dict(phase.counts)}")
    explained, within = explain_steps(found)
    _say(explained)
    if ended or not within or any(phase.broken for phase in found):
        raise SystemExit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
