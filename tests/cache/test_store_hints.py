"""`store` of a client's hint: nothing of its request is stored, or only the prompt; loads and other requests go on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from group_scenes import BLOCK, GroupScene, asked, full, states, window
from kvpact.cache.request import ALL_ROWS, RequestState
from kvpact.hints.schema import KEY, Hints, parse_hints
from kvpact.identity.groups import KVCacheGroup
from scenes import BLOCK_SIZE, Scene, SceneRequest, open_disk, tokens

BLOCKS = 6


def hinted(scene: Scene, request: SceneRequest, store: str) -> Hints:
    """The request arrives with this hint."""
    hints = parse_hints({KEY: {"store": store}})
    assert hints is not None
    scene.cache.note_hints(request, hints)
    return hints


def step(scene: Scene, request: SceneRequest, computed: int) -> None:
    """A step that has computed so many of the request's tokens, and its report."""
    scene.report(scene.step_computing(request, computed))


def stored(scene: Scene, token_ids: list[int]) -> int:
    """Blocks that another request with these tokens would be promised."""
    asking = SceneRequest("asking", token_ids)
    found = scene.prepare(asking).num_tokens // BLOCK_SIZE
    scene.cache.request_finished("asking")
    return found


def answered(prompt_blocks: int, answer_blocks: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """A prompt that ends within a block, and the prompt with its answer."""
    text = tokens((prompt_blocks + answer_blocks) * BLOCK_SIZE + 3, seed)
    return text[: prompt_blocks * BLOCK_SIZE + 2], text


@pytest.mark.parametrize(("store", "kept"), [("none", 0), ("prompt", 3), ("", 5)])
@pytest.mark.parametrize("piece", [100, 3, 1], ids="in pieces of {}".format)
def test_only_what_the_hint_allows_is_stored(store: str, kept: int, piece: int, tmp_path: Path) -> None:
    """Not the block with the prompt's end and the answer's beginning either, and no tier gets what memory does not."""
    scene = Scene(tiers=[open_disk(tmp_path)])
    prompt, text = answered(3, 2)
    request = SceneRequest("hinted", prompt[:])
    if store:
        hinted(scene, request, store)
    for computed in [*range(piece, len(prompt), piece), len(prompt)]:
        step(scene, request, computed)
    for token in text[len(prompt) :]:
        request.token_ids.append(token)
        step(scene, request, len(request.token_ids))
    scene.cache.request_finished("hinted")
    scene.settle_tiers()
    assert len(scene.cache.index) == kept
    assert stored(scene, [*text, 1]) == kept
    scene.forget_memory()
    assert stored(scene, [*text, 1]) == kept
    shot = scene.cache.observe()
    assert (shot["saved_blocks"], shot["dropped_blocks"]) == (kept, 0), "a wish is no loss"


def test_a_request_that_stores_nothing_is_served_as_ever() -> None:
    scene = Scene()
    scene.run_cold(SceneRequest("cold", tokens(4 * BLOCK_SIZE + 1)))
    request = SceneRequest("hinted", tokens(BLOCKS * BLOCK_SIZE + 1))
    hinted(scene, request, "none")
    scene.assert_loads(request, 4 * BLOCK_SIZE)
    step(scene, request, len(request.token_ids))
    scene.cache.request_finished("hinted")
    assert stored(scene, request.token_ids) == 4


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_prefix_that_another_request_computes_at_the_same_time_is_stored(plain_first: bool) -> None:
    """Also if the engine gives the other request the blocks that the hinted one has computed."""
    scene = Scene()
    text = tokens(BLOCKS * BLOCK_SIZE + 1)
    requests = [SceneRequest("plain", text), SceneRequest("hinted", text)]
    hinted(scene, requests[1], "none")
    table = scene.allocate(requests[0])
    scene.compute(requests[0])
    for request in requests if plain_first else requests[::-1]:
        scene.cache.note_computed(request, len(text), lambda: table)
    scene.report(scene.cache.end_step())
    assert stored(scene, text) == BLOCKS


def test_after_a_preemption_a_hint_still_holds() -> None:
    """The answer so far is computed like a prompt then; it is none."""
    scene = Scene(engine_blocks=256)
    prompt, text = answered(2, 2)
    request = SceneRequest("hinted", prompt[:])
    hinted(scene, request, "prompt")
    step(scene, request, len(prompt))
    request.token_ids += text[len(prompt) :]
    scene.cache.prepare_external_match(request, 0)
    del scene.tables["hinted"]
    for computed in (BLOCK_SIZE, len(text)):
        step(scene, request, computed)
    scene.cache.request_finished("hinted")
    assert len(scene.cache.index) == 2


@pytest.mark.parametrize(("store", "rows"), [("none", 0), ("prompt", 4), ("", 7)])
@pytest.mark.parametrize("kinds", [[full(), window(2)], [states(), full()], [window(2, 8), full(), states()]])
def test_with_several_groups_nothing_else_is_stored(kinds: list[KVCacheGroup], store: str, rows: int) -> None:
    scene = GroupScene(kinds, [4096] * len(kinds))
    request = asked("hinted", 4)
    text = asked("text", 7).token_ids
    if store:
        hinted(scene, request, store)
    tables = scene.pool.allocate(SceneRequest("hinted", text))
    for computed in (4 * BLOCK, 4 * BLOCK + 1, *range(5 * BLOCK, 7 * BLOCK + 1, BLOCK)):
        request.token_ids += text[len(request.token_ids) : computed + 1]
        scene.cache.note_computed(request, computed, lambda: tables[0])
        scene.report(scene.cache.end_step())
    scene.cache.request_finished("hinted")
    assert scene.serve(SceneRequest("other", text)) == rows * BLOCK


Texts = set[tuple[int, ...]]


def play(seed: int) -> tuple[Texts, Texts]:
    """Random requests over a few texts, in pieces, with and without hints, at the same time; what is stored in the end,
    and what a model without a cache says: the blocks that each request may store, each with all before it."""
    rng = random.Random(seed)
    scene = Scene(slots=512, engine_blocks=4096, save=rng.choice(["eager", "eager", "off"]))
    allowed: Texts = set()
    running: list[tuple[SceneRequest, list[int], int, str]] = []
    for number in range(30):
        text = [*tokens(rng.randrange(1, 16), 1), *tokens(rng.randrange(1, 16), rng.randrange(2, 4))]
        end = rng.randrange(1, len(text) + 1)
        request = SceneRequest(str(number), text[:end])
        store = rng.choice(["none", "prompt", ""])
        if store:
            hinted(scene, request, store)
        running.append((request, text, end, store))
        while len(running) > rng.randrange(4):
            request, text, end, store = rng.choice(running)
            table = scene.tables.get(request.request_id, ())
            done = getattr(request, "done", 0)
            if rng.random() < 0.1 and table:  # preempted
                scene.cache.prepare_external_match(request, 0)
                scene.cache.abort_external_match(request.request_id, None, "error")
                del scene.tables[request.request_id]
                done = 0
            done = min(done + rng.randrange(1, 9), len(request.token_ids))
            step(scene, request, done)
            if done == len(request.token_ids) < len(text):
                request.token_ids.append(text[done])
            elif done == len(text):
                running = [each for each in running if each[0] is not request]
                scene.cache.request_finished(request.request_id)
            request.done = done  # type: ignore[attr-defined]
            scene.cache.check()
            if scene.config.save != "off":
                may = {"none": 0, "prompt": end, "": done}[store]
                allowed |= {tuple(text[:stop]) for stop in range(BLOCK_SIZE, min(may, done) + 1, BLOCK_SIZE)}
    whole = {tuple(text[:stop]) for text in allowed for stop in range(BLOCK_SIZE, len(text) + 1, BLOCK_SIZE)}
    longest = [
        text for text in whole if not any(other[: len(text)] == text for other in whole if len(other) > len(text))
    ]
    found = {
        text[:stop]
        for text in longest
        for stop in range(BLOCK_SIZE, stored(scene, [*text, 0]) * BLOCK_SIZE + 1, BLOCK_SIZE)
    }
    assert len(scene.cache.index) == len(found), "something else is stored"
    return found, whole


@pytest.mark.parametrize("seed", range(12))
def test_what_is_stored_is_what_the_model_says(seed: int) -> None:
    found, expected = play(seed)
    assert found == expected


def broken_end(self: RequestState, hints: Hints, block_size: int) -> None:
    """A cache that takes the answer for a part of the prompt, or forgets the hint."""
    self.hints = hints
    self.stored_end = ALL_ROWS if hints.store == "none" else self.record.prompt_tokens // block_size + 1


def test_the_plays_catch_a_cache_that_stores_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "note_hints", broken_end)
    caught = 0
    for seed in range(4):
        try:
            found, expected = play(seed)
        except AssertionError:
            caught += 1
        else:
            caught += found != expected
    assert caught
