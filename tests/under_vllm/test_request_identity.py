"""What a request brings besides its tokens, read from vLLM's own objects: adapters, media, embeddings, streaming."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from at_the_end import at_the_end
from kvpact.identity.weights import adapter_digest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from kvpact.identity import adapter_digests
from kvpact.identity.adapter_digests import AdapterDigests
from kvpact.identity.digest_thread import MAX_JOBS, DigestThread
from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact.tiers.disk.slab import Slab
from kvpact.vllm import content_digests, request_identity
from kvpact.vllm.media_contents import MediaContents
from kvpact.vllm.request_identity import RequestIdentities, VllmRequest
from polling import until
from vllm_played_engine import PlayedEngine, answer

BLOCK = 4
NAMESPACE = bytes(32)
TICK = 0.02
"""Seconds in which a file system's clock goes on; Linux stamps files with one that is up to 10 ms behind."""
TOKENS = list(range(100, 124))
"""Six blocks."""
LORA = SimpleNamespace(max_cpu_loras=2, lora_dtype="torch.float32", enable_tower_connector_lora=False)


def config(**changes: Any) -> SimpleNamespace:
    """What is read of a `VllmConfig`."""
    named = {
        "cache_config": SimpleNamespace(block_size=BLOCK),
        "scheduler_config": SimpleNamespace(encoder_cache_size=64),
        "lora_config": LORA,
        "ec_transfer_config": None,
    }
    return SimpleNamespace(**(named | changes))


def begin(**changes: Any) -> RequestIdentities:
    """Those of an engine that starts now and ends with the test."""
    made = RequestIdentities(config(**changes))
    at_the_end(made.close)
    return made


@pytest.fixture
def identities() -> RequestIdentities:
    return begin()


def make(tokens: Sequence[int] | None = TOKENS, **fields: Any) -> Request:
    """A request of vLLM."""
    prompt = None if tokens is None else list(tokens)
    return Request("r", prompt, SamplingParams(max_tokens=8), None, **fields)


def settled(view: VllmRequest) -> RequestIdentity | None:
    """The identity once nothing is under way any more."""
    until(lambda: not view.awaits_identity, what="a digest never came")
    return view.identity


def changed(view: VllmRequest, before: RequestIdentity | None) -> RequestIdentity | None:
    """The identity once it is not `before` any more."""
    until(lambda: view.identity is not before, what="the identity stays")
    return view.identity


def read(identities: RequestIdentities, request: Request) -> RequestIdentity | None:
    return settled(VllmRequest(request, identities))


def keys(identity: RequestIdentity | None, tokens: Sequence[int] = TOKENS) -> list[bytes]:
    assert identity is not None, "the request is not cached"
    return list(BlockKeys(NAMESPACE, BLOCK, identity).extend(tokens))


def shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks from the first on whose keys are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def hold(identities: RequestIdentities) -> threading.Event:
    """Have the thread that reads contents wait for this."""
    began, gate = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        gate.wait(60)

    identities.contents.ask(wait)
    assert began.wait(60)
    return gate


# Media


