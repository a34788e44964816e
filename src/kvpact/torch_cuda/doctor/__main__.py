"""`python -m kvpact.torch_cuda.doctor`: the examination where neither typer nor rich is."""

from __future__ import annotations

import sys

from kvpact.torch_cuda.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
