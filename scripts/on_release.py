"""Runs a command on an engine of another release of vLLM: python scripts/on_release.py RELEASE COMMAND [ARGUMENTS ...]

    python scripts/on_release.py 0.33.0 kvpact demo

The engine is the release's Python files, fetched once into the cache folder, over the compiled parts of the installed
vLLM: its scheduler, connectors and runners are the release's own, its kernels are not. Nothing is installed. The exit
status is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvpact.errors import ConfigError
from kvpact_testkit.vllm.releases import engine_of


def main(arguments: list[str]) -> int:
    """The exit status of the command."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    release, *command = arguments
    try:
        with engine_of(release) as environment:
            commands = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
            return subprocess.run(command, env={**environment, "PATH": commands}, check=False).returncode
    except ConfigError as error:
        print(f"on_release: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
