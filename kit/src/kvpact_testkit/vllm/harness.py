"""What a scenario works with: engines on demand, a journal of its actions, and the rules that always hold.

Owns the judgement: what is broken, by which rule, and how it was observed. Scenarios only create situations.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpact.vllm.compat.objects import connectors_of
from kvpact_testkit.results import Broken, NotObservable, Violation, require
from kvpact_testkit.trace import Trace
from kvpact_testkit.vllm.adapters import ConnectorAdapter
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import EngineDied, VllmEngine

BLOCK = 16
"""Tokens in a block of these engines."""

FOLDER = "{folder}"
"""Placeholder in a connector's configuration for a folder that is new and empty for each scenario."""

FOLDER_PREFIX = "kvpact-harness-"
"""Prefix of such a folder's name."""


@dataclass(frozen=True, slots=True)
class ConnectorUnderTest:
    """A connector by its import path, and its `kv_connector_extra_config`."""

    module: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: ConnectorAdapter = field(default_factory=ConnectorAdapter)
    timeout: float = 20.0
    """Seconds after which an operation counts as hanging."""
    scheduler: str = ""
    """vLLM's `scheduler_cls`; by default its own."""

    def transfer(self, folder: Path) -> dict[str, Any]:
        """The fields of `KVTransferConfig` that name it."""
        config = json.loads(json.dumps(dict(self.config)).replace(FOLDER, str(folder)))
        return {
            "kv_connector": self.name,
            "kv_connector_module_path": self.module,
            "kv_connector_extra_config": config,
        }


def named(connector: type) -> dict[str, Any]:
    """The fields of `KVTransferConfig` that name this connector."""
    return {"kv_connector": connector.__name__, "kv_connector_module_path": connector.__module__}


def under_multi_connector(*children: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `KVTransferConfig` that put these connectors, in this order, under vLLM's MultiConnector."""
    connectors = [{**child, "kv_role": "kv_both"} for child in children]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}


class ScenarioOver(Exception):
    """Ends the scenario; the harness's `violations` say what is broken."""


def prompt(seed: int, blocks: int, tail: int = 7) -> list[int]:
    """`blocks` full blocks and `tail` more tokens; prompts of different seeds differ in their first token."""
    return [(seed * 1009 + position * 7) % 29_989 + seed for position in range(blocks * BLOCK + tail)]


