"""How much of its bus a GPU's loads and saves reach, for the usual pages and layouts: ratios, medians and spread.

    python benchmarks/gpu_bandwidth.py [--device N] [--quick]

Measures as `kvpact doctor --gpu` does, through kvpact's own copies. Without a GPU it says so, and that is all.
"""

from __future__ import annotations

import argparse
import sys

from kvpact.torch_cuda.doctor.command import NoDevice, require_device
from kvpact.torch_cuda.doctor.examine import Examination, child_of
from kvpact.torch_cuda.doctor.report import lines
from kvpact.torch_cuda.doctor.shapes import usual_shapes
from kvpact.torch_cuda.doctor.workspace import FULL, QUICK


def main() -> None:
    """Print the report of three sections."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    try:
        require_device(given.device)
    except NoDevice as error:
        print(f"no GPU here: {error}")
        return
    from kvpact.torch_cuda.doctor.torch_bench import TorchBench

    amounts = QUICK if given.quick else FULL
    examination = Examination(TorchBench(given.device), amounts, usual_shapes(), child_of([]), None, print)
    document = examination.run(["machine", "bus", "bandwidth"])
    print(*lines(document), sep="\n")
    sys.exit(any(section.get("error") for section in document["sections"].values()))


if __name__ == "__main__":
    main()
