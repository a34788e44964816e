"""Sessions of clients and their end: what one session alone has used goes first, and nothing of anybody else."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import pytest

from kvpact.cache.sessions import DIGEST_BYTES, MOST_BYTES, MOST_SESSIONS, Sessions
from kvpact.contract import WorkerReport
from kvpact.hints.schema import KEY, Hints, parse_hints
from kvpact.identity.keys import RequestIdentity
from scenes import BLOCK_SIZE, Scene, SceneRequest, tokens

SLOTS = 40
SYSTEM = 2
OWN = 4
BLOCKS = SYSTEM + OWN


def request(name: str, seed: int, salt: str = "", blocks: int = BLOCKS) -> SceneRequest:
    """A prompt that begins with the system prompt of all."""
    own = tokens((blocks - SYSTEM) * BLOCK_SIZE + 1, seed)
    return SceneRequest(name, tokens(SYSTEM * BLOCK_SIZE, 0) + own, RequestIdentity(salt=salt))


def hinted(scene: Scene, asking: SceneRequest, **wanted: object) -> Hints:
    hints = parse_hints({KEY: wanted})
    assert hints is not None
    scene.cache.note_hints(asking, hints)
    return hints


def turn(scene: Scene, seed: int, session: str, salt: str = "", **wanted: object) -> dict[str, str]:
    """A turn of a session is computed, saved, and ends; returns the outcomes."""
    asking = request(f"{session} {scene.now}", seed, salt)
    scene.now += 1
    hints = hinted(scene, asking, session=session, **wanted)
    scene.run_cold(asking)
    return hints.described()


def flood(scene: Scene, blocks: int) -> None:
    """A prompt that nobody asks again, of so many blocks."""
    scene.now += 1
    seed = 1000 + int(scene.now)
    scene.run_cold(SceneRequest(f"flood {seed}", tokens(blocks * BLOCK_SIZE + 1, seed)))
    scene.cache.check()


def in_memory(scene: Scene, seed: int, salt: str = "") -> int:
    asking = request("asking", seed, salt)
    found = scene.prepare(asking).num_tokens // BLOCK_SIZE
    scene.cache.request_finished("asking")
    return found


@pytest.fixture
def scene() -> Scene:
    return Scene(SLOTS, hints="clients")


def test_a_release_gives_up_the_sessions_own_blocks_and_the_system_prompt_stays(scene: Scene) -> None:
    turn(scene, 1, "old")
    assert turn(scene, 2, "over", release=True) == {"session": "accepted", "release": NEW}
    flood(scene, SLOTS - SYSTEM - OWN)
    assert [in_memory(scene, seed) for seed in (1, 2)] == [BLOCKS, SYSTEM]


NEW = "clipped: the session is new, or was forgotten: blocks of this request alone"


def test_without_a_release_the_older_session_goes_first(scene: Scene) -> None:
    turn(scene, 1, "old")
    turn(scene, 2, "goes on")
    flood(scene, SLOTS - SYSTEM - OWN)
    assert [in_memory(scene, seed) for seed in (1, 2)] == [SYSTEM, BLOCKS]


def test_all_turns_of_a_session_are_given_up_but_for_what_another_request_used(scene: Scene) -> None:
    turn(scene, 1, "over", retain="5m")
    turn(scene, 2, "over", retain="5m")
    scene.run_cold(request("plain", 2))
    assert turn(scene, 3, "over", release=True) == {"session": "accepted", "release": "accepted"}
    flood(scene, SLOTS - SYSTEM - OWN)
    assert [in_memory(scene, seed) for seed in (1, 2, 3)] == [SYSTEM, BLOCKS, SYSTEM]


def test_a_request_that_lives_keeps_what_it_shares_with_a_session_that_ends(scene: Scene) -> None:
    turn(scene, 1, "over")
    living = request("living", 1)
    match = scene.prepare(living)
    scene.load(living, match)
    turn(scene, 1, "over", release=True)
    flood(scene, SLOTS - BLOCKS)
    assert in_memory(scene, 1) == BLOCKS
    scene.cache.request_finished("living")


def test_p2_a_promise_of_blocks_that_are_given_up_holds(scene: Scene) -> None:
    turn(scene, 1, "over")
    asking = request("again", 1)
    hinted(scene, asking, session="over")
    match = scene.prepare(asking)
    turn(scene, 1, "over", release=True)
    flood(scene, SLOTS - BLOCKS)
    scene.load(asking, match)
    assert scene.holds_content(asking, range(BLOCKS))
    scene.cache.request_finished("again")


def test_another_salt_has_no_session_of_that_name(scene: Scene) -> None:
    """One tenant's hint evicts nothing of another's, whatever it names."""
    turn(scene, 1, "s", salt="alice")
    turn(scene, 1, "s", salt="alice")
    assert turn(scene, 2, "s", salt="mallory", release=True)["release"] == NEW
    flood(scene, SLOTS - 2 * BLOCKS)
    flood(scene, BLOCKS)
    assert [in_memory(scene, 1, "alice"), in_memory(scene, 2, "mallory")] == [BLOCKS, 0]


def test_a_request_that_stores_nothing_releases_what_others_of_its_session_stored(scene: Scene) -> None:
    turn(scene, 1, "over")
    assert turn(scene, 2, "over", store="none", release=True)["release"] == "accepted"
    flood(scene, SLOTS - SYSTEM)
    assert in_memory(scene, 1) == SYSTEM


@pytest.mark.parametrize(
    ("wanted", "outcomes"),
    [
        ({"release": True}, {"release": "rejected: the request names no session"}),
        ({"expect_in": 5}, {"expect_in": "rejected: the request names no session"}),
        ({"session": "s" * 257}, {"session": "rejected: a name of 1 to 256 bytes is needed"}),
        ({"session": "\N{SNOWMAN}" * 100}, {"session": "rejected: a name of 1 to 256 bytes is needed"}),
        ({"session": "\ud800", "release": 1}, {"session": "accepted", "release": "rejected: true is needed"}),
        (
            {"session": "s", "release": True, "retain": 5, "expect_in": 5},
            {
                "session": "accepted",
                "release": "accepted",
                "retain": "rejected: the session ends with this request",
                "expect_in": "rejected: the session ends with this request",
            },
        ),
    ],
)
def test_hints_that_need_or_exclude_each_other(wanted: dict[str, Any], outcomes: dict[str, str]) -> None:
    hints = parse_hints({KEY: wanted})
    assert hints is not None
    assert hints.described() == outcomes


def test_the_engines_own_name_of_a_session_is_no_hint_and_a_hint_replaces_it() -> None:
    unhinted: tuple[Any, ...] = (None, {}, {KEY: {"outcomes": {}}})
    for params in unhinted:
        hints = parse_hints(params, "named")
        assert hints is not None
        assert (hints.session, hints.outcomes) == ("named", {})
    hints = parse_hints({KEY: {"session": "mine", "release": True}}, "named")
    assert hints is not None
    assert hints.session == "mine"
    hints = parse_hints({KEY: {"session": 7, "release": True}}, "named")
    assert hints is not None
    assert (hints.session, hints.release) == ("named", True)


def test_a_request_without_identity_has_no_session(scene: Scene) -> None:
    asking = SceneRequest("unknown", tokens(9), None)
    hints = hinted(scene, asking, session="s", release=True)
    reason = "rejected: the request's inputs have no digest yet, or none at all"
    assert hints.described() == {"session": reason, "release": reason}
    scene.cache.apply_report(WorkerReport({0: {}}))
    scene.cache.request_finished("unknown")


def test_p12_a_million_names_stay_within_the_stated_bytes() -> None:
    sessions = Sessions()
    first = sessions.enter("", "first")
    numbers = [sessions.enter("salt", str(name)) for name in range(1_000_000)]
    assert len(sessions) == MOST_SESSIONS
    assert sessions.enter("salt", "999999") == numbers[-1]
    assert sessions.enter("", "first") > first, "the oldest are forgotten, and no number comes twice"
    table = OrderedDict((at.to_bytes(DIGEST_BYTES), 1 << 40) for at in range(MOST_SESSIONS + 1))
    assert sum(map(sys.getsizeof, (table, *table.keys(), *table.values()))) <= MOST_BYTES
    sessions.leave("", "first")
    assert len(sessions) == MOST_SESSIONS - 1


def test_a_session_by_its_name_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's hint evicts another's."""
    enter = Sessions.enter
    monkeypatch.setattr(Sessions, "enter", lambda self, salt, name: enter(self, "", name))
    with pytest.raises(AssertionError):
        test_another_salt_has_no_session_of_that_name(Scene(SLOTS, hints="clients"))
