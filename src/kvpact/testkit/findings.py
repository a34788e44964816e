"""How a check says what it found: by raising `Broken` or `NotObservable`, under the name of a property or hazard.

Owns the names of the contract's properties (P), of the further promises of a tier (T) and of the failures known from
this field (H) that the kit looks for. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from unittest import SkipTest

from kvpact.errors import PactViolation
from kvpact.testkit.report import Check, Verdict

TITLES = MappingProxyType({
    "P1": "every plan ends once; at rest nothing is held",
    "P2": "a promise holds until it is committed or aborted",
    "P3": "probing again acquires nothing",
    "P4": "a commit may shrink, to nothing if need be",
    "P5": "nothing is decided after the promise",
    "P6": "a match leaves the prompt's last token to compute",
    "P7": "loaded and failed tokens add up to the committed ones",
    "P8": "no block is visible before all of it is there",
    "P9": "a failure is exact, and changes no token that a user sees",
    "P10": "reports of several ranks combine soundly",
    "P11": "everything ends in time; no call of the scheduler waits for I/O",
    "P12": "memory is bounded",
    "P13": "what is served was computed by the weights that serve now; nothing from before a reset",
    "P14": "what is sick costs its own hits only, never another request's",
    "T1": "blocks come back from a tier as they were stored, from any number of ranks",
    "T2": "a block is stored only behind the blocks before it",
    "T3": "what is held is not written again",
    "T4": "deleting takes all that needs it; clearing is for good",
    "T5": "no method of a tier raises for what its store does; delete and clear raise TierError if it did not do them",
    "T6": "what a tier says of itself is true",
    "T7": "a closed tier answers nothing, and never raises",
    "T8": "threads, and processes if it says so, may use a tier at once",
    "H01": "a lookup that is never committed keeps its pins",
    "H02": "a blocked request is looked up, hashed or fetched again every step",
    "H03": "a plan is committed for another range than the engine now needs",
    "H04": "what the engine does not commit of a promise stays pinned",
    "H05": "a rule applied after the promise skips the load in silence",
    "H06": "a match of the whole prompt ends the engine",
    "H07": "a request cancelled during its load leaks its blocks, or they are written after they were given away",
    "H08": "a receive is reported finished twice",
    "H09": "a load that always fails is promised for ever",
    "H10": "a load without a deadline makes its request wait for ever",
    "H11": "a remote lease runs out between lookup and load",
    "H13": "an exception in a hook ends the engine",
    "H20": "a read counts its hits and not the unbroken prefix",
    "H21": "a late read writes into a buffer that was given back",
    "H22": "damaged bytes are served",
    "H23": "two namespaces share keys",
    "H24": "adapter, media or tenant salt is not in the key",
    "H26": "a failed or unfinished store is visible",
    "H27": "a save reads blocks that were freed meanwhile",
    "H28": "a failed load leaves its blocks in the engine's prefix cache",
    "H29": "tokens in flight count as computed",
    "H30": "a load that ends inside a block passes for the whole block",
    "H31": "a dropped status reads as success",
    "H32": "old KV is served after the weights changed",
    "H35": "of two resets close together the second is lost",
    "H36": "what a store refused to clear is served when it is back",
    "H37": "after a reset new blocks are stored under the identity of the old files",
    "H38": "blocks computed before a reset are saved after it",
    "H40": "a rank that says nothing is taken for one that agrees",
    "H41": "failed ranges are combined by keeping one rank's start",
    "H42": "saves with gaps are reported as one range",
    "H43": "ranks that disagree crash or hang",
    "H44": "reports of a request that ends in the same step are lost",
    "H45": "late or repeated reports are counted twice",
    "H46": "one engine's reset empties a store that others use, or a store that lost its blocks never gets them again",
    "H50": "more is stored than the capacity",
    "H51": "an index, memo or list grows for ever",
    "H52": "a dropped write keeps its memory",
    "H53": "one allocation while all is pinned empties the index",
    "H54": "eviction takes a chain's head first and leaves what nothing can reach",
    "H55": "the cost of a lookup grows with the square of the prompt",
    "H56": "shutdown waits for ever on a stuck write",
    "H57": "the tracker's bound has nothing to do with the cache's size",
    "H58": "a slow store stalls the scheduler's thread",
    "H59": "a restart loses what is stored",
    "H61": "a tier that hangs takes all slots, and every request waits its whole deadline for it",
    "H62": "a request whose blocks cannot be named ends the step of all",
    "H64": "a call of the store that hangs keeps the process from ending",
    "H66": "a tier that raises in a deletion is off for ever, or the deletion counts as done",
    "H69": "a write that was given up lands after a reset",
    "H70": "hits are counted when promised and not when used",
    "H71": "a counter goes back",
    "H90": "the scheduler's output is edited in place",
    "H91": "a wrapper drops a return value",
    "H92": "the hook is put on one model runner and the other runs",
    "H93": "a load before the state update is wiped by the zeroing of new blocks",
})  # fmt: skip
"""What each property promises and what each hazard does, in one line, by id."""


class Broken(PactViolation):
    """A check saw its property broken. `script` are the steps that led there, `protects` the ids that are concerned."""

    def __init__(self, explanation: str, script: Sequence[str] = (), protects: Sequence[str] = ()) -> None:
        self.explanation = explanation
        self.script = tuple(script)
        self.protects = tuple(protects)
        titles = [f"{name}: {TITLES[name]}" for name in protects]
        super().__init__("\n    ".join([*titles, explanation, *self.script]))


class NotObservable(SkipTest):
    """The property cannot be seen here, for the reason given; pytest and unittest count the check as skipped."""


def require(condition: bool, explanation: str) -> None:
    """Raise `Broken` with `explanation` unless `condition`; works under `python -O`, and without pytest."""
    if not condition:
        raise Broken(explanation)


def concerned(check: Check) -> tuple[str, ...]:
    """The ids on which `check` has something to say: what it came upon, and what it is about, for it was not kept."""
    return tuple(dict.fromkeys([*(violation.broken for violation in check.violations), *check.protects]))


def verdicts(checks: Iterable[Check]) -> dict[str, Verdict]:
    """For each id, in the order of `TITLES`: broken if any check says so, else kept if any does."""
    said: dict[str, set[Verdict]] = {}
    for check in checks:
        for name in concerned(check):
            said.setdefault(name, set()).add(check.verdict)
    order = (Verdict.BROKEN, Verdict.KEPT, Verdict.NOT_OBSERVABLE)
    return {name: next(verdict for verdict in order if verdict in said[name]) for name in TITLES if name in said}
