"""kvpact's scheduler classes, which write a line about each step: its time, and what it computed.

For an engine with any connector: `scheduler_cls` names a class here, the environment variable `STEP_LOG` a file.
Copies, and bytes that a step waits for, are in `kvpact.events.timeline`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import monotonic
from typing import Any

from kvpact.vllm.scheduler import KvpactAsyncScheduler, KvpactScheduler

VARIABLE = "STEP_LOG"


class _Logged:
    """Scheduler with a line for each step and each arrival.

    Of a step: `began`, and `ended` when its tokens are there, in seconds of the host's monotonic clock; `decodes`,
    requests that computed one token after their first step; `tokens` computed; `admits`, requests in their first step;
    `graph`, the kind of graph that vLLM replayed, "NONE" for none, null where vLLM does not say. Of an arrival:
    `arrived` and `request`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._log = Path(os.environ[VARIABLE]).open("a", buffering=1)  # noqa: SIM115 - as long as the engine lives
        self._began: dict[int, float] = {}

    def add_request(self, request: Any) -> Any:
        """Take in a request."""
        self._write({"arrived": monotonic(), "request": request.request_id})
        return super().add_request(request)  # type: ignore[misc]

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """Decide the next step."""
        began = monotonic()
        output = super().schedule(*arguments, **named)  # type: ignore[misc]
        self._began[id(output)] = began
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the step's output."""
        results = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        tokens = scheduler_output.num_scheduled_tokens
        admits = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        graph = model_runner_output.cudagraph_stats
        self._write(
            {
                "began": self._began.pop(id(scheduler_output)),
                "ended": monotonic(),
                "decodes": sum(number == 1 and name not in admits for name, number in tokens.items()),
                "tokens": sum(tokens.values()),
                "admits": admits,
                "graph": graph.runtime_mode if graph is not None else None,
            }
        )
        return results

    def _write(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line) + "\n")


class LoggedScheduler(_Logged, KvpactScheduler):
    """For engines without asynchronous scheduling, as on CPUs."""


class LoggedAsyncScheduler(_Logged, KvpactAsyncScheduler):
    """For engines with asynchronous scheduling, as on GPUs."""
