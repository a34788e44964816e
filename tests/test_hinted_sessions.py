"""The benchmark of coding sessions whose clients hint: which turns it plays, what clients send, and what it counts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from benchmarks.hinted_sessions import HINTS, SCALE, Sessions, play, prompt_of, row, sessions_of

from kvpact.hints.schema import parse_hints
from kvpact_testkit.compare.server import Answer, Server, ServerError

PAUSE = 6 * SCALE
REQUESTS, SESSIONS = 4, 20


def recorded(name: str, pause: float) -> Iterator[dict[str, Any]]:
    """A session whose prompts grow by 64 names of 64 tokens each, with a pause before the third request."""
    for number, at in enumerate((0.0, 1.0, 1.0 + pause, 2.0 + pause)):
        tokens = 4096 * (number + 1)
        new = {"keep": 64 * number, "runs": [[64 * number, 64]]}
        yield {"trace": name, "t": at, "depth": 0, "in": tokens, "out": 100, **new}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits; each client keeps its order."""
    monkeypatch.setattr("benchmarks.hinted_sessions.time.sleep", lambda seconds: None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    sessions = {"never waits": 2.0, **{f"session {number}": PAUSE + number for number in range(SESSIONS)}}
    lines = [json.dumps(one) for name, pause in sessions.items() for one in recorded(name, pause)]
    (tmp_path / "coding_sessions_delta.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


class AskedServer:
    """Answers at once, with a share of the prompt from a cache; refuses one request. Remembers what was asked."""

    def __init__(self, refused: int = -1) -> None:
        self._refused = refused
        self.asked: list[tuple[list[int], Mapping[str, Any]]] = []

    def ask(self, prompt: Sequence[int], max_tokens: int, *, fields: Mapping[str, Any] | None = None) -> Answer:
        if fields is None:  # so that counts change
            return Answer((1,), (0.01,), len(prompt), 0)
        self.asked.append(([*prompt], fields))
        if len(self.asked) == self._refused:
            raise ServerError("busy")
        return Answer((1,) * max_tokens, (0.02,) * max_tokens, len(prompt), len(prompt) // 4)

    def metrics(self) -> dict[str, float]:
        return {}


def played(sessions: Sessions, kinds: Sequence[str], server: AskedServer) -> Any:
    return play(cast("Server", server), sessions, kinds)


def chosen(data: Path) -> Sessions:
    return sessions_of(data, SESSIONS, REQUESTS, seconds=30.0, apart=0.01)


def test_sessions_that_never_wait_are_left_out_and_few_hint(data: Path) -> None:
    sessions = chosen(data)
    assert len(sessions.trace.turns) == REQUESTS * SESSIONS
    assert {turn.session for turn in sessions.trace.turns} == {*range(SESSIONS)}
    assert sessions.tokens == SESSIONS * (4 * 64 + 2)
    assert 0 < len(sessions.paused) == len(sessions.pauses) < SESSIONS
    for turn in sessions.paused:
        asking = sessions.trace.turns[turn].before
        assert sessions.pauses[asking] == pytest.approx(PAUSE + sessions.trace.turns[turn].session)
    with pytest.raises(SystemExit, match="the trace has 20 of 4 requests in 30 s, not 21"):
        sessions_of(data, SESSIONS + 1, REQUESTS, seconds=30.0, apart=0.01)


def test_a_later_prompt_of_a_session_begins_with_the_one_before_and_with_no_others(data: Path) -> None:
    turns = chosen(data).trace.turns
    prompts = {number: prompt_of(turn) for number, turn in enumerate(turns)}
    for number, turn in enumerate(turns):
        if turn.before >= 0:
            assert prompts[number][: len(prompts[turn.before])] == prompts[turn.before]
    first = [tuple(prompts[number][:32]) for number, turn in enumerate(turns) if turn.before < 0]
    assert len({*first}) == SESSIONS


@pytest.mark.parametrize("what", [*HINTS])
def test_clients_hint_before_their_longest_pauses_alone(what: str, data: Path) -> None:
    sessions, server = chosen(data), AskedServer()
    found = played(sessions, HINTS[what], server)
    given = [hints for _, fields in server.asked if (hints := parse_hints(fields.get("kv_transfer_params")))]
    assert len(server.asked) == len(sessions.trace.turns)
    assert len(given) == (len(sessions.pauses) if HINTS[what] else 0)
    for hints in given:
        assert all(outcome.is_taken for outcome in hints.outcomes.values())
        assert (hints.retain_seconds > PAUSE / SCALE) == ("retain" in HINTS[what])
        assert (0 < hints.expect_seconds < PAUSE / SCALE) == ("expect_in" in HINTS[what])
    shown = row(what, sessions, [found])
    assert (shown["failed"], shown["requests"], shown["asking"]) == (0, 80, len(sessions.paused))
    assert shown["paused_p50_ms"] == shown["others_p50_ms"] == 20.0
    assert shown["paused_hit"] == pytest.approx(25.0)


def test_a_request_that_fails_is_counted_and_its_session_goes_on(data: Path) -> None:
    sessions, server = chosen(data), AskedServer(refused=5)
    found = played(sessions, (), server)
    assert row("LRU", sessions, [found])["failed"] == 1
    assert len(found.answers) == len(sessions.trace.turns) - 1
