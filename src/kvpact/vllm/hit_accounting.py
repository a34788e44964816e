"""Corrections of vLLM's cache hits: without tokens whose load failed, with tokens found later.

Owns the corrections of two counts that vLLM makes when it admits a request: the request's own statistics
(`Request.prefill_stats`), which it sends with the first answer, after the workers' report, so there is time to correct
them; and its hits of external caches, for `kvpact.vllm.scheduler`. That class counts the hits of steps for any
connector, with `StepHits`; kvpact's own connector corrects what loads come to, with `HitCredit`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpact.tiers.backends import MEMORY, NEIGHBOURS
from kvpact.tiers.urls import TierURL, tier_labels
from kvpact.vllm.compat.objects import add_hits

UNKNOWN_PLACE: Final = "external_unspecified"
"""vLLM's name for a remote store, and for a place that is not known."""


ON_DISK: Final = ("disk", "dir", "file")
"""Schemes of the tiers that vLLM's statistics call disk."""


def places_of(tiers: Sequence[TierURL]) -> dict[str, str]:
    """Names that vLLM's statistics have for the places of memory and these tiers, by their labels."""
    labels = zip(tier_labels(tiers), tiers, strict=True)
    disks = {label: "disk" for label, url in labels if url.scheme in ON_DISK}
    return {MEMORY: "host", NEIGHBOURS: "host"} | disks


class StepHits:
    """Counts the tokens that workers had when a step began, for the requests that vLLM had scheduled it for.

    A request counts as it was when its step was scheduled: it may be preempted, or gone, when the workers answer.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, tuple[Any, Any, bool]]] = {}
        """The `id` of a step's output -> each request whose prompt it computes, its statistics, and whether it was
        preempted before."""

    def scheduled(self, step: Any, requests: Mapping[str, Any]) -> None:
        """vLLM scheduled a step; `requests` are all that it has."""
        prefills = [requests[name] for name, count in step.num_scheduled_tokens.items() if count > 1]
        if prefills:
            known = {one.request_id: (one, one.prefill_stats, one.num_preemptions > 0) for one in prefills}
            self._steps[id(step)] = known

    def begin_again(self, request_ids: Collection[str]) -> None:
        """Tokens of these requests that steps in flight skip will be computed after all."""
        for prefills in self._steps.values():
            for name in prefills.keys() & set(request_ids):
                del prefills[name]

    def count(self, step: Any, hits: Mapping[str, int], counted: Any, connector: Any) -> None:
        """The step skipped `hits`. `counted` is vLLM's count of external hits, None if it keeps none."""
        prefills = self._steps.pop(id(step), {})
        for name in hits.keys() & prefills.keys():
            request, stats, again = prefills[name]
            if stats is not None and not again:
                _mend(request, stats, hits[name])
            if counted is not None:
                add_hits(counted, request, hits[name], connector, preempted=again)


@dataclass(slots=True)
class AdmittedLoad:
    """A load that vLLM counted as hits, until its outcome is known."""

    request: Any
    stats: Any
    """The request's statistics; None where vLLM counted the load elsewhere: after a preemption."""
    tokens: int
    """The tokens that arrive, as far as is known."""
    synchronous: bool
    found: Sequence[tuple[str, int]] = ()
    """Where its tokens were found, as vLLM names places, in order, each with their number."""

    def places(self, tokens: int) -> dict[str, int]:
        """Where the first `tokens` tokens were found; `UNKNOWN_PLACE` for those of which nothing is known."""
        counted = dict[str, int]()
        for place, part in (*self.found, (UNKNOWN_PLACE, tokens)):
            some = part if part < tokens else tokens  # a call of `min` costs more
            if some > 0:
                counted[place] = some + counted.get(place, 0)
                tokens -= some
        return counted

    @property
    def after_preemption(self) -> bool:
        """True if the request was preempted: vLLM counts such hits apart."""
        return self.stats is None


class HitCredit:
    """Hits of loads as vLLM should count them: `num_cached_tokens` of each request, and the hits of all."""

    def __init__(self) -> None:
        self._loads: dict[str, AdmittedLoad] = {}
        self._hits = {False: 0, True: 0}
        """Tokens to add to vLLM's hits, by whether the request was preempted."""
        self._places = dict[str, int]()
        """Tokens of first admissions among them, by the place where they were found."""

    def admit(self, request: Any, tokens: int, *, synchronous: bool, found: Sequence[tuple[str, int]] = ()) -> None:
        """vLLM admits a request with a load of `tokens` tokens and counts them as hits; subtract them until they are
        used."""
        stats = request.prefill_stats if request.num_preemptions <= 0 else None
        load = self._loads[request.request_id] = AdmittedLoad(request, stats, tokens, synchronous, found)
        self._hits[load.after_preemption] -= tokens
        if not load.after_preemption:
            self._count(load, -1)

    def _count(self, load: AdmittedLoad, sign: int) -> None:
        places = self._places
        for place, tokens in load.places(load.tokens).items():
            places[place] = sign * tokens + places.get(place, 0)

    def places(self, request_id: str, tokens: int) -> dict[str, int]:
        """Where `tokens` tokens of a request's hit were found."""
        load = self._loads.get(request_id)
        return load.places(tokens) if load is not None else {UNKNOWN_PLACE: tokens}

    def load_failed(self, request_id: str, arrived: int) -> None:
        """All but the first `arrived` tokens of the request's load will be computed."""
        load = self._loads.get(request_id)
        if load is None or arrived >= load.tokens:
            return
        if load.stats is not None:
            _mend(load.request, load.stats, arrived - load.tokens)
        load.tokens = arrived

    def step_reported(self, request_id: str) -> None:
        """The step of a synchronous load is over: the tokens that arrived were used in it."""
        load = self._loads.get(request_id)
        if load is not None and load.synchronous:
            self._use(request_id)

    def scheduled(self, request_ids: Container[str]) -> None:
        """Count the tokens of asynchronous loads as used, for those of these requests that the step computes."""
        for request_id, load in [*self._loads.items()]:
            if not load.synchronous and request_id in request_ids:
                self._use(request_id)

    def _use(self, request_id: str) -> None:
        load = self._loads.pop(request_id)
        self._hits[load.after_preemption] += load.tokens
        if not load.after_preemption:
            self._count(load, 1)

    def request_finished(self, request_id: str) -> None:
        """The request ended; the report of its last step comes after this call."""
        load = self._loads.get(request_id)
        if load is not None and not load.synchronous:
            del self._loads[request_id]

    def corrections(self) -> tuple[int, int, dict[str, int]]:
        """Tokens to add to vLLM's hits since the last call: of first admissions, after preemptions, and the first of
        these by the place where they were found.

        Negative by at most what vLLM itself has counted since then.
        """
        hits = self._hits
        self._hits = {False: 0, True: 0}
        places = self._places
        self._places = {}
        return hits[False], hits[True], places

    def __len__(self) -> int:
        return len(self._loads)


def _mend(request: Any, stats: Any, tokens: int) -> None:
    """Count `tokens` more tokens as not computed; fewer if negative."""
    stats.num_cached_tokens += tokens
    stats.num_external_cached_tokens += tokens
    stats.num_computed_tokens -= tokens
    if request.prefill_stats is not stats:  # final: tokens that were not computed were not created here either
        stats.num_cache_creation_tokens = max(0, stats.num_cache_creation_tokens - tokens)
