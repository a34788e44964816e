"""`PactTier` below vLLM's own tiering manager: what is stored, found, promoted, refused and lost. No engine runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_bed import ATTENTION, ROW_BYTES, bed, engine, keys_of, spec_of
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium

from kvpact.errors import ConfigError
from kvpact.tiers.directory.store import DirectoryStore
from kvpact.tiers.disk.tier import DiskTier


def disk(folder: Path, capacity: str = "1MiB", **settings: Any) -> dict[str, Any]:
    return {"url": f"disk://{folder}/kv?capacity={capacity}", **settings}


def shared(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"url": f"dir://{folder}/kv?capacity=16MiB", **settings}


KINDS = pytest.mark.parametrize("kind", [disk, shared])


@KINDS
def test_what_one_engine_computed_the_next_one_loads(kind: Any, tmp_path: Path) -> None:
    keys = keys_of(1, 8)
    with bed(kind(tmp_path)) as first:
        assert first.compute("a", keys, 10)
        first.rest()
    with bed(kind(tmp_path)) as second:
        assert second.find("b", [*keys, *keys_of(2, 1)]) == 8
        assert second.rows(keys) == [*range(10, 18)]
        assert second.find("c", keys_of(3, 4)) == 0
        stats = second.tier.get_stats()
        label = ("disk" if kind is disk else "directory",)
        assert stats.data["data"]["vllm:kvpact_read_blocks"] == {label: 8}
        assert stats.data["data"]["vllm:kvpact_read_bytes"] == {label: 8 * ROW_BYTES}


def test_the_tier_is_open_to_the_plain_spec_too(tmp_path: Path) -> None:
    with bed(disk(tmp_path), name="TieringOffloadingSpec") as one:
        one.compute("a", keys_of(1, 2), 10)
        one.rest()
    with bed(disk(tmp_path)) as two:
        assert two.find("b", keys_of(1, 2)) == 2


@KINDS
@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "other weights"},
        {"of": engine(model={"dtype": "float16"})},
        {"of": engine(cache={"cache_dtype": "fp8"})},
        {"weights_version": "v2"},
        {"layers": {**ATTENTION, "dtype": "float32"}},
        {"layers": {"shapes": ((3, 8192), (32, 128, 128)), "dtypes": ("bfloat16", "bfloat16")}},
    ],
)
def test_h33_chunks_of_another_engine_are_not_found(kind: Any, other: dict[str, Any], tmp_path: Path) -> None:
    with bed(kind(tmp_path)) as first:
        first.compute("a", keys_of(1, 4), 10)
        first.rest()
    named = {name: other[name] for name in ("of", "layers") if name in other}
    settings = {name: value for name, value in other.items() if name not in named}
    with bed(kind(tmp_path, **settings), **named) as second:
        assert second.find("b", keys_of(1, 4)) == 0


STATES = {"shapes": ((3, 8192), (32, 128, 128)), "dtypes": ("bfloat16", "float32"), "mamba_type": "gdn_attention"}


@pytest.mark.parametrize(
    "other",
    [
        {"shapes": ((3 + 2, 8192), (32, 128, 128))},
        {"dtypes": ("bfloat16", "bfloat16")},
        {"mamba_type": "mamba2"},
    ],
    ids=["two drafts", "numbers", "kind"],
)
def test_h132_states_of_another_number_of_drafts_are_not_found_in_pages_of_the_same_size(
    other: dict[str, Any], tmp_path: Path
) -> None:
    with bed(shared(tmp_path), layers=STATES) as first:
        first.compute("a", keys_of(1, 4), 10)
        first.rest()
    with bed(shared(tmp_path), layers={**STATES, **other}) as second:
        assert second.find("b", keys_of(1, 4)) == 0
    with bed(shared(tmp_path), layers=STATES) as third:
        assert third.find("c", keys_of(1, 4)) == 4


@KINDS
def test_h20_a_damaged_chunk_is_computed_and_never_promoted_twice(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(1, 6)
    with bed(kind(tmp_path)) as first:
        first.compute("a", keys, 10)
        first.rest()
    for file in (path for path in (tmp_path / "kv").rglob("*") if path.is_file()):
        content = bytearray(file.read_bytes())
        at = content.find(bytes([12]) * ROW_BYTES)
        if at >= 0:
            content[at + 100] ^= 0x40
            file.write_bytes(content)
    with bed(kind(tmp_path)) as second:
        loads: list[int] = []
        submit = second.tier.submit_load

        def note(job: Any) -> None:
            loads.append(len(job.keys))
            submit(job)

        monkeypatch.setattr(second.tier, "submit_load", note)
        assert second.find("b", keys) == 2
        assert second.rows(keys[:2]) == [10, 11]
        assert second.rows(keys[3:]) == [13, 14, 15]
        assert second.find("c", keys) == 2
        assert loads == [6]
        damaged = second.tier.get_stats().data["data"]["vllm:kvpact_damaged_records"]
        assert [*damaged.values()] == [1]


def test_a_store_is_asked_once_a_step_for_all_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(shared(tmp_path)) as one:
        asked: list[int] = []
        exists = DirectoryStore.exists

        def note(self: DirectoryStore, names: Sequence[str]) -> list[bool]:
            asked.append(len(names))
            return exists(self, names)

        monkeypatch.setattr(DirectoryStore, "exists", note)
        assert one.ask("a", keys_of(1, 20)) == [LookupResult.RETRY] * 20
        assert one.find("a", keys_of(1, 20)) == 0
        assert asked == [20]


def test_an_exclusive_tier_answers_at_once_and_what_is_asked_beyond_that_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, others = keys_of(1, 60), keys_of(2, 200)
    with bed(disk(tmp_path)) as one:
        one.compute("a", stored, 0)
        one.rest()
    with bed(disk(tmp_path)) as two:
        asked: list[int] = []
        lookup = DiskTier.lookup

        def note(self: DiskTier, keys: Sequence[bytes]) -> list[bool]:
            asked.append(len(keys))
            return lookup(self, keys)

        monkeypatch.setattr(DiskTier, "lookup", note)
        answers = [two.tier.lookup(key, two.request("b")) for key in [*stored, *others]]
        assert answers == [LookupResult.HIT] * 60 + [LookupResult.MISS] * 4 + [LookupResult.RETRY] * 196
        two.step()
        assert two.ask("b", others[4:]) == [LookupResult.MISS] * 196
        assert asked == [1] * 64 + [196]


class Hanging:
    """Calls of a class that hang until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.reached = threading.Event()
        self._monkeypatch = monkeypatch

    def at(self, where: type, name: str) -> None:
        call = getattr(where, name)

        def hang(*arguments: Any, **named: Any) -> Any:
            self.reached.set()
            self.go_on.wait(30)
            return call(*arguments, **named)

        self._monkeypatch.setattr(where, name, hang)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging(monkeypatch)
    yield made
    made.go_on.set()


