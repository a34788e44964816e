"""Forms of a connector's part in the pact: prepare, commit and abort by the methods that it has.

Owns kvpact's own form, and those in which such a lifecycle was first proposed for vLLM:

- `prepare_external_match`, `commit_external_match` and `abort_external_match`: `SupportsExternalMatch`. A commit that
  takes (request, blocks, match) has no number, and is called only if all promised tokens are taken.
- The opaque query result: `get_num_new_matched_tokens` returns it as a third value, or in an `ExternalKVMatch`, and
  `update_state_after_alloc(request, blocks, num_external_tokens, query_result)` gets it back, with 0 tokens if the
  match is not taken. A request without a match gets None. `(request, blocks, query_result)` has no number, and is
  called for all promised tokens, or without blocks. A last argument `match` gets the `ExternalKVMatch` itself.
- The tuple API and `abort_external_match(request, reason)`, or without the reason.
- The tuple API with a documented contract, `releases_unused_matches = True`: such a match ends by
  `update_state_after_alloc(request, blocks, 0)` without blocks.

Each may also have `postpone_external_match`, `confirm_external_match` and `asks_every_step`. A connector needs nothing
of kvpact for this, and one without these methods gets no new calls. Knows no scheduler, no match's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact.errors import ConfigError


@runtime_checkable
class SupportsExternalMatch(Protocol):
    """Scheduler side of a connector that speaks the pact. `request` and `blocks` are the engine's own objects."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Promise tokens that follow `num_computed_tokens`, in place of `get_num_new_matched_tokens`.

        None: ask again later; an older match stays open meanwhile. Asking again for the same returns the same
        `query_result` and acquires nothing. An older match is aborted after an answer with another `query_result`
        (compared by `is`) or without tokens. A match without one is not asked for again while the number of computed
        tokens is the same, for `POSTPONED_STEPS` steps at most, and is aborted before the engine asks anew; a connector
        whose leases last seconds only sets `asks_every_step = True`, and renews such a match when it is asked again.
        """

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        """Take `num_tokens`, 1 or more, of the match into `blocks`; returns the number that the cache accepts.

        It may be smaller for an asynchronous load only. A synchronous load is confirmed before.
        """

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """Release the match's leases now, as the engine will not take it. `reason.is_dropped` is true."""


@runtime_checkable
class PostponesExternalMatch(Protocol):
    """Connector that gets the reason why its match was not taken yet."""

    def postpone_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """Keep the match of a request that still waits, for `reason`, and may be prepared again.

        Called in the first such step, and when the reason changes, or the engine stops asking for it.
        """


@runtime_checkable
class ConfirmsExternalMatch(Protocol):
    """Connector that may withdraw a part of a match for which the step would wait."""

    def confirm_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int) -> int:
        """Number of these tokens of the match that can still be loaded, before blocks are allocated for them.

        If it is smaller, nothing is allocated in this step, the match is aborted, and the next one is limited to it.
        """


Arguments: TypeAlias = tuple[str, ...]

PREPARE = "prepare_external_match"
COMMIT = "commit_external_match"
ABORT = "abort_external_match"
COMMITS: tuple[Arguments, ...] = ("request", "match", "num_tokens", "blocks"), ("request", "blocks", "match")
ABORTS: tuple[Arguments, ...] = (
    ("request", "match", "reason"),
    ("request", "match"),
    ("request", "reason"),
    ("request",),
)
UPDATES: tuple[Arguments, ...] = (
    ("request", "blocks", "num_tokens", "match"),
    ("request", "blocks", "num_tokens"),
    ("request", "blocks", "match"),
)
POSTPONES: tuple[Arguments, ...] = ("request", "match", "reason"), ("request", "reason")
CONFIRMS: tuple[Arguments, ...] = (("request", "match", "num_tokens"),)

MATCH_NAMES: Final = ("match", "external_match")
PLAN_NAMES: Final = ("query_result", "result", "plan")
"""Names of an argument that gets a match, or its `query_result` alone."""


def _does_nothing(*values: Any) -> None:
    """Stand in for a method that a connector does not have."""


