"""Memory that ways of keeping a hybrid model's KV cache reserve, over the bytes that a match loads.

Run: python research/hybrid_waste.py [--ranks 8]. Needs no engine: the models' KV cache groups are frozen in
tests/data/models, as vLLM makes them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from hybrid_models import model_names, read_model, waste

LENGTHS = (4096, 32768, 131072)
COLUMNS = ("content MiB", "all, physical", "physical", "one class", "slab", "classes", "full attention")


def main() -> None:
    """Print one line for each model and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, choices=(1, 8), default=1, help="tensor-parallel ranks; figures are of one"
    )
    arguments = parser.parse_args()
    print("| model | tokens | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for name in model_names():
        model = read_model(name, arguments.ranks)
        for length in LENGTHS:
            found = waste(model, length)
            full = "-" if found.full_attention is None else f"{found.full_attention:.2f}"
            print(
                f"| {name} | {length} | {found.content_bytes / 2**20:.1f} | {found.all_physical:.2f} |"
                f" {found.physical:.2f} | {found.largest_payload:.2f} |"
                f" {found.slab:.2f} | {found.classes:.3f} | {full} |"
            )


if __name__ == "__main__":
    main()
