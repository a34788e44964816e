"""Options that `kvpact serve` passes on: a misspelt one is refused at once, with the nearest right one.

Reads their names from vLLM's source, because an import of vLLM takes seconds. Superfluous names do no harm: known
options, and those unlike any known one, go to vLLM, which decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvpact.errors import ConfigError

OURS: Final = ("memory", "tier", "through", "config", "help")
"""Options of `kvpact serve` itself, which it takes from the command line unless they are misspelt."""

SOURCES: Final = ("engine/arg_utils.py", "entrypoints/cli/serve.py", "entrypoints/**/cli_args.py")
"""Source files of vLLM that name its options, as words or as fields of classes."""

LIKENESS: Final = 0.75
"""Least similarity (0 to 1) to a known option at which a word counts as misspelt, such as `--teir`."""


def vllm_options() -> set[str]:
    """Names of the options of `vllm serve`, without the two dashes; empty if vLLM is not installed."""
    spec = find_spec("vllm")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    texts = [file.read_text(encoding="utf-8") for place in places for source in SOURCES for file in place.glob(source)]
    found = [
        name for text in texts for pair in re.findall(r'"--([a-z][\w-]*)"|(?m:^    (\w+):)', text) for name in pair
    ]
    return {name.replace("_", "-") for name in found if name}


def refuse_misspelt(arguments: Sequence[str]) -> None:
    """Raise ConfigError if one of the arguments for vLLM resembles a known option and is none."""
    words = [argument.partition("=")[0].partition(".")[0] for argument in arguments if argument.startswith("--")]
    theirs = vllm_options() if words else set()
    for word in words:
        name = word[2:].replace("_", "-")
        if any(known.startswith(name.removeprefix("no-")) for known in theirs):  # vLLM takes shortened ones
            continue
        likely = [known for known in OURS if name and known.startswith(name)]
        likely += get_close_matches(name, [*OURS, *sorted(theirs)], n=1, cutoff=LIKENESS)
        if likely:
            raise ConfigError(
                f"neither kvpact serve nor vllm serve has an option {word}; did you mean --{likely[0]}? "
                "(arguments behind -- are not checked)"
            )