class Harness:
    """The engines, the journal and the violations of one scenario."""

    def __init__(self, subject: ConnectorUnderTest) -> None:
        self.subject = subject
        self.journal = Trace()
        self.violations: list[Violation] = []
        self.notes: list[str] = []
        self.started = False
        """Whether an engine of this scenario has started."""
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        self.folder = Path(self._folder.name)

    def close(self) -> None:
        """Remove the connector's files."""
        self._folder.cleanup()

    @contextmanager
    def engine(self, transfer: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[VllmEngine]:
        """An engine with the connector; on exit every rule is checked.

        `settings` are those of `EngineSettings`; `transfer` replaces the connector's own `KVTransferConfig`.
        """
        wanted = EngineSettings(**{"block_size": BLOCK, "scheduler": self.subject.scheduler, **settings})
        shown = ", ".join(f"{name}={value}" for name, value in settings.items())
        self.journal.note(f"start an engine{' with ' + shown if shown else ''}")
        engine = self._start(wanted, transfer or self.subject.transfer(self.folder))
        try:
            yield engine
            if not engine.abandoned:
                self._settle(engine)
            engine.close()
            if self.violations:
                raise ScenarioOver
        except EngineDied as death:
            self.violations.append(Violation("H13", f"the engine dies: {death}"))
            raise
        finally:
            with suppress(Exception):
                engine.close()

    def _start(self, settings: EngineSettings, transfer: Mapping[str, Any]) -> VllmEngine:
        """Start an engine. A failure is H13 if an earlier engine of the scenario has started, else not observable."""
        try:
            engine = VllmEngine(settings, transfer, self.journal.note)
        except NotObservable:
            raise
        except Exception as error:
            what = f"the engine does not start: {type(error).__name__}: {error}"[:500]
            if self.started:
                raise Broken(what, protects=("H13",)) from error
            raise NotObservable(what) from error
        self.started = True
        return engine

    # What scenarios do again and again

    def store(self, engine: VllmEngine, *prompts: list[int], **settings: Any) -> tuple[list[int], ...]:
        """Compute these prompts one after the other, then empty the engine's own prefix cache."""
        for number, tokens in enumerate(prompts):
            engine.add(f"first{number}", tokens, **settings)
            self.finish(engine, f"first{number}")
        self.forget(engine)
        return prompts

    def add(self, engine: VllmEngine, name: str, *prompts: Sequence[int], **settings: Any) -> list[str]:
        """Add requests with these prompts: a single one is named `name`, several ones `name` and a number."""
        names = [name] if len(prompts) == 1 else [f"{name}{number}" for number in range(len(prompts))]
        for request_id, tokens in zip(names, prompts, strict=True):
            engine.add(request_id, tokens, **settings)
        return names

    def serve(self, engine: VllmEngine, name: str, *prompts: Sequence[int], **settings: Any) -> list[str]:
        """Add requests with these prompts, see `add`, and run until no request is left; return their names."""
        names = self.add(engine, name, *prompts, **settings)
        self.finish(engine)
        return names

    def load(self, engine: VllmEngine, name: str, *prompts: Sequence[int], **settings: Any) -> None:
        """Serve requests with these prompts; the connector must promise a token for at least one of them."""
        self.require_promise(engine, *self.serve(engine, name, *prompts, **settings))

    def forget(self, engine: VllmEngine) -> None:
        """Run until all is saved, then empty the engine's own prefix cache."""
        self.rest(engine)
        emptied = engine.forget_computed()
        require(emptied, "with no request alive, blocks stay held and the prefix cache cannot be emptied", "P1")

    def rest(self, engine: VllmEngine) -> None:
        """Run until vLLM has no work left."""
        require(engine.drain(self.subject.timeout), self._kept_stepping, "P11")

    def finish(self, engine: VllmEngine, *request_ids: str) -> None:
        """Run until these requests (or all) have ended."""
        if not engine.finish(*request_ids, seconds=self.subject.timeout):
            waiting = [one for one in request_ids or engine.requests if not engine.ended(one)]
            states = ", ".join(f"{one} ({engine.status(one) or 'unknown'})" for one in waiting)
            raise Broken(f"still waiting after {self.subject.timeout:.0f} s: {states}", protects=("P11",))

    def require_promise(self, engine: VllmEngine, *request_ids: str) -> None:
        """Raises NotObservable unless the connector promised a token for one of these requests (or any)."""
        for probe in engine.observed.probes:
            if probe.answer and (not request_ids or probe.request_id in request_ids):
                return
        raise NotObservable("the connector promised no token for a prompt that was computed before")

    def finish_promised(self, engine: VllmEngine, *request_ids: str) -> None:
        """Run until all requests have ended; the connector must have promised a token for one of these (or any)."""
        self.finish(engine)
        self.require_promise(engine, *request_ids)

    def require_sound(self, engine: VllmEngine) -> None:
        """Raises Broken if a block in the engine's own prefix cache has wrong content."""
        require(not (wrong := engine.wrong_published()), "".join(wrong[:1]), "P8")

    def abandon(self, engine: VllmEngine) -> None:
        """Judge only reads and answers, not what stays held: the scenario broke the connector permanently."""
        engine.abandoned = True
        self.violations += [*self.reads(engine), *self.answers(engine)]

    def held(self, engine: VllmEngine) -> dict[str, int]:
        """The adapter's counts of held things, without zeros."""
        counts: Counter[str] = Counter()
        for connector in connectors_of(engine.connector):
            if type(connector).__name__ == self.subject.name:
                counts.update(self.subject.adapter.held(connector))
        return {name: count for name, count in counts.items() if count}

    def judge(self, situation: Callable[[Harness], object], protects: Sequence[str] = ()) -> None:
        """Create the situation; `violations` then say what is broken, by the ids raised, by default `protects`.

        Raises NotObservable if the situation does not arise.
        """
        try:
            situation(self)
        except Broken as broken:
            self.violations += [Violation(one, broken.explanation) for one in broken.protects or protects]
        except (ScenarioOver, EngineDied):
            pass  # noted already
        finally:
            self.close()

    # The rules

    def _settle(self, engine: VllmEngine) -> None:
        """Run all requests to their end, and check every rule that holds then."""
        self.finish(engine)
        drained = engine.drain(self.subject.timeout)
        published = [Violation("P8", what) for what in engine.wrong_published()]
        found = [*self._promises(engine), *self.reads(engine), *self.offers(engine), *published, *self.answers(engine)]
        self.violations += _first_of_each([*found, *self._lasting(engine, drained)])

    @property
    def _kept_stepping(self) -> str:
        return f"with no request alive, vLLM is kept stepping for {self.subject.timeout:.0f} s"

    def _lasting(self, engine: VllmEngine, drained: bool) -> Iterator[Violation]:
        if not drained:
            yield Violation("P11", self._kept_stepping)
        if engine.held_blocks:
            yield Violation("P1", f"with no request alive, {engine.held_blocks} of the engine's blocks are not free")
        if held := self.held(engine):
            counted = ", ".join(f"{count} {name}" for name, count in held.items())
            yield Violation("P1", f"with no request alive, the connector holds {counted}")

    def _promises(self, engine: VllmEngine) -> Iterator[Violation]:
        observed = engine.observed
        asynchronous = {
            (probe.step, probe.request_id) for probe in observed.probes if probe.asynchronous and probe.answer
        }
        loads = Counter(one.request_id for one in observed.commits if (one.step, one.request_id) in asynchronous)
        for request_id, times in observed.received.items():
            if times > loads[request_id]:
                yield Violation("H08", f"{times} receives of {request_id} are reported, {loads[request_id]} ran")
        for probe in observed.probes:
            room = probe.num_tokens - probe.computed - (0 if probe.asynchronous else 1)
            if probe.answer is not None and not 0 <= probe.answer <= max(room, 0):
                yield Violation(
                    "P6",
                    f"{probe.request_id} has {probe.num_tokens} tokens, {probe.computed} of them computed, and is "
                    f"promised {probe.answer}",
                )
                return

    def answers(self, engine: VllmEngine) -> Iterator[Violation]:
        """Requests whose users got other tokens than from an engine without a cache."""
        for request_id in engine.requests:
            got, wanted = engine.observed.outputs[request_id], engine.expected(request_id)
            whole = engine.observed.finished.get(request_id) == "length"
            if got != (wanted if whole else wanted[: len(got)]):
                yield Violation("P9", f"the user of {request_id} gets other tokens than without a cache")

    def offers(self, engine: VllmEngine) -> Iterator[Violation]:
        """States that vLLM's scheduler offered in blocks that do not hold them."""
        yield from (Violation("P2", what) for what in engine.observed.wrong_offers)

    def reads(self, engine: VllmEngine) -> Iterator[Violation]:
        """Wrong slots that attention has read, at most one per request."""
        firsts: dict[str, Violation] = {}
        for slot in engine.observed.wrong_slots:
            firsts.setdefault(slot.request_id, Violation("P2", str(slot)))
        yield from firsts.values()


def _first_of_each(violations: Sequence[Violation]) -> list[Violation]:
    """The first violation of each property, with the number of further ones."""
    firsts: dict[str, Violation] = {}
    for violation in violations:
        firsts.setdefault(violation.broken, violation)
    counts = Counter(violation.broken for violation in violations)
    return [
        Violation(broken, first.what + (f" (and {counts[broken] - 1} more like it)" if counts[broken] > 1 else ""))
        for broken, first in firsts.items()
    ]
