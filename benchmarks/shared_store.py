"""Two real vLLM engines, one store: what engine A computed engine B loads, and both write at once without damage.

    python benchmarks/shared_store.py [--kinds redis,s3,...] [--seconds 300] [--json]

A and B are processes of their own with 64 MiB of staging memory and the store as their only tier. B, with an empty
memory, answers A's prompts: how much it loaded, whether answers are bit for bit those of a local prefix hit, and times
to first token. Then both write and read at once, and every record is verified. Needs the servers of `testbeds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from kvpact_testkit.demo.model import TINY_SHAPE, ensure_model
from servers.object_server import CREDENTIALS
from store_sharing import HEADER, KINDS, print_table, row, share_store
from tiny_engine import TOKENIZER_TEXT


def main() -> None:
    """Run the chosen kinds; leaves with an error if one of them broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="any of %(default)s")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=6, help="in a prompt")
    parser.add_argument("--seconds", type=float, default=300.0, help="that both engines write, for each kind")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    results, failed = [], []
    with tempfile.TemporaryDirectory(prefix="kvpact-shared-") as directory:
        model = ensure_model(Path(directory), TINY_SHAPE, TOKENIZER_TEXT)
        for kind in arguments.kinds.split(","):
            work = Path(directory, kind)
            work.mkdir()
            try:
                results.append(
                    share_store(
                        kind,
                        model,
                        work,
                        prompts=arguments.prompts,
                        blocks=arguments.blocks,
                        seconds=arguments.seconds,
                    )
                )
            except Exception as error:  # the other kinds are still worth a run
                failed.append(f"{kind}: {type(error).__name__}: {error}")
                print(failed[-1], file=sys.stderr)
            else:
                print(" | ".join(row(results[-1])), file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps([asdict(result) | {"share": result.share} for result in results], indent=2))
    else:
        print_table(HEADER, [row(result) for result in results])
        for result in results:
            if not result.kept_its_promises:
                print(f"\n{result.kind}: {dict(result.counts)}")
    if failed or not all(result.kept_its_promises for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
