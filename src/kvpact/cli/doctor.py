"""`kvpact doctor`: prints an examination of this machine's GPU."""

from __future__ import annotations

import sys

from kvpact.cli.screen import console, shown
from kvpact.torch_cuda.doctor.command import NoDevice, Wishes, examine


def examine_gpu(wishes: Wishes) -> bool:
    """Print the report; returns whether kvpact may serve with the device. Raises ConfigError for wrong options."""
    screen = console()

    def tell(line: str) -> None:
        print(shown(line), file=sys.stderr, flush=True)

    try:
        return examine(wishes, screen.print, tell)
    except NoDevice as error:
        tell(f"kvpact: {error}")
        return False