@dataclass(frozen=True, slots=True)
class Call:
    """Method of a connector, called with all of the pact's values, in the order of the longest form of arguments."""

    method: Callable[..., Any] = _does_nothing
    arguments: Arguments = ()
    """Values of the pact that the connector gets."""
    gets_match: bool = False
    """True if the connector's argument is by its name or type the match, not its `query_result`."""

    @classmethod
    def of(cls, connector: object, name: str, forms: Sequence[Arguments]) -> Call:
        """Method of this name, in the first of these forms in which it can be called.

        Among forms with equally many arguments the name or type of the last one decides; a method with any arguments
        gets the first. Raises ConfigError for a readable signature that fits none.
        """
        method = getattr(connector, name, None)
        if method is None:
            return cls()
        values = max(forms, key=len)
        try:
            signed = signature(method)
        except (ValueError, TypeError):
            chosen = forms[0]
            gets_match = False
        else:
            chosen = _chosen(f"{type(connector).__name__}.{name}", signed, forms)
            gets_match = any(_is_match(each) for each in signed.parameters.values())
        if chosen == values:
            return cls(method, chosen, gets_match)
        places = [values.index(name) for name in chosen]
        return cls(lambda *given: method(*[given[place] for place in places]), chosen, gets_match)


def _chosen(method: str, signed: Signature, forms: Sequence[Arguments]) -> Arguments:
    named = [each.name for each in signed.parameters.values() if each.kind is Parameter.KEYWORD_ONLY]
    fitting = [form for form in forms if _fits(signed, form)]
    if not fitting or not {*MATCH_NAMES, *PLAN_NAMES}.isdisjoint(named):
        wanted = " or ".join(f"({', '.join(form)})" for form in forms)
        raise ConfigError(f"{method}{signed} is not called with that; it takes {wanted}")
    alike = [form for form in fitting if len(form) == len(fitting[0])]
    parameters = [*signed.parameters.values()]
    last = parameters[len(alike[0]) - 1 : len(alike[0])]
    return next((form for form in alike if last and _is_named(last[0], form[-1])), alike[0])


def _fits(signed: Signature, arguments: Arguments) -> bool:
    try:
        return bool(signed.bind(*arguments))
    except TypeError:
        return False


def _is_named(parameter: Parameter, value: str) -> bool:
    if value == "match" and (parameter.name in PLAN_NAMES or _is_match(parameter)):
        return True
    return parameter.name == value


def _is_match(parameter: Parameter) -> bool:
    return parameter.name in MATCH_NAMES or ExternalKVMatch.__name__ in str(parameter.annotation)


class _UnpackedMatch(ExternalKVMatch):
    """Match of a connector that answered with a tuple, and has not seen this object."""


NO_MATCH: Final[ExternalKVMatch] = _UnpackedMatch(0)


def plan_of(match: ExternalKVMatch) -> object:
    """Record of a match by its connector: its `query_result`, or an object without that field itself."""
    return getattr(match, "query_result", match)


def match_in(answer: Any) -> ExternalKVMatch | None:
    """Match in a connector's answer, a tuple or an object; None if it wants time. The values may be anything."""
    if isinstance(answer, tuple | list):
        num_tokens, load_kv_async, *plan = answer
        return None if num_tokens is None else _UnpackedMatch(num_tokens, load_kv_async, *plan)
    if answer is None or answer.num_tokens is None:
        return None
    match: ExternalKVMatch = answer
    return match


