"""Exits of matches in each step of a scheduler under the pact, and refusals to report to vLLM.

Owns one `MatchTracker` for each connector that speaks the pact, and the facts of the running step. Adds nothing to
vLLM's decisions, but that a match which its connector takes back gets no blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from kvpact.contract import ExternalMatchExit
from kvpact.matches.forms import form_of
from kvpact.matches.tracker import MatchTracker, OpenMatch
from kvpact.vllm.compat import matches as compat


class EngineExits:
    """The matches of one scheduler, whose connector is there already; `trackers` is empty if none speaks the pact."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._allocate_slots: Any = None
        """vLLM's own function while it is watched, which is from a promise to the end of the step at most."""
        self._watched: list[tuple[MatchTracker, OpenMatch]] = []
        """The promises for the request that the scheduler asked for last."""
        self._refused: list[tuple[Any, set[int]]] = []
        """Steps under way, and the blocks of loads that they wait for and that their connectors have refused."""
        self.throttled = False
        """True if the running step may start no prompts."""
        connector = scheduler.connector
        no_blocks = self._manager.empty_kv_cache_blocks
        self.trackers: list[MatchTracker] = []
        leaves = compat.leaves_of(connector)
        for each in leaves:
            if (form := form_of(each, no_blocks)) is not None:
                tracker = MatchTracker(form, partial(self._lost_to_another, each), self._promised)
                each.get_num_new_matched_tokens = tracker.prepare
                each.update_state_after_alloc = tracker.commit
                self.trackers.append(tracker)
        if self.trackers and leaves != [connector]:
            self._ask_all = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._ask_siblings

    def _lost_to_another(self, connector: Any, request_id: str) -> bool:
        chosen = compat.chosen_connector(self._scheduler.connector, request_id)
        return chosen is not None and chosen is not connector

    # The step

    def end_step(self, output: Any) -> None:
        """All requests of the step are chosen: report the exit of each match that was not taken."""
        if self._allocate_slots is not None:
            self._stop_watching()
        finished = output.finished_req_ids
        for tracker in self.trackers:
            if finished:
                tracker.requests_finished(finished)
            tracker.end_step(partial(self._why, output))
            if tracker.shortfalls:
                self._load_fewer(tracker, output)

    def step_ended(self, output: Any) -> None:
        """The step's report is in: tell vLLM the tokens that will not come of loads that were committed with it."""
        self._refused = [entry for entry in self._refused if entry[0] is not output]
        for tracker in self.trackers:
            self._load_fewer(tracker)

    def _load_fewer(self, tracker: MatchTracker, output: Any = None) -> None:
        for short in tracker.shortfalls:
            if short.asynchronous:
                compat.load_fewer(self._scheduler, short.request, short.missing, nothing=short.accepted == 0)
            else:  # vLLM has published the blocks: the step's report must name them as not loaded
                self._refused.append((output, compat.blocks_behind(self._scheduler, short.request, short.missing)))
        tracker.shortfalls.clear()

    def refused_in(self, output: Any) -> set[int]:
        """The blocks that the step with this output waits for in vain."""
        return set[int]().union(*(blocks for step, blocks in self._refused if step is output))

    def _why(self, output: Any, found: OpenMatch, asked: bool) -> ExternalMatchExit | None:
        """Reason why a match was not taken in this step, if none is noted; None: taken with the step's output."""
        request = found.request
        if compat.commits_later(self._scheduler, request.request_id):
            return None
        if not asked:
            return compat.why_not_asked(self._scheduler, output, request)
        return ExternalMatchExit.THROTTLED if self.throttled else ExternalMatchExit.BUDGET

    # What happens within a step

    def _ask_siblings(self, request: Any, num_computed_tokens: int) -> Any:
        """MultiConnector's lookup: if one connector wants time, what the others promised is not taken."""
        answer = self._ask_all(request, num_computed_tokens)
        if answer[0] is None:
            self.note(request, ExternalMatchExit.OTHER_CONNECTOR_WAITS)
        return answer

    def note(self, request: Any, reason: ExternalMatchExit) -> None:
        """The running step does not take the request's matches, for this reason."""
        for tracker in self.trackers:
            found = tracker.open.get(request.request_id)
            if found is not None:
                found.exit = reason

    def _promised(self, tracker: MatchTracker, found: OpenMatch) -> None:
        """The scheduler has a promise: the next thing that it may do for the request is to allocate blocks."""
        if self._allocate_slots is None:
            self._allocate_slots = self._manager.allocate_slots
            self._manager.allocate_slots = self._allocate
        elif self._watched and self._watched[0][1].request is not found.request:
            self._watched.clear()
        self._watched.append((tracker, found))

    def _allocate(self, request: Any, *arguments: Any, **named: Any) -> Any:
        """vLLM's `allocate_slots`, until it was called for the request with the promise."""
        allocate_slots = self._allocate_slots
        if not self._watched or self._watched[0][1].request is not request:
            return allocate_slots(request, *arguments, **named)
        promises = [*self._watched]
        self._stop_watching()
        taken = named.get("num_external_computed_tokens", 0)
        if taken and not all(tracker.confirm(found, taken) for tracker, found in promises):
            return None
        blocks = allocate_slots(request, *arguments, **named)
        if blocks is None:
            for _, found in promises:
                found.exit = ExternalMatchExit.NO_BLOCKS
        return blocks

    def _stop_watching(self) -> None:
        self._watched.clear()
        self._manager.allocate_slots = self._allocate_slots
        self._allocate_slots = None

    # What happens between steps

    def finish(self, request_ids: str | Iterable[str] | None) -> None:
        """Drop the matches of requests that are ended from outside; None: of all requests."""
        ended = [request_ids] if isinstance(request_ids, str) else request_ids
        for tracker in self.trackers:
            tracker.requests_finished([*tracker.open] if ended is None else ended)

    def pause_changed(self) -> None:
        """vLLM is paused, after which it may not step for a while, or goes on."""
        if compat.is_paused(self._scheduler):
            for tracker in self.trackers:
                for found in tracker.open.values():
                    tracker.postpone(found, ExternalMatchExit.PAUSED, asked=False)
