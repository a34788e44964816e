"""Timeline of loads: when each call that brings a request nearer to its first token began and ended.

Owns a folder with one file for each process of an engine, a JSON line for each call; times are seconds of the host's
monotonic clock. A followed part has its methods replaced. Without a folder none is, so that no step makes a call more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

Facts: TypeAlias = Callable[..., Mapping[str, object] | None]
"""(result, arguments of a call) -> its columns beside name and times; None: no line."""


class Timeline:
    """Lines of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def follow(self, part: object, method: str, span: str, facts: Facts) -> None:
        """Write a line `span` for each later call of the method of this object."""
        call: Callable[..., Any] = getattr(part, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = monotonic()
            result = call(*arguments, **named)
            ended = monotonic()
            columns = facts(result, *arguments)
            if columns is not None:
                self.write(span, began, ended, columns)
            return result

        vars(part)[method] = timed

    def write(self, span: str, began: float, ended: float, columns: Mapping[str, object]) -> None:
        """Write a line."""
        self._file.write(json.dumps({"span": span, "began": began, "ended": ended, **columns}) + "\n")
