"""`VllmDriver`: conformance scenarios under vLLM itself, without a model, for any connector.

Owns the run over scenarios and the verdict on each. The scheduler is vLLM's own, the workers' calls come in vLLM's own
order, the KV memory is plain CPU tensors full of digests. Runs on the release of vLLM that this process imports;
`releases.py` runs it on others.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpact_testkit.results import Check, ConformanceReport, NotObservable, Verdict, Violation, shortened
from kvpact_testkit.vllm.adapters import KNOWN_ADAPTERS, ConnectorAdapter
from kvpact_testkit.vllm.compat import release
from kvpact_testkit.vllm.harness import FOLDER, FOLDER_PREFIX, ConnectorUnderTest, Harness
from kvpact_testkit.vllm.random_ops import WALKS
from kvpact_testkit.vllm.scenarios import Scenario
from kvpact_testkit.vllm.scenarios_context import CONTEXTS
from kvpact_testkit.vllm.scenarios_divergent import DIVERGENT
from kvpact_testkit.vllm.scenarios_events import EVENTS
from kvpact_testkit.vllm.scenarios_exits import EXITS
from kvpact_testkit.vllm.scenarios_groups import GROUPS
from kvpact_testkit.vllm.scenarios_loads import LOADS
from kvpact_testkit.vllm.scenarios_models import MODEL_SCENARIOS
from kvpact_testkit.vllm.scenarios_promises import PROMISES
from kvpact_testkit.vllm.scenarios_ranks import RANKS
from kvpact_testkit.vllm.scenarios_states import KEPT_STATES, LONG_WALKS, MODELS_WITH_DRAFTS, STATES_WITH_DRAFTS

SCENARIOS = (*PROMISES, *EXITS, *LOADS, *RANKS, *WALKS, *CONTEXTS)
"""All scenarios, in the order in which they run."""


class VllmDriver:
    """Runs scenarios against one connector.

    `connector` is its import path, "module:Class"; `config` its `kv_connector_extra_config`, in which "{folder}" stands
    for a folder that is new for each scenario. `adapter` lets its insides be seen; without one its behaviour is judged.
    An operation that does not end within `timeout` seconds counts as hanging. `scheduler` is vLLM's `scheduler_cls`, by
    default its own.
    """

    def __init__(
        self,
        connector: str,
        config: Mapping[str, Any] | None = None,
        adapter: ConnectorAdapter | None = None,
        timeout: float = 20.0,
        scheduler: str = "",
    ) -> None:
        """Raises ValueError if `connector` is not of the form "module:Class"."""
        module, _, name = connector.partition(":")
        if not module or not name:
            raise ValueError(f'connector is {connector!r}; it must be "module:Class", like "kvpact.vllm:PactConnector"')
        adapter = adapter or KNOWN_ADAPTERS.get(name, ConnectorAdapter)()
        self.subject = ConnectorUnderTest(module, name, config or {}, adapter, timeout, scheduler)

    def scenarios(self, names: Sequence[str] | None = None) -> list[Scenario]:
        """All scenarios of models with one KV cache group, or those of these names, also of `GROUPS`,
        `DIVERGENT`, `EVENTS`, `MODEL_SCENARIOS`, `STATES_WITH_DRAFTS`, `LONG_WALKS` and `KEPT_STATES`.

        Raises KeyError for an unknown one.
        """
        named = [*SCENARIOS, *GROUPS, *DIVERGENT, *EVENTS, *MODEL_SCENARIOS, *STATES_WITH_DRAFTS, *MODELS_WITH_DRAFTS]
        named += [*LONG_WALKS, *KEPT_STATES]
        by_name = {scenario.name: scenario for scenario in named}
        return list(SCENARIOS) if names is None else [by_name[name] for name in names]

    def run(self, names: Sequence[str] | None = None) -> ConformanceReport:
        """Run all scenarios, or those of these names, on this process's vLLM."""
        checks = tuple(self.check(scenario) for scenario in self.scenarios(names))
        return ConformanceReport(f"{self.subject.module}:{self.subject.name}", f"vLLM {release()}", checks)

    def check(self, scenario: Scenario) -> Check:
        """Run one scenario."""
        harness = Harness(self.subject)
        verdict, note = Verdict.KEPT, ""
        try:
            harness.judge(scenario.run, scenario.protects)
        except NotObservable as reason:
            verdict, note = Verdict.NOT_OBSERVABLE, str(reason)
        if harness.violations:
            verdict = Verdict.BROKEN
        return Check(
            name=scenario.name,
            protects=scenario.protects,
            meaning=scenario.meaning,
            verdict=verdict,
            violations=tuple(Violation(one.broken, _without_folder(one.what)) for one in harness.violations),
            note=_without_folder(note or "; ".join(harness.notes)),
            script=shortened([_without_folder(line) for line in harness.journal]),
        )


def _without_folder(text: str) -> str:
    """`text` with a placeholder for the scenario's folder, so that equal scripts give equal texts."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/{FOLDER_PREFIX}[^/ ]+", FOLDER, text)


def main(order: str) -> None:
    """Run in a separate process as `releases.run_on_release` orders, and write the report."""
    wanted = json.loads(order)
    logging.disable(logging.CRITICAL)
    faulthandler.dump_traceback_later(wanted["seconds"], exit=True)
    report = VllmDriver(wanted["connector"], wanted["config"], scheduler=wanted["scheduler"]).run(wanted["names"])
    Path(wanted["answer"]).write_bytes(report.to_json())


if __name__ == "__main__":
    main(sys.argv[1])