def picture(
    pixels: float,
    name: str = "uuid",
    *,
    at: int = 8,
    length: int = 6,
    modality: str = "image",
    is_embed: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> MultiModalFeatureSpec:
    """An image as vLLM hands it to its scheduler: features by field, a name, a place."""
    values = {"pixel_values": torch.full((3, 5), pixels, dtype=dtype), "image_grid_thw": torch.tensor([1, 3, 5])}
    item = MultiModalKwargsItem(
        {key: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for key, value in values.items()}
    )
    return MultiModalFeatureSpec(item, modality, name, PlaceholderRange(at, length, is_embed), mm_hash=name)


def test_h49_a_clients_own_name_for_an_image_is_not_its_content() -> None:
    """Two engines, so that neither knows what the other has been told under that name."""
    found = []
    for pixels in (1.0, 2.0, 1.0):
        engine = begin()
        found.append(keys(read(engine, make(mm_features=[picture(pixels, "cat")]))))
    assert shared(found[0], found[1]) == 2, "the blocks before the image are the same, none behind"
    assert found[0] == found[2], "the same features are the same image, in another engine as well"


def test_h49_one_image_under_two_names_is_one_image(identities: RequestIdentities) -> None:
    one, other = (read(identities, make(mm_features=[picture(1.0, name)])) for name in ("cat", "dog"))
    assert keys(one) == keys(other)


@pytest.mark.parametrize(
    "other",
    [
        picture(1.0, modality="video"),
        picture(1.0, length=5),
        picture(1.0, at=9),
        picture(1.0, dtype=torch.float64),
        picture(1.0, is_embed=torch.tensor([True, True, False, True, True, True])),
    ],
    ids=["modality", "length", "place", "dtype", "which positions"],
)
def test_h24_everything_about_an_image_counts(identities: RequestIdentities, other: MultiModalFeatureSpec) -> None:
    other.identifier = "other"
    found = [keys(read(identities, make(mm_features=[image]))) for image in (picture(1.0), other)]
    assert shared(*found) == 2


def test_h49_a_name_under_which_two_images_came_is_nobodys(identities: RequestIdentities) -> None:
    """vLLM keeps the encoder's output by name: what the second request computes with may be the first one's image."""
    first = VllmRequest(make(mm_features=[picture(1.0, "cat")]), identities)
    assert settled(first) is not None
    assert read(identities, make(mm_features=[picture(2.0, "cat")])) is None
    assert settled(first) is None, "it may be computed again, after a preemption, with the other's image"
    assert read(identities, make(mm_features=[picture(1.0, "cat")])) is None
    assert read(identities, make(mm_features=[picture(1.0, "dog")])) is not None


def test_one_image_that_came_twice_by_itself_is_known_all_the_time_afterwards(identities: RequestIdentities) -> None:
    """A client that sends the image again makes another object of it."""
    first = VllmRequest(make(mm_features=[picture(1.0, "cat")]), identities)
    known = settled(first)
    assert keys(read(identities, make(mm_features=[picture(1.0, "cat")]))) == keys(known)
    assert settled(first) is known, "the same object: nothing changed"


@pytest.mark.parametrize("what", ["in shared memory", "left out"])
def test_h49_media_whose_features_are_not_here_are_not_cached(identities: RequestIdentities, what: str) -> None:
    """vLLM's cache in shared memory gives the scheduler's process an address, which says nothing of the content."""
    image = picture(1.0)
    place = {"address": 4096, "monotonic_id": 7, "signature": [1] * 32}
    fields = {key: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for key, value in place.items()}
    image.data = MultiModalKwargsItem(fields) if what == "in shared memory" else None
    view = VllmRequest(make(mm_features=[image]), identities)
    assert view.identity is None
    assert not view.awaits_identity, "there is nothing to wait for"


def test_h49_media_that_another_process_encodes_by_name_are_not_cached() -> None:
    engine = begin(ec_transfer_config=object())
    assert read(engine, make(mm_features=[picture(1.0)])) is None
    assert read(engine, make()) is not None


# Streaming sessions


def continue_session(session: Request, tokens: list[int], features: list[MultiModalFeatureSpec]) -> None:
    """What vLLM's scheduler does when the next chunk of a session comes."""
    session.status = RequestStatus.RUNNING
    scheduler = SimpleNamespace(hash_block_size=BLOCK, log_stats=False, num_waiting_for_streaming_input=0)
    update = StreamingUpdate(features, tokens, 8, 0.0, SamplingParams(max_tokens=8))
    Scheduler._update_request_as_session(scheduler, session, update)


def test_h47_media_of_later_chunks_are_in_the_keys_of_the_blocks_that_they_fill(identities: RequestIdentities) -> None:
    found = []
    for pixels in (1.0, 2.0):
        session = make(TOKENS[:12], resumable=True, mm_features=[picture(0.0, "first", at=4, length=4)])
        view = VllmRequest(session, identities)
        before = settled(view)
        assert view.identity is before
        session.num_computed_tokens = 12
        continue_session(session, TOKENS[12:], [picture(pixels, f"later-{pixels}", at=2, length=3)])
        after = changed(view, before)
        assert after is not None
        assert [(span.start, span.count) for span in after.media] == [(4, 4), (14, 3)]
        assert view.identity is after
        found.append(keys(after, session.all_token_ids))
        assert shared(found[-1], keys(before, session.all_token_ids)) == 3
    assert shared(*found) == 3


def test_h47_while_later_media_are_unknown_a_session_ends_before_them(identities: RequestIdentities) -> None:
    """What it was known by goes on, so that the blocks computed meanwhile are its own and are stored afterwards."""
    session = make(TOKENS[:12], resumable=True, mm_features=[picture(0.0, "first", at=4, length=4)])
    view = VllmRequest(session, identities)
    before = settled(view)
    assert len(view.token_ids) == 12
    gate = hold(identities)
    session.num_computed_tokens = 12
    continue_session(session, TOKENS[12:], [picture(1.0, "later", at=2, length=3)])
    assert len(view.token_ids) == 14, "asked before the identity"
    assert view.identity is before
    gate.set()
    after = changed(view, before)
    assert after is not None
    assert len(after.media) == 2
    assert len(view.token_ids) == len(TOKENS)
    continue_session(session, [7] * 8, [replace(picture(2.0, "third", at=0), data=None)])
    assert view.identity is after
    assert len(view.token_ids) == 12, "never beyond media that nobody can tell"


# Adapters


def write_adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def with_adapter(path: str, number: int = 1, **fields: Any) -> Request:
    return make(lora_request=LoRARequest("style", number, path, **fields))


def test_h24_adapters_are_their_content_whatever_name_and_place_they_have(tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / name / "style", weights) for name, weights in (("a", b"1"), ("b", b"2"))]
    copied = shutil.copytree(paths[0], tmp_path / "c")
    engine = begin()
    one, other, copy = (
        keys(read(engine, with_adapter(str(path), number))) for number, path in enumerate([*paths, copied], 1)
    )
    plain = keys(read(engine, make()))
    assert one == copy
    assert shared(one, other) == shared(one, plain) == 0


