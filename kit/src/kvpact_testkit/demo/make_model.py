"""The demonstration's model, on which a load beats computing: python -m kvpact_testkit.demo.make_model DIRECTORY"""

from __future__ import annotations

import sys
from pathlib import Path

from kvpact_testkit.demo.model import describe_model, make_model
from kvpact_testkit.demo.phases import Plan
from kvpact_testkit.demo.text import corpus


def main(arguments: list[str]) -> None:
    """Make it in a new directory, and print its shape."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    directory = Path(arguments[0])
    if directory.exists():
        sys.exit(f"{directory} exists already: name a new directory")
    make_model(directory, Plan.for_this_machine().shape, corpus())
    print(f"{directory}: {describe_model(directory)}, random weights")


if __name__ == "__main__":
    main(sys.argv[1:])
