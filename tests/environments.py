"""Virtual environments made by hand, so that no network is needed, with chosen packages of the checkout."""

from __future__ import annotations

import venv
from pathlib import Path
from typing import NamedTuple


class Environment(NamedTuple):
    """Its interpreter, and the folder in which its packages are."""

    python: Path
    site: Path


def new_environment(place: Path, *packages: Path) -> Environment:
    """An environment at `place` that finds these packages, and nothing else beside Python's own."""
    venv.create(place, with_pip=False, symlinks=True)
    [site] = place.glob("lib/python3*/site-packages")
    for package in packages:
        (site / package.name).symlink_to(package)
    return Environment(place / "bin" / "python", site)