class MatchForm(ABC):
    """Calls of an engine to one connector. The answers are the connector's, and may be anything."""

    whole_only = False
    """True if a commit has no number, so that a match is taken as a whole or not at all."""

    def __init__(self, connector: Any) -> None:
        self.name = type(connector).__name__
        self.asks_every_step = bool(getattr(connector, "asks_every_step", False))
        self._postpone = Call.of(connector, "postpone_external_match", POSTPONES)
        self._confirm = Call.of(connector, "confirm_external_match", CONFIRMS)

    @abstractmethod
    def prepare(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Ask for a match; None if the connector wants time."""

    @abstractmethod
    def commit(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> Any:
        """See `SupportsExternalMatch`; None accepts all."""

    @abstractmethod
    def abort(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """End the match without a load, for this reason."""

    @abstractmethod
    def admit(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Note that a request without an open match got its blocks."""

    def must_end(self, match: ExternalKVMatch) -> bool:
        """True if the connector gets a call at the match's end."""
        return True

    def known_as(self, match: ExternalKVMatch, call: Call) -> object:
        """Object that the connector gets as the match."""
        return match

    def postpone(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """Call the connector's `postpone_external_match`, if it has one."""
        self._postpone.method(request, self.known_as(match, self._postpone), reason)

    def confirm(self, request: Any, match: ExternalKVMatch, num_tokens: int) -> Any:
        """See `ConfirmsExternalMatch`; None accepts all."""
        if self.whole_only and num_tokens < match.num_tokens:
            return 0
        return self._confirm.method(request, self.known_as(match, self._confirm), num_tokens)


class PactForm(MatchForm):
    """`SupportsExternalMatch`."""

    def __init__(self, connector: Any) -> None:
        """Raises ConfigError for a method that cannot be called."""
        super().__init__(connector)
        self._prepare = getattr(connector, PREPARE)
        self._admit = connector.update_state_after_alloc
        self._commit = Call.of(connector, COMMIT, COMMITS)
        self._abort = Call.of(connector, ABORT, ABORTS)
        self.whole_only = "num_tokens" not in self._commit.arguments

    def prepare(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Call `prepare_external_match`."""
        return match_in(self._prepare(request, num_computed_tokens))

    def commit(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> Any:
        """Call `commit_external_match`, in the form that the connector takes."""
        return self._commit.method(request, match, num_tokens, blocks)

    def abort(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """Call `abort_external_match`, in the form that the connector takes."""
        self._abort.method(request, match, reason)

    def admit(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Call `update_state_after_alloc`."""
        self._admit(request, blocks, num_tokens)


class TupleForm(MatchForm):
    """The tuple API, with whatever says that a match is over: a hook, the query result, or a commit of no tokens."""

    def __init__(self, connector: Any, no_blocks: object) -> None:
        """`no_blocks`: the engine's blocks of a request that has none. Raises ConfigError like `PactForm`."""
        super().__init__(connector)
        self._ask = connector.get_num_new_matched_tokens
        self._no_blocks = no_blocks
        self._update = Call.of(connector, "update_state_after_alloc", UPDATES)
        self._update_without_result = Call.of(connector, "update_state_after_alloc", UPDATES[1:] + UPDATES[:1])
        self.whole_only = "num_tokens" not in self._update.arguments
        self._abort = Call.of(connector, ABORT, (ABORTS[0], ABORTS[2], ABORTS[1], ABORTS[3]))
        self._releases_unused = bool(getattr(connector, "releases_unused_matches", False))

    def known_as(self, match: ExternalKVMatch, call: Call) -> object:
        """Match, or its query result if the connector answered with a tuple or the call's argument is no match."""
        return match if call.gets_match and not isinstance(match, _UnpackedMatch) else plan_of(match)

    @property
    def speaks_the_pact(self) -> bool:
        """True if the connector has a way to learn of a match's end."""
        return self._releases_unused or bool(self._abort.arguments) or "match" in self._update.arguments

    def prepare(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Call `get_num_new_matched_tokens`. Raises ValueError for a match of which the commit could say nothing."""
        match = match_in(self._ask(request, num_computed_tokens))
        if self.whole_only and match is not None and match.num_tokens and self.known_as(match, self._update) is None:
            raise ValueError("its match has no query_result, and update_state_after_alloc takes nothing else")
        return match

    def must_end(self, match: ExternalKVMatch) -> bool:
        """See `MatchForm`: of a connector that takes any arguments, those with a query result."""
        known = self.known_as(match, self._update)
        return known is not None or self._releases_unused or bool(self._abort.arguments) or self.whole_only

    def commit(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> Any:
        """Call `update_state_after_alloc` with the query result, if there is one."""
        result = self.known_as(match, self._update)
        if result is None:
            return self.admit(request, blocks, num_tokens)
        return self._update.method(request, blocks, num_tokens, result)

    def abort(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """Call the hook, or else commit no tokens, if the connector is to hear of it."""
        if self._abort.arguments:
            self._abort.method(request, self.known_as(match, self._abort), reason)
        elif self.must_end(match):
            self.commit(request, match, 0, self._no_blocks)

    def admit(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Call `update_state_after_alloc` without a query result."""
        self._update_without_result.method(request, blocks, num_tokens, None)


def form_of(connector: Any, no_blocks: object) -> MatchForm | None:
    """Form of the pact that a connector speaks; None if it does not.

    Raises ConfigError for one that has only some of the methods, or one that cannot be called.
    """
    missing = [name for name in (PREPARE, COMMIT, ABORT) if not callable(getattr(connector, name, None))]
    if not missing:
        return PactForm(connector)
    if PREPARE not in missing or COMMIT not in missing:
        raise ConfigError(
            f"{type(connector).__name__} prepares or commits matches, but has no {' and no '.join(missing)}"
        )
    form = TupleForm(connector, no_blocks)
    if form.speaks_the_pact:
        return form
    if ExternalKVMatch.__name__ in str(getattr(connector.get_num_new_matched_tokens, "__annotations__", {})):
        raise ConfigError(
            f"{form.name}.get_num_new_matched_tokens returns an ExternalKVMatch that nothing ends: name the last "
            f"argument of update_state_after_alloc query_result or match, or add {ABORT}(request, match, reason)"
        )
    return None
