"""A request whose blocks cannot be named costs itself its hits, and nobody else anything (H62)."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from kvpact.identity.keys import BlockKeys, MediaSpan, RequestIdentity
from kvpact.metrics import MissReason, series
from scenes import BLOCK_SIZE, Scene, SceneRequest, tokens

BLOCKS = 4
HEALTHY = tokens(BLOCKS * BLOCK_SIZE + 1)
SICK_TOKENS = {"negative": -1, "2^32": 2**32, "2^70": 2**70, "no number": None}
SICK_IDENTITIES = {
    "salt": RequestIdentity(salt="\ud800"),
    "adapter": RequestIdentity(adapter="\udfff"),
    "media": RequestIdentity(media=(MediaSpan(5, 2, "image:\ud800"),)),
    "far media": RequestIdentity(media=(MediaSpan(5, 2**70, "image"), MediaSpan(-(2**70), 2**71, "image"))),
    "embeddings": RequestIdentity(embeddings={1: "text"}),  # type: ignore[dict-item]
}


def with_token(token: object, place: int) -> SceneRequest:
    sick = SceneRequest("sick", [*HEALTHY, *tokens(2 * BLOCK_SIZE, seed=3)])
    sick.token_ids[place] = token  # type: ignore[call-overload]
    return sick


def sick_requests() -> dict[str, SceneRequest]:
    of_tokens = {
        f"{name}, token {place}": with_token(token, place)
        for name, token in SICK_TOKENS.items()
        for place in (0, BLOCK_SIZE + 2, len(HEALTHY) + BLOCK_SIZE)
    }
    return of_tokens | {name: SceneRequest("sick", [*HEALTHY], one) for name, one in SICK_IDENTITIES.items()}


@pytest.mark.parametrize("save", ["eager", "off"])
@pytest.mark.parametrize("name", sick_requests())
def test_h62_a_request_without_keys_costs_itself_its_hits_and_no_step(name: str, save: str) -> None:
    scene, sick = Scene(save=save), sick_requests()[name]
    scene.cache.on_new_request(sick)
    assert scene.prepare(sick).num_tokens == 0
    healthy = SceneRequest("healthy", [*HEALTHY])
    scene.compute(healthy)
    if sick.identity is not None and not sick.identity.salt:
        scene.compute(sick)
    scene.allocate(sick)
    for step in (1, 2):
        for request in (sick, healthy):
            computed = step * len(request.token_ids) // 2
            scene.cache.note_computed(request, computed, partial(scene.tables.__getitem__, request.request_id))
        scene.cache.decline_external_match(sick, 0)
        scene.cache.look_up_at_step(sick, 0, BLOCK_SIZE)
        scene.report(scene.cache.end_step())
    scene.cache.distrust_blocks(scene.tables["sick"][-1:], {"sick": scene.tables["sick"]})
    scene.cache.request_finished("sick")
    scene.cache.request_finished("healthy")
    again = SceneRequest("again", [*HEALTHY])
    match = scene.prepare(again)
    if save == "off":
        assert match.num_tokens == 0
    else:
        scene.load(again, match)
        assert scene.holds_content(again, range(BLOCKS))
    scene.cache.request_finished("again")
    assert not scene.blocks.held


def test_h62_what_comes_before_a_block_without_a_name_is_served() -> None:
    scene = Scene()
    scene.run_cold(SceneRequest("first", [*HEALTHY]))
    sick = with_token(-1, 2 * BLOCK_SIZE)
    match = scene.prepare(sick)
    assert match.num_tokens == 2 * BLOCK_SIZE
    scene.load(sick, match)
    assert scene.holds_content(sick, range(2))
    scene.cache.request_finished("sick")
    nameless = SceneRequest("nameless", [*HEALTHY], RequestIdentity(salt="\ud800"))
    assert scene.prepare(nameless).num_tokens == 0
    assert scene.cache.observe()[series("misses", MissReason.UNKNOWN_IDENTITY)] == 1


def test_h62_a_request_that_falls_sick_while_it_runs_keeps_what_it_has_stored() -> None:
    scene, request = Scene(), SceneRequest("r", [*HEALTHY])
    scene.report(scene.step_computing(request, len(HEALTHY)))
    for _ in range(2):
        request.token_ids += [-1] * BLOCK_SIZE
        scene.allocate(request)
        scene.cache.note_computed(request, len(request.token_ids), lambda: scene.tables["r"])
        assert not scene.cache.end_step().saves
    for again in (request, SceneRequest("again", [*HEALTHY])):
        assert scene.prepare(again).num_tokens == BLOCKS * BLOCK_SIZE
        scene.cache.request_finished(again.request_id)


def test_h62_a_promise_ends_when_what_the_request_brings_has_no_name_any_more() -> None:
    scene = Scene()
    scene.run_cold(SceneRequest("first", [*HEALTHY]))
    request = SceneRequest("r", [*HEALTHY])
    assert scene.prepare(request).num_tokens
    request.identity = RequestIdentity(media=(MediaSpan(0, 2, "image:\ud800"),))
    assert scene.prepare(request).num_tokens == 0, "its first block is another one now"
    assert scene.cache.observe()["open_plans"] == 0
    assert scene.prepare(SceneRequest("again", [*HEALTHY])).num_tokens
    scene.cache.request_finished("r")
    scene.cache.request_finished("again")


def test_h62_keys_end_before_the_first_block_without_a_name_and_are_the_same_up_to_there() -> None:
    whole = BlockKeys(bytes(32), BLOCK_SIZE, RequestIdentity()).extend(HEALTHY)
    for token, place in product(SICK_TOKENS.values(), range(len(HEALTHY))):
        keys = BlockKeys(bytes(32), BLOCK_SIZE, RequestIdentity())
        sick = [*HEALTHY[:place], token, *HEALTHY[place + 1 :]]
        for _ in range(2):
            assert keys.extend(sick) == whole[: place // BLOCK_SIZE]  # type: ignore[arg-type]
        keys.extend(sick * 2)  # type: ignore[arg-type]
        assert len(keys.keys) == min(place // BLOCK_SIZE, BLOCKS) or place == len(HEALTHY) - 1
    keys = BlockKeys(bytes(32), BLOCK_SIZE, RequestIdentity())
    keys.extend(HEALTHY)
    assert keys.renew(RequestIdentity(media=(MediaSpan(9, 2, "\ud800"),))) == 2
    assert keys.extend(HEALTHY) == whole[:2]


def test_h62_a_block_without_a_name_is_looked_for_once() -> None:
    class Counted(list[int]):
        taken = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.taken += 1
            return super().__getitem__(place)

    keys = BlockKeys(bytes(32), BLOCK_SIZE, RequestIdentity())
    sick = Counted([*tokens(400), -1, *tokens(400)])
    keys.extend(sick)
    before = Counted.taken
    for _ in range(100):
        sick.append(1)
        keys.extend(sick)
    assert Counted.taken == before