def test_h10_no_request_waits_for_a_store_that_does_not_answer(tmp_path: Path, hanging: Hanging) -> None:
    with bed(shared(tmp_path, prepare_deadline=0.3)) as one:
        hanging.at(DirectoryStore, "exists")
        began = time.monotonic()
        assert one.find("a", keys_of(1, 4)) == 0
        assert 0.25 < time.monotonic() - began < 5
        hanging.go_on.set()


def test_h10_a_read_that_hangs_is_over_at_the_deadline_and_writes_nothing_later(
    tmp_path: Path, hanging: Hanging
) -> None:
    keys = keys_of(1, 4)
    with bed(shared(tmp_path)) as first:
        first.compute("a", keys, 10)
        first.rest()
    with bed(shared(tmp_path, prepare_deadline=0.3)) as second:
        hanging.at(DirectoryStore, "read")
        assert second.find("b", keys) == 0
        assert hanging.reached.is_set()
        second.compute("b", keys, 50)
        hanging.go_on.set()
        second.rest()
        time.sleep(0.2)
        assert second.rows(keys) == [50, 51, 52, 53]


def test_a_write_beyond_the_queue_is_refused_at_once(tmp_path: Path, hanging: Hanging) -> None:
    with bed(disk(tmp_path, write_queue=8 * ROW_BYTES, shutdown_timeout=5)) as one:
        hanging.at(DiskTier, "put")
        one.compute("a", keys_of(1, 6), 10)
        one.compute("b", keys_of(2, 6), 20)
        one.step()
        assert one.tier.get_stats().data["data"]["vllm:kvpact_dropped_writes"] == {("disk",): 6}
        hanging.go_on.set()
        one.rest()
    with bed(disk(tmp_path)) as two:
        assert [two.find("c", keys_of(prompt, 6)) for prompt in (1, 2)] == [6, 0]


