"""Clients' hints under vLLM's real scheduler: how they arrive, what they change, and how their outcomes go back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.hints.schema import HintResult
from kvpact.metrics import series
from kvpact_testkit.results import Verdict, require
from kvpact_testkit.vllm import compat
from kvpact_testkit.vllm.compat import RequestSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.harness import Harness, named, prompt, under_multi_connector
from kvpact_testkit.vllm.scenarios import Scenario
from kvpact_testkit.vllm.simple_connector import SimpleConnector
from vllm_played_engine import BLOCK, PlayedEngine, PlayedRequest, answer, make_prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = 4
PROMPT = make_prompt(1, BLOCKS, tail=0)
ANSWER = 2 * BLOCK + 2


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PlayedEngine]]:
    """Starts an engine that takes clients' hints, unless these settings say otherwise."""
    engines: list[PlayedEngine] = []

    def start(**settings: Any) -> PlayedEngine:
        engines.append(PlayedEngine(tmp_path / str(len(engines)), **{"hints": "clients", **settings}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def ask(engine: PlayedEngine, prompt: list[int], hints: object = None, max_tokens: int = ANSWER) -> PlayedRequest:
    """Answer a prompt whose client sends these hints; the answer must be right."""
    params = {"kv_transfer_params": {"kvpact": hints}} if hints is not None else None
    played = engine.generate(prompt, max_tokens, extra_args=params)
    assert played.said == answer(prompt, max_tokens)
    return played


def stored(engine: PlayedEngine, text: list[int]) -> int:
    """Blocks of this text that come from kvpact."""
    engine.forget()
    return ask(engine, [*text, 1], max_tokens=1).cached_tokens // BLOCK


def outcomes(played: PlayedRequest) -> dict[str, str]:
    """Outcomes in the answer, where nothing else is."""
    assert played.returned_params is not None
    assert [*played.returned_params] == ["kvpact"]
    answered: dict[str, str] = played.returned_params["kvpact"]["outcomes"]
    return answered


@pytest.mark.parametrize("save", ["eager", "lazy"])
@pytest.mark.parametrize(("store", "kept"), [("none", 0), ("prompt", BLOCKS), (None, BLOCKS + 2)])
def test_what_a_hint_keeps_out_is_computed_again(
    start: Callable[..., PlayedEngine], store: str | None, kept: int, save: str
) -> None:
    engine = start(save=save, num_blocks=24, num_batched_tokens=40)
    played = ask(engine, PROMPT, {"version": 1, "store": store} if store else None)
    for seed in range(2, 6):  # the engine needs its blocks, so that lazy saves happen
        ask(engine, make_prompt(seed, 12), max_tokens=3)
    assert stored(engine, [*PROMPT, *played.said]) == kept
    if store:
        assert outcomes(played) == {"store": "accepted"}
        (record,) = (one for one in engine.cache.requests.records.all() if one.hints)
        assert record.hints == {"store": "accepted"}
        assert engine.counts[series("hints", HintResult.ACCEPTED)] == 1
    else:
        assert played.returned_params is None
    engine.assert_at_rest()


def test_two_requests_at_once_store_what_one_of_them_may(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    hinted = engine.add(PROMPT, 3, {"kv_transfer_params": {"kvpact": {"store": "none"}}})
    engine.step()
    plain = engine.add(PROMPT, 3)
    engine.run()
    assert hinted.said == plain.said == answer(PROMPT, 3)
    assert stored(engine, PROMPT) == BLOCKS


DEEP: Any = {}
for _ in range(1_000):
    DEEP = {"store": DEEP}


@pytest.mark.parametrize(
    ("hints", "names"),
    [
        ("none", {"kvpact"}),
        (DEEP, {"store"}),
        ({"store": "x" * (2 << 20)}, {"store"}),
        ({"version": 2, "store": "none"}, {"version"}),
        ({"session": "s" * 300, "retain": float("nan")}, {"session", "retain"}),
        (dict.fromkeys(map(str, range(5_000)), DEEP), {"kvpact"}),
    ],
)
def test_a_wrong_hint_is_named_in_the_answer_and_fails_nothing(
    start: Callable[..., PlayedEngine], hints: object, names: set[str]
) -> None:
    engine = start()
    played = ask(engine, PROMPT, hints)
    assert outcomes(played).keys() == names
    assert all(outcome.startswith("rejected: ") for outcome in outcomes(played).values())
    assert len(str(outcomes(played))) < 1_000
    assert stored(engine, PROMPT) == BLOCKS
    assert not engine.counts["hook_errors"]


def test_hints_of_other_clients_than_the_named_tenants_are_rejected(
    start: Callable[..., PlayedEngine], tmp_path: Path
) -> None:
    (tmp_path / "salt").write_text("secret of alice\n")
    tenants = {"alice": {"salt_file": str(tmp_path / "salt"), "memory": "25%"}}
    engine = start(tenants=tenants, hints=["alice"])
    hints = {"kv_transfer_params": {"kvpact": {"store": "none"}}}
    salts = ("secret of alice", "another", None)
    asked = [engine.generate(PROMPT, 3, extra_args=hints, cache_salt=salt) for salt in salts]
    rejected = "rejected: this engine acts on hints of some tenants alone"
    assert [outcomes(one)["store"] for one in asked] == ["accepted", rejected, rejected]
    assert stored(engine, PROMPT) == BLOCKS
    shot = engine.counts
    assert [shot[series("tenant_blocks", "held", name)] for name in ("alice", "others")] == [0, 2 * BLOCKS]


def test_outcomes_that_are_sent_back_change_nothing(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    first = ask(engine, PROMPT, {"store": "none"})
    again = engine.generate(PROMPT, 3, extra_args={"kv_transfer_params": first.returned_params})
    assert again.returned_params is None
    assert stored(engine, PROMPT) == BLOCKS


def test_vllms_own_session_needs_no_hint_and_its_end_is_one(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    other = make_prompt(2, BLOCKS)
    silent = engine.generate(PROMPT, 3, session_id="chat 7")
    assert silent.returned_params is None, "a name alone is no hint"
    ended = {"kv_transfer_params": {"kvpact": {"release": True}}}
    assert outcomes(engine.generate(other, 3, extra_args=ended, session_id="chat 7")) == {"release": "accepted"}
    assert "rejected: " in outcomes(engine.generate(other, 3, extra_args=ended))["release"]
    assert "rejected: " in outcomes(engine.generate(other, 3, extra_args=ended, session_id="s" * 300))["release"]
    new = outcomes(engine.generate(other, 3, extra_args=ended, session_id="chat 7", cache_salt="mallory"))["release"]
    assert new.startswith("clipped: the session is new, or was forgotten")
    assert stored(engine, PROMPT) == BLOCKS, "it goes first, and nobody needed room"
    assert not engine.counts["hook_errors"]


def test_hints_come_in_vllms_envelope_too(start: Callable[..., PlayedEngine]) -> None:
    """`kv_transfer_params` count before it, and of several actions the first of our type."""
    hints = pytest.importorskip("vllm.v1.kv_hints", reason="this release has no envelope")

    def envelope(*actions: tuple[str, dict[str, Any]]) -> Any:
        made = [hints.KvHintAction(str(at), kind, "1", payload) for at, (kind, payload) in enumerate(actions)]
        return hints.KvHintsEnvelope("1", "message", made)

    engine = start()
    both = envelope(("other", {"store": "prompt"}), ("kvpact", {"store": "none"}), ("kvpact", {"colour": 1}))
    assert outcomes(engine.generate(PROMPT, 3, kv_hints=both)) == {"store": "accepted"}
    assert stored(engine, PROMPT) == 0
    own = {"kv_transfer_params": {"kvpact": {"retain": "1m"}}}
    assert [*outcomes(engine.generate(PROMPT, 3, kv_hints=both, extra_args=own))] == ["retain"]
    foreign = {"kv_transfer_params": {"other": 1}}
    assert outcomes(engine.generate(PROMPT, 3, kv_hints=both, extra_args=foreign)) == {"store": "accepted"}
    assert engine.generate(PROMPT, 3, kv_hints=envelope(("other", {"store": "none"}))).returned_params is None


def test_a_cancelled_request_is_counted_once(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    played = engine.add(PROMPT, 3, {"kv_transfer_params": {"kvpact": {"store": "none", "colour": 1}}})
    engine.step()
    engine.cancel(played)
    engine.run()
    shot = engine.counts
    assert [shot[series("hints", each)] for each in HintResult] == [1, 0, 1, 0, 0, 0]


class AnsweringConnector(SimpleConnector):
    """A sibling with an answer of its own."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As the simple one, with an answer."""
        return super().request_finished(request, block_ids)[0], {"other": request.request_id}


def both_answer(harness: Harness) -> None:
    """MultiConnector raises where two connectors answer under one key, and joins other keys."""
    ours = harness.subject.transfer(harness.folder)
    with harness.engine(under_multi_connector(ours, named(AnsweringConnector))) as engine:
        for name, hints in (("hinted", {"store": "none"}), ("plain", None)):
            request = compat.make_request(name, RequestSettings(prompt=prompt(1, 2)), BLOCK)
            request.kv_transfer_params = {"kvpact": hints} if hints else None
            engine.connector.on_new_request(request)
            answered = engine.connector.request_finished(request, [])
            own = {"kvpact": {"version": 1, "outcomes": {"store": "accepted"}}} if hints else {}
            require(answered == (False, {"other": name, **own}), f"MultiConnector answers {answered}", "P14")


def test_beside_another_connector_the_answer_has_both() -> None:
    settings = {"memory": "1MiB", "model_id": "testkit", "sync_load_budget": 0, "hints": "clients"}
    check = VllmDriver("kvpact.vllm:PactConnector", settings).check(Scenario("hints", ("P14",), "", both_answer))
    assert check.verdict is Verdict.KEPT, check


def test_another_authors_cache_takes_no_hints(
    start: Callable[..., PlayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    engine = start(cache="minimal_cache:MinimalCache")
    played = ask(engine, PROMPT, {"store": "none", "colour": 1})
    assert outcomes(played)["store"] == "rejected: this engine's cache takes no hints"
    assert engine.counts[series("hints", HintResult.NOT_SUPPORTED)] == 1
    assert stored(engine, PROMPT) == BLOCKS


def calls_for_hints(engine: PlayedEngine, hints: object) -> Counter[str]:
    """Calls into the modules of hints while a prompt is answered."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and (file.parent.name == "hints" or file.name == "client_hints.py"):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        ask(engine, PROMPT, hints)
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_without_hints_calls_nothing_for_them(start: Callable[..., PlayedEngine]) -> None:
    """Where they are allowed a request costs three calls in all, and where not, none, whatever it brings."""
    off = start(hints="off")
    assert calls_for_hints(off, {"store": "none"}) == {}
    assert stored(off, PROMPT) == BLOCKS
    assert calls_for_hints(start(), None) == {"on_new_request": 1, "parse_hints": 1, "answer": 1}