def replace_in_place(path: Path) -> None:
    (path / "adapter_model.safetensors").write_bytes(b"new")


def replace_unseen(path: Path) -> None:
    """Same size, and the times of the file that it replaces, which only the ctime gives away."""
    file = path / "adapter_model.safetensors"
    before = file.stat()
    file.write_bytes(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_rename(path: Path) -> None:
    """Files that are older than the engine move in from elsewhere."""
    (path.parent / "waiting" / "adapter_model.safetensors").rename(path / "adapter_model.safetensors")


def replace_folder(path: Path) -> None:
    path.rename(path.parent / "away")
    (path.parent / "waiting").rename(path)


def replace_folder_above(path: Path) -> None:
    path.parent.rename(path.parent.parent / "away")
    (path.parent.parent / "spare").rename(path.parent)


def replace_link(path: Path) -> None:
    link = path.parent.parent / "link"
    link.unlink()
    link.symlink_to(path.parent / "waiting")


REPLACEMENTS = [
    replace_in_place,
    replace_unseen,
    replace_by_rename,
    replace_folder,
    replace_folder_above,
    replace_link,
]


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("used", [True, False], ids=["used before", "loaded ahead"])
def test_h47_an_adapter_whose_files_changed_under_the_engine_is_not_cached(
    replace: Callable[[Path], None], used: bool, tmp_path: Path
) -> None:
    """What vLLM has loaded under the id may be the old files or the new ones, also if no request came before."""
    folder = tmp_path / "adapters" / "style"
    for place, weights in ((folder, b"old"), (folder.parent / "waiting", b"new"), (tmp_path / "spare/style", b"new")):
        write_adapter(place, weights)
    (tmp_path / "link").symlink_to(folder)
    path = str(tmp_path / "link" if replace is replace_link else folder)
    time.sleep(TICK)
    engine = begin()
    time.sleep(TICK)
    old = keys(read(engine, with_adapter(path))) if used else None
    replace(folder)
    assert read(engine, with_adapter(path)) is None
    assert read(engine, with_adapter(path, 2)) is None, "it may have been loaded ahead under any id"
    time.sleep(TICK)
    later = begin()
    new = keys(read(later, with_adapter(path)))
    assert old is None or shared(old, new) == 0


def test_another_folder_beside_an_adapter_changes_nothing(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", b"1")
    time.sleep(TICK)
    engine = begin()
    before = read(engine, with_adapter(path))
    write_adapter(tmp_path / "two", b"2")
    assert keys(read(engine, with_adapter(path))) == keys(before)


def test_h47_an_id_that_came_with_two_paths_is_not_cached(tmp_path: Path) -> None:
    """vLLM goes by the id: with the second path it still computes with what it loaded from the first."""
    paths = [write_adapter(tmp_path / name, name.encode()) for name in ("one", "two")]
    engine = begin()
    first = VllmRequest(with_adapter(paths[0]), engine)
    assert settled(first) is not None
    assert read(engine, with_adapter(paths[1])) is None
    assert settled(first) is None


def test_h47_an_adapter_that_is_loaded_in_place_is_not_cached(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", b"1")
    engine = begin()
    assert read(engine, with_adapter(path, load_inplace=True)) is None


def test_adapters_that_vllm_would_read_otherwise_are_others(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", b"1")
    found = []
    for lora, layout in ((LORA, False), (LORA, True), (SimpleNamespace(**vars(LORA) | {"lora_dtype": "half"}), False)):
        engine = begin(lora_config=lora)
        found.append(keys(read(engine, with_adapter(path, is_3d_lora_weight=layout))))
    assert len({one[0] for one in found}) == 3


def test_an_adapter_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_adapter(tmp_path / "one", b"1")
    engine = begin()
    asked = list[Path]()

    def fail_once(folder: Path) -> str:
        asked.append(folder)
        if len(asked) == 1:
            raise OSError("the file server is away")
        return adapter_digest(folder)

    monkeypatch.setattr(adapter_digests, "adapter_digest", fail_once)
    assert read(engine, with_adapter(path)) is None
    assert read(engine, with_adapter(path)) is None
    assert len(asked) == 1, "not for each request"
    monkeypatch.setattr(adapter_digests, "RETRY_SECONDS", 0.0)
    assert read(engine, with_adapter(path)) is not None


def test_h67_no_input_of_users_fills_a_map_without_bound(tmp_path: Path) -> None:
    adapters = AdapterDigests(most=3)
    pending = [adapters.ask(number, str(tmp_path / str(number)), loads_in_place=False)[1] for number in range(1, 50)]
    at_the_end(adapters.close)
    thread = DigestThread("kvpact-content")
    at_the_end(thread.close)
    media = MediaContents(thread, most=3)
    features = [picture(1.0, f"uuid-{number}" * 1000) for number in range(50)]
    contents = [media.ask(feature) for feature in features]
    until(lambda: all(one.is_done for one in pending) and all(one.is_known for one in contents if one))
    assert len(adapters) == 3
    assert len(media) == 3


def test_h67_jobs_that_wait_are_bounded_and_one_that_is_refused_is_not_cached(identities: RequestIdentities) -> None:
    gate = hold(identities)
    views = [VllmRequest(make(mm_features=[picture(1.0, f"{number}")]), identities) for number in range(MAX_JOBS + 1)]
    assert not any(view.identity for view in views)
    gate.set()
    assert settled(views[0]) is not None
    assert settled(views[-1]) is None


# Embeddings


def rows(number: float = 0.5, dtype: torch.dtype = torch.float32, count: int = len(TOKENS)) -> torch.Tensor:
    return torch.full((count, 8), number, dtype=dtype)


def test_h24_prompt_embeddings_of_equal_bytes_and_another_dtype_are_others(identities: RequestIdentities) -> None:
    bits = rows(0.5, torch.bfloat16)
    found = [read(identities, make(None, prompt_embeds=embeds)) for embeds in (bits, bits.view(torch.float16))]
    assert shared(*(keys(one, [0] * 24) for one in found)) == 0
    again = read(identities, make(None, prompt_embeds=bits.clone()))
    assert keys(again, [0] * 24) == keys(found[0], [0] * 24)
    wider = read(identities, make(None, prompt_embeds=torch.full((24, 4), 0.5, dtype=torch.float32)))
    assert shared(keys(wider, [0] * 24), keys(found[0], [0] * 24)) == 0, "twice the width of half as many bytes"


def test_h24_which_positions_are_tokens_is_in_the_key_of_their_block(identities: RequestIdentities) -> None:
    """Token 0 is also what vLLM puts where an embedding stands."""
    masks = [[True] * 8 + [False] * 16, [True] * 9 + [False] * 15, None]
    found = [
        keys(read(identities, make([0] * 24, prompt_embeds=rows(), prompt_is_token_ids=mask)), [0] * 24)
        for mask in masks
    ]
    assert shared(found[0], found[1]) == 2
    assert shared(found[0], found[2]) == 0


def test_a_row_at_a_tokens_position_counts_for_nothing(identities: RequestIdentities) -> None:
    mask, embeds = [True] * 8 + [False] * 16, rows()
    other = embeds.clone()
    other[:8] = 7
    found = [
        keys(read(identities, make(TOKENS, prompt_embeds=one, prompt_is_token_ids=mask))) for one in (embeds, other)
    ]
    assert found[0] == found[1]


# The scheduler's thread


def test_h68_nothing_is_digested_on_the_calling_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a byte of features, masks, embeddings or adapters; files are not even looked at."""
    path = write_adapter(tmp_path / "one", b"1" * 1000)
    threads: dict[str, set[str]] = {}

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    for name in ("adapter_digest", "look_at_files"):
        watch(adapter_digests, name)
    watch(content_digests, "_memory")
    engine = begin()
    mask = torch.ones(6, dtype=torch.bool)
    view = VllmRequest(
        make(
            mm_features=[picture(1.0, is_embed=mask)],
            lora_request=LoRARequest("style", 1, path),
            prompt_embeds=rows(),
            prompt_is_token_ids=[False] * 24,
        ),
        engine,
    )
    assert settled(view) is not None
    assert threads == {
        "adapter_digest": {"kvpact-adapter"},
        "look_at_files": {"kvpact-adapter"},
        "_memory": {"kvpact-content"},
    }


def test_h68_a_long_prompt_of_embeddings_costs_the_scheduler_nothing(identities: RequestIdentities) -> None:
    embeds = torch.rand(8192, 1024)
    view = VllmRequest(make(None, prompt_embeds=embeds), identities)
    began = time.thread_time()
    assert view.identity is None
    assert time.thread_time() - began < 5e-3, "32 MB take 10 ms and more"
    known = settled(view)
    assert known is not None
    assert len(known.embeddings) == 8192 // BLOCK
    began = time.thread_time()
    for _ in range(1000):
        assert view.identity is known
    assert time.thread_time() - began < 20e-3, "a look costs less than 20 us, whatever the request brings"


def test_a_request_waits_for_its_digests_only_where_it_could_be_served_something(identities: RequestIdentities) -> None:
    gate = hold(identities)
    view = VllmRequest(make(mm_features=[picture(1.0)]), identities)
    assert view.awaits_identity
    short = VllmRequest(make(TOKENS[:BLOCK], mm_features=[picture(1.0, at=0, length=2)]), identities)
    assert not short.awaits_identity, "nothing of it could be served"
    gate.set()
    assert changed(view, None) is not None, "its later blocks can be stored"


def test_what_nobody_wants_digested_any_more_is_let_go(identities: RequestIdentities) -> None:
    gate = hold(identities)
    embeds = rows()
    remains = weakref.ref(embeds)
    view = VllmRequest(make(None, prompt_embeds=embeds), identities)
    assert view.identity is None
    view.release()
    del view, embeds
    gc.collect()
    assert remains() is None
    gate.set()


def test_h62_a_salt_that_is_no_text_is_one_requests_trouble(identities: RequestIdentities) -> None:
    assert read(identities, make(cache_salt="\ud800")) is None
    assert read(identities, make(cache_salt="Käse")) is not None


def test_h62_a_request_whose_id_is_no_text_is_not_told_to_workers(identities: RequestIdentities) -> None:
    request = Request("\ud800", TOKENS, SamplingParams(max_tokens=8), None)
    assert read(identities, request) is None


# On vLLM's scheduler


@pytest.mark.parametrize("prepare_deadline", ["30s", "0s"])
def test_h24_h68_embeddings_are_served_once_their_digest_is_known(
    prepare_deadline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes many steps here. A request waits for it where it may, and is computed where it may not."""

    def slowly(*arguments: Any) -> dict[int, bytes]:
        time.sleep(0.1)
        return content_digests.embedding_digests(*arguments)

    monkeypatch.setattr(request_identity, "embedding_digests", slowly)
    engine = PlayedEngine(tmp_path / "engine", prepare_deadline=prepare_deadline)
    bits, length = torch.rand(4 * 16 + 5, 8).to(torch.bfloat16), 4 * 16 + 5
    cached = []
    for embeds in (bits, bits.clone(), bits.view(torch.float16)):
        played = engine.generate([0] * length, prompt_embeds=embeds, prompt_is_token_ids=[False] * length)
        assert played.said == answer([0] * length, 3)
        cached.append(played.cached_tokens)
        engine.forget()
    engine.close()
    assert cached == ([0, 4 * 16, 0] if prepare_deadline == "30s" else [0, 0, 0])


def test_p11_a_digest_that_takes_long_and_a_tier_that_hangs_have_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest takes 40 s of the 60 s that a request may wait, and 20 s later the engine computes it."""
    bits, length = torch.rand(4 * 16 + 5, 8).to(torch.bfloat16), 4 * 16 + 5
    brought = {"prompt_embeds": bits, "prompt_is_token_ids": [False] * length}
    settings: dict[str, Any] = {"tiers": [f"disk://{tmp_path}?capacity=1MiB"], "prepare_deadline": "60s"}
    with closing(PlayedEngine(tmp_path / "before", **settings)) as before:
        before.generate([0] * length, **brought)
    digest, asked, read, monotonic, later = *[threading.Event() for _ in range(3)], time.monotonic, [0.0]

    def hangs(*_: Any) -> None:
        asked.set()
        read.wait(60)

    monkeypatch.setattr(
        request_identity, "embedding_digests", lambda *all: digest.wait(60) and content_digests.embedding_digests(*all)
    )
    monkeypatch.setattr(Slab, "read_payloads", hangs)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + later[0])
    with closing(PlayedEngine(tmp_path / "engine", **settings)) as engine:
        played = engine.add([0] * length, **brought)
        assert engine.step() == 0, "it waits for its identity"
        later[0] = 40.0
        digest.set()
        while not asked.is_set():
            assert engine.step() == 0, "it waits for the tier"
        later[0] = 60.0
        assert engine.step() == length, "it waits for nothing any more"
        read.set()
        engine.run()
        assert played.said == answer([0] * length, 3)


# All together

BLOCKS = 4
PLACES = (1, 6, 11)
"""Where images begin; each takes four positions, over the border of two blocks."""


@dataclass(frozen=True)
class Drawn:
    """A request as far as its KV goes; lists have an entry a block, or one an image."""

    adapter: int
    salt: str | None
    dtype: torch.dtype | None
    """Of prompt embeddings, if there are any."""
    tokens: tuple[int, ...]
    is_token: tuple[bool, ...]
    values: tuple[int, ...]
    pixels: tuple[int | None, ...]

    def request(self, adapters: Sequence[str]) -> Request:
        fields: dict[str, Any] = {"cache_salt": self.salt}
        if self.adapter:
            fields["lora_request"] = LoRARequest("style", self.adapter, adapters[self.adapter - 1])
        fields["mm_features"] = [
            picture(float(pixels), f"{pixels}", at=at, length=4)
            for at, pixels in zip(PLACES, self.pixels, strict=True)
            if pixels is not None
        ]
        if self.dtype is not None:
            values = torch.tensor(self.values).repeat_interleave(BLOCK)
            fields["prompt_embeds"] = values[:, None].repeat(1, 3).to(self.dtype)
            fields["prompt_is_token_ids"] = [is_token for is_token in self.is_token for _ in range(BLOCK)]
        return make([token for token in self.tokens for _ in range(BLOCK)], **fields)

    def decides(self, block: int) -> tuple[Any, ...]:
        """What decides the KV of one block, if that of the blocks before is given."""
        first, end = block * BLOCK, (block + 1) * BLOCK
        media = [(at, pixels) for at, pixels in zip(PLACES, self.pixels, strict=True) if at < end and at + 4 > first]
        is_token = self.dtype is None or self.is_token[block]
        return (
            self.adapter,
            self.salt,
            self.dtype,
            [one for one in media if one[1] is not None],
            (is_token, self.tokens[block] if is_token else self.values[block]),
        )


def each(values: st.SearchStrategy[Any], count: int = BLOCKS) -> st.SearchStrategy[Any]:
    return st.tuples(*[values] * count)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "adapter": st.integers(0, 2),
    "salt": st.sampled_from([None, "a", "b"]),
    "dtype": st.sampled_from([None, torch.float16, torch.bfloat16]),
    "tokens": each(st.integers(0, 1)),
    "is_token": each(st.booleans()),
    "values": each(st.integers(0, 1)),
    "pixels": each(st.sampled_from([None, 1, 2]), len(PLACES)),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = [write_adapter(tmp_path_factory.mktemp("made") / str(number), bytes([number])) for number in range(2)]
    time.sleep(TICK)
    return made


@given(one=st.builds(Drawn, **VALUES), field=st.sampled_from(sorted(VALUES)), data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_h24_two_requests_share_a_key_only_if_all_up_to_its_block_agrees(
    one: Drawn, field: str, data: st.DataObject, identities: RequestIdentities, adapters: list[str]
) -> None:
    """And always if it does. They differ in one thing, perhaps."""
    other = replace(one, **{field: data.draw(VALUES[field])})
    made = [drawn.request(adapters) for drawn in (one, other)]
    found = [keys(read(identities, request), request.all_token_ids) for request in made]
    agree = [one.decides(block) == other.decides(block) for block in range(BLOCKS)]
    assert shared(*found) == (agree.index(False) if False in agree else BLOCKS)