def test_h124_a_job_larger_than_the_queue_is_written_in_pieces_that_fit(tmp_path: Path) -> None:
    keys = keys_of(1, 6)
    with bed(disk(tmp_path, write_queue=4 * ROW_BYTES)) as one:
        one.compute("a", keys, 10)
        one.rest()
    with bed(disk(tmp_path)) as two:
        found = two.find("b", keys)
        assert found >= 4
        assert two.rows(keys[:found]) == [*range(10, 10 + found)]


def test_h124_a_queue_that_no_row_fits_in_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^"write_queue": .* is less than one block'):
        bed(disk(tmp_path, write_queue=ROW_BYTES - 1)).__enter__()


def test_what_does_not_fit_goes_deepest_first_where_nothing_was_used_since(tmp_path: Path) -> None:
    with bed(disk(tmp_path, capacity=f"{24 * 8}KiB")) as one:
        keys = keys_of(1, 40)
        one.compute("a", keys, 10)
        one.rest()
        capacity = one.tier.get_stats().data["data"]
    with bed(disk(tmp_path, capacity=f"{24 * 8}KiB")) as two:
        found = two.find("b", keys)
        assert 8 <= found <= 24, capacity


@KINDS
def test_h38_nothing_outlives_a_reset(kind: Any, tmp_path: Path) -> None:
    old, new = keys_of(1, 4), keys_of(2, 4)
    with bed(kind(tmp_path)) as one:
        one.compute("a", old, 10)
        one.rest()
        one.request("lives on")
        one.manager.reset_cache()
        assert one.find("b", old) == 0
        assert not one.compute("lives on", new, 20), "part of it is of the old weights"
        assert one.find("c", new) == 0
        one.finish("lives on")
        assert one.compute("d", new, 30)
        one.rest()
    with bed(kind(tmp_path)) as next_life:
        assert next_life.find("e", old) == 4
        assert next_life.find("f", new) == 0, "nobody knows these weights"


def test_h38_under_the_plain_spec_the_tier_stores_nothing_of_a_request_that_lives_over_a_reset(tmp_path: Path) -> None:
    keys = keys_of(1, 4)
    with bed(disk(tmp_path), name="TieringOffloadingSpec") as one:
        one.request("lives on")
        one.manager.reset_cache()
        assert one.compute("lives on", keys, 20), "vLLM's own memory takes it"
        one.rest()
        one.finish("lives on")
        assert one.tier.get_stats().data["data"].get("vllm:kvpact_written_blocks") is None


@pytest.mark.parametrize(("allowed", "stored"), [("clients", 0), ("off", 4)])
def test_a_client_keeps_its_request_out_of_the_tier_where_hints_are_allowed(
    allowed: str, stored: int, tmp_path: Path
) -> None:
    settings = disk(tmp_path) | {"hints": allowed}
    with bed(settings) as one:
        one.request("hinted", {"kvpact": {"store": "none"}})
        assert one.compute("hinted", keys_of(1, 4), 20), "vLLM's own memory takes it"
        one.finish("hinted")
        assert one.compute("plain", keys_of(2, 4), 20)
        one.rest()
    with bed(settings) as next_life:
        assert [next_life.find(f"reader {prompt}", keys_of(prompt, 4)) for prompt in (1, 2)] == [stored, 4]


