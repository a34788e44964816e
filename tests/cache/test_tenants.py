"""Tenants of a cache: a share of memory for each, told apart by salts that nobody is shown."""

from __future__ import annotations

import json
import random
from operator import le
from pathlib import Path
from typing import Any

import pytest

from kvpact.cache.status import EngineStatus, status_of
from kvpact.cli.status import status_lines
from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.hints.schema import KEY, parse_hints
from kvpact.identity.keys import RequestIdentity
from kvpact.identity.tenants import OTHERS, load_tenants
from kvpact.metrics import series
from kvpact.tiers.executor import TierExecutor
from scenes import BLOCK_SIZE, Scene, SceneRequest, open_disk, tokens

SLOTS = 40
BLOCKS = 4
SALTS = {"alice": "hunter2", "bob": "correct horse"}
SHARES = {"alice": 10, "bob": 20, OTHERS: 10}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of two tenants, with their files."""
    tenants = {}
    for name, salt in SALTS.items():
        (tmp_path / name).write_text(f"{salt}\n")
        tenants[name] = {"salt_file": str(tmp_path / name), "memory": f"{100 * SHARES[name] // SLOTS}%"}
    return {"tenants": tenants, "hints": "clients"}


def request(who: str, seed: int, blocks: int = BLOCKS) -> SceneRequest:
    """A request of a tenant, or of a client with a salt of its own."""
    salt = SALTS.get(who, who)
    return SceneRequest(f"{who} {seed}", tokens(blocks * BLOCK_SIZE + 1, seed), RequestIdentity(salt=salt))


def run(scene: Scene, who: str, seeds: range, retain: str | None = None, blocks: int = BLOCKS) -> None:
    """Requests that are computed and saved, one after the other."""
    for seed in seeds:
        asking = request(who, seed, blocks)
        hints = parse_hints({KEY: {"retain": retain}}) if retain else None
        if hints is not None:
            scene.cache.note_hints(asking, hints)
        scene.cache.on_new_request(asking)
        scene.run_cold(asking)
        scene.cache.check()


def in_memory(scene: Scene, who: str, seeds: range) -> int:
    """Prompts of these of which all is promised."""
    found = 0
    for seed in seeds:
        asking = request(who, seed)
        found += scene.prepare(asking).num_tokens == BLOCKS * BLOCK_SIZE
        scene.cache.request_finished(asking.request_id)
    return found


def blocks(scene: Scene, kind: str, *who: str) -> list[float]:
    """Blocks of these tenants, by default of all, in the order of `SHARES`."""
    shot = scene.cache.observe()
    return [shot[series("tenant_blocks", kind, name)] for name in who or SHARES]


def test_a_flood_with_hints_on_everything_takes_lent_room_alone(settings: dict[str, Any]) -> None:
    scene = Scene(SLOTS, **settings)
    run(scene, "alice", range(2), "1h")
    run(scene, "carol", range(2))
    run(scene, "bob", range(100, 130), "1h")
    assert (in_memory(scene, "alice", range(2)), in_memory(scene, "carol", range(2))) == (2, 2)
    assert blocks(scene, "held") == [8, 24, 8]
    assert blocks(scene, "share") == [*SHARES.values()]
    assert blocks(scene, "retained") == [2, 4, 0]
    run(scene, "dave", range(3))
    assert in_memory(scene, "alice", range(2)) == 2
    assert blocks(scene, "held") == [8, 20, 12], "what bob had beyond came back"


def test_a_prompt_longer_than_its_tenant_may_have_is_stored_up_to_there(settings: dict[str, Any]) -> None:
    """Unused room is lent to it, and what others use within their shares is not."""
    scene = Scene(SLOTS, **settings)
    run(scene, "bob", range(100, 104))
    run(scene, "alice", range(2))
    run(scene, "carol", range(3))
    run(scene, "bob", range(1), blocks=SLOTS)
    assert (in_memory(scene, "alice", range(2)), blocks(scene, "held")) == (2, [8, 22, 10])
    assert scene.cache.observe()["dropped_blocks"] == SLOTS - 22
    run(scene, "alice", range(1), blocks=SLOTS)
    assert blocks(scene, "held") == [10, 20, 10]
    alone = Scene(SLOTS, **settings)
    run(alone, "alice", range(1), blocks=SLOTS)
    assert blocks(alone, "held") == [SLOTS, 0, 0]


def test_without_tenants_the_flood_takes_all_and_nothing_is_kept_of_owners() -> None:
    scene = Scene(SLOTS, hints="clients")
    run(scene, "alice", range(2), "1h")
    run(scene, "bob", range(100, 130), "1h")
    assert in_memory(scene, "alice", range(2)) == 0
    shot = scene.cache.observe()
    assert not [name for name in shot if name.startswith("tenant_")]
    assert scene.cache.retaining is not None
    assert scene.cache.retaining.chains.shares is None
    assert Scene(SLOTS).cache.retaining is None


def test_a_share_that_retains_nothing_says_so(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = {"alice": {"salt_file": str(tmp_path / "alice"), "memory": "100%"}}
    scene = Scene(SLOTS, **settings | {"tenants": whole})
    hints = parse_hints({KEY: {"retain": "5m"}})
    assert hints is not None
    asking = request("carol", 1)
    scene.cache.note_hints(asking, hints)
    scene.run_cold(asking)
    assert hints.described() == {"retain": "clipped: the share of others retains none"}


def test_what_comes_from_a_tier_is_its_tenants_too(settings: dict[str, Any], tmp_path: Path) -> None:
    """Records on disk have no owner: it is that of the request for which they are read."""
    queue = TierExecutor(open_disk(tmp_path / "slabs", 64), 2, 1 << 30)
    scene = Scene(SLOTS, tiers=[queue], recompute_if_faster=False, **settings)
    run(scene, "alice", range(1))
    scene.settle_tiers()
    scene.forget_memory()
    assert blocks(scene, "held", "alice") == [0]
    scene.assert_loads(request("alice", 0), BLOCKS * BLOCK_SIZE)
    assert blocks(scene, "held") == [BLOCKS, 0, 0]


def test_status_and_metrics_name_tenants_and_no_salt(settings: dict[str, Any]) -> None:
    scene = Scene(SLOTS, **settings)
    run(scene, "alice", range(6), "1h")
    run(scene, "carol", range(3))
    found = EngineStatus.parse(status_of(scene.cache, scene.cache.metrics, "m", BLOCK_SIZE).encoded())
    lines = dict(status_lines(found))
    assert lines["tenant alice"] == "24 blocks in memory, share 10, 14 lent, 2 retained"
    assert lines["tenant bob"] == "0 blocks in memory, share 20"
    assert lines[f"tenant {OTHERS}"] == "12 blocks in memory, share 10, 2 lent"
    shown = f"{found.encoded()!r} {scene.cache.observe()} {scene.config!r} {scene.config.described()} {lines}"
    shown += repr(load_tenants(scene.config.tenants))
    assert not [salt for salt in SALTS.values() if salt in shown]
    labels = [name for name in scene.cache.observe() if name.startswith("tenant_")]
    assert len(labels) == 3 * len(SHARES), "whatever salts clients send"


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_of_tenants_leave_every_invariant_true(seed: int, settings: dict[str, Any]) -> None:
    """Salts that change with each request, loads, hints, resets, clocks that jump: P1, P2, P7 and P12."""
    rng = random.Random(seed)
    scene = Scene(rng.choice([12, 40]), **settings)
    for number in range(120):
        who = rng.choice(["alice", "bob", f"salt {number}"])
        asking = request(who, rng.randrange(6), rng.randrange(1, 7))
        asking.request_id = str(number)
        if rng.random() < 0.7:
            hints = parse_hints({KEY: {"retain": rng.choice(["1s", 30, "2h"])}})
            assert hints is not None
            scene.cache.note_hints(asking, hints)
        scene.cache.on_new_request(asking)
        match = scene.prepare(asking)
        if match.num_tokens and rng.random() < 0.8:
            scene.load(asking, match)
            assert scene.holds_content(asking, range(match.num_tokens // BLOCK_SIZE))
        if rng.random() < 0.9:
            scene.report(scene.step_computing(asking))
        scene.cache.request_finished(asking.request_id)
        scene.now += rng.choice([0.0, 1.0, 60.0, 1e6])
        if rng.random() < 0.03:
            scene.cache.reset()
        scene.cache.check()
        limits = [share // 5 for share in blocks(scene, "share")]
        assert all(map(le, blocks(scene, "retained"), limits))
    shot = scene.cache.observe()
    assert (shot["leases_held"], shot["open_plans"]) == (0, 0)


def message_of(tenants: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tenants(load_config({"tenants": tenants}, {}).tenants)
    message = str(caught.value)
    assert "\n" not in message
    assert not any(salt in message for salt in SALTS.values())
    return message


def of(path: Path, share: str = "25%") -> dict[str, str]:
    return {"salt_file": str(path), "memory": share}


def test_each_mistake_is_one_message_without_a_salt(tmp_path: Path) -> None:
    file, empty, same = tmp_path / "salt", tmp_path / "empty", tmp_path / "same"
    file.write_text("hunter2")
    same.write_text("hunter2\r\n")
    empty.write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    wrong = {
        "is no name": {"Alice!": of(file)},
        "stands for all clients": {OTHERS: of(file)},
        'unknown field "salt"': {"alice": {**of(file), "salt": "hunter2"}},
        "memory is missing": {"alice": {"salt_file": str(file)}},
        "memory is a share above 0% and up to 100%": {"alice": of(file, "101%")},
        "add up to 100.01%": {"alice": of(file, "50%"), "bob": of(file, "50.01%")},
        "cannot be read: No such file": {"alice": of(tmp_path / "none")},
        "cannot be read: Is a directory": {"alice": of(tmp_path)},
        "is empty": {"alice": of(empty)},
        "is no text in UTF-8": {"alice": of(tmp_path / "bytes")},
        '"alice" and "bob" have one salt': {"alice": of(file), "bob": of(same)},
        "65 tenants, and there may be 64": {f"t{number}": of(file, "1%") for number in range(65)},
    }
    for said, tenants in wrong.items():
        assert said in message_of(tenants)


def test_a_tables_text_in_the_environment_is_not_shown_if_it_is_broken() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"KVPACT_TENANTS": '{"alice": {"salt": "hunter2"'})
    assert str(caught.value).startswith("tenants={...} in the environment (KVPACT_TENANTS): a table of tenants is")


def test_names_of_tenants_allow_hints_and_arrive_as_they_were_set(tmp_path: Path) -> None:
    given = {"tenants": {"alice": of(tmp_path / "a", "12.5%")}, "hints": ["alice"]}
    config = load_config(given, {})
    assert json.loads(config.to_connector_json())["kv_connector_extra_config"] == given
    for hints in (["alice", "carol"], ["clients"], []):
        with pytest.raises(ConfigError, match=r'^hints=\[.*"clients"'):
            load_config({**given, "hints": hints}, {})