@KINDS
def test_a_reset_waits_until_nothing_reads_or_writes(kind: Any, tmp_path: Path, hanging: Hanging) -> None:
    with bed(kind(tmp_path)) as one:
        hanging.at(DiskTier if kind is disk else DirectoryStore, "put" if kind is disk else "write")
        one.compute("a", keys_of(1, 4), 10)
        one.step()
        assert hanging.reached.wait(5)
        threading.Timer(0.3, hanging.go_on.set).start()
        began = time.monotonic()
        one.manager.reset_cache()
        assert time.monotonic() - began > 0.25
        assert not one.tier.has_pending_work()


def test_events_name_what_is_stored(tmp_path: Path) -> None:
    keys = keys_of(1, 3)
    with bed(disk(tmp_path, enable_kv_events=True)) as one:
        one.compute("a", keys, 10)
        one.rest()
        (event,) = one.tier.take_events()
        assert (event.keys, event.medium, event.removed) == (keys, Medium.STORAGE, False)
        assert event.locality is Locality.LOCAL
        assert [*one.tier.take_events()] == []
    with bed(shared(tmp_path)) as two:
        assert two.tier.locality is Locality.REMOTE


def test_every_count_of_a_tier_has_a_definition(tmp_path: Path) -> None:
    with bed(disk(tmp_path)) as one:
        one.compute("a", keys_of(1, 3), 10)
        one.rest()
        told = one.tier.get_stats().data["data"]
        known = type(one.spec).build_metric_definitions(one.spec.extra_config)
        assert {"vllm:kvpact_held_blocks", "vllm:kvpact_written_blocks"} <= set(told) <= set(known)


@pytest.mark.parametrize(
    ("settings", "of", "said"),
    [
        ({"memory": "4GiB"}, engine(), "no setting 'memory'"),
        ({}, engine(), 'needs a "url"'),
        ({"url": "disk:///x"}, engine(), "a disk tier needs a limit"),
        ({"url": "memcached://x"}, engine(), "memcached"),
        (disk(Path("/nowhere"), locality="HERE"), engine(), '"LOCAL" or "REMOTE"'),
        (disk(Path("/nowhere")), engine(cache={"prefix_caching_hash_algo": "xxhash"}), "random number"),
        (disk(Path("/nowhere")), engine(lora_config=object()), '"adapters": "by-name"'),
    ],
)
def test_a_tier_that_cannot_be_right_is_refused_in_one_line(settings: dict[str, Any], of: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(settings, of=of).get_manager()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tier_without_the_plug_in_says_so(tmp_path: Path) -> None:
    spec = spec_of(disk(tmp_path))
    object.__delattr__(spec.config, "kvpact_engine")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        spec.get_manager()


def test_a_url_with_a_secret_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACT_TIERS", f"dir://{tmp_path}/other?capacity=1MiB disk://{tmp_path}/kv?capacity=1MiB")
    with bed({"number": 1}) as one:
        assert one.tier.locality is Locality.LOCAL
    with pytest.raises(ConfigError, match="names 2"):
        spec_of({"number": 2}).get_manager()


def test_a_tier_that_cannot_be_used_yet_costs_its_hits_and_comes_into_use(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no folder yet")
    with bed(disk(tmp_path)) as one:
        assert one.compute("a", keys_of(1, 2), 10)
        one.rest()
        (tmp_path / "kv").unlink()
        for prompt in range(2, 42):
            one.compute("b", keys_of(prompt, 1), prompt)
            one.rest()
            time.sleep(0.25)
            if any((tmp_path / "kv").rglob("*.slab")):
                break
        one.compute("c", keys_of(100, 2), 100)
        one.rest()
    with bed(disk(tmp_path)) as two:
        assert two.find("d", keys_of(100, 2)) == 2
        assert two.find("e", keys_of(1, 2)) == 0
