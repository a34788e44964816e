"""`kvpact inspect`, `verify`, `gc`, `tiers` and `why` on shared stores, as an operator meets them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvpact.cli.app import app
from kvpact.identity.epochs import Epoch
from kvpact.identity.keys import Namespace
from kvpact.tiers import record
from kvpact.tiers.base import chained
from kvpact.tiers.registry import TierContext, load_seal, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact_command import own_sockets
from kvpact_testkit.sample_blocks import document, filled_buffers
from servers.redis_server import RedisServer, redis_server

SLOT = 8192
MODELS = {name: Namespace({"model": name, "block_size": "16"}) for name in ("llama", "qwen")}
DOCUMENT = document("operators", 6)


def kvpact(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["dir", "redis", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("server")
        with server.client() as client:
            client.flushall()
        return f"redis://{server.address}?timeout=20s"  # a busy machine is no failure
    (tmp_path / "store").mkdir()
    return f"{request.param}://{tmp_path}/store" + ("?capacity=1GiB" if request.param == "dir" else "")


def fill(place: str, key_file: Path | None = None) -> None:
    for namespace in MODELS.values():
        tier = open_tier(parse_tier_url(place), TierContext(namespace, SLOT, load_seal(key_file)))
        assert all(tier.put(chained(DOCUMENT.keys, filled_buffers(DOCUMENT.keys, SLOT, 2))))
        tier.close()


def test_inspect_names_each_model_with_its_blocks(place: str) -> None:
    assert "no records of kvpact in" in kvpact("inspect", place).stdout
    fill(place)
    result = kvpact("inspect", place)
    assert result.exit_code == 0, result.output
    for name, namespace in MODELS.items():
        (line,) = [line for line in result.stdout.splitlines() if namespace.name in line]
        assert name in line
        assert " 6 " in line
    found = json.loads(kvpact("inspect", place, "--json").stdout)
    assert {group["fields"]["model"]: group["blocks"] for group in found["namespaces"]} == {"llama": 6, "qwen": 6}
    assert all(group["newest_age"] < 60 for group in found["namespaces"])


def test_a_place_is_shown_as_it_was_given(tmp_path: Path) -> None:
    place = f"dir://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    assert kvpact("inspect", place).stdout == f"no records of kvpact in {place}\n"
    assert "capacity" not in kvpact("inspect", f"dir://{tmp_path}/nowhere").stderr
    fill(f"{place}?capacity=1GiB")
    found = json.loads(kvpact("inspect", place, "--json").stdout)
    assert found["place"] == place
    given = json.loads(kvpact("inspect", f"{place}?capacity=1GiB", "--json").stdout)["usage"]
    assert found["usage"] == given | {"capacity_bytes": 0}
    assert given["used_bytes"] > 0
    assert json.loads(kvpact("verify", place, "--json").stdout)["place"] == place
    assert kvpact("gc", place, "--yes", "--older-than", "0s").exit_code == 0


def test_verify_reads_every_record(place: str) -> None:
    fill(place)
    report = json.loads(kvpact("verify", place, "--json").stdout)
    assert (report["records"], report["sound"], report["damaged"]) == (12, 12, [])


def test_verify_needs_the_key_of_sealed_records(place: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret of this cluster")
    fill(place, key)
    without = json.loads(kvpact("verify", place, "--json").stdout)
    assert (without["sound"], without["unsealed"], without["damaged"]) == (0, 12, [])
    assert json.loads(kvpact("verify", place, "--json", "--record-key-file", key).stdout)["sound"] == 12
    short = tmp_path / "short"
    short.write_text("short")
    refused = kvpact("verify", place, "--record-key-file", short)
    assert refused.exit_code == 2
    assert "openssl rand -hex 32" in refused.stderr


def test_verify_exits_with_1_for_a_damaged_record(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    place = f"dir://{tmp_path}/store?capacity=1GiB"
    fill(place)
    record = max((path for path in (tmp_path / "store").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(record.read_bytes())
    raw[-1] ^= 1
    record.write_bytes(raw)
    result = kvpact("verify", place)
    assert result.exit_code == 1
    assert "payload does not match its checksum" in result.stdout


def test_gc_removes_one_namespace_and_nothing_else(place: str) -> None:
    fill(place)
    unknown = kvpact("gc", place, "--yes", "--namespace", "01234567")
    assert unknown.exit_code == 2
    assert MODELS["qwen"].name in unknown.stderr
    result = kvpact("gc", place, "--yes", "--namespace", MODELS["llama"].name[:8])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("removed ")
    left = json.loads(kvpact("inspect", place, "--json").stdout)["namespaces"]
    assert [group["fields"]["model"] for group in left] == ["qwen"]
    assert json.loads(kvpact("verify", place, "--json").stdout)["sound"] == 6


def stored_under(place: str, epochs: dict[str, Epoch]) -> None:
    for name, epoch in epochs.items():
        tier = open_tier(parse_tier_url(place), TierContext(MODELS["llama"], SLOT))
        wanted = document(name, 2)
        assert all(tier.put(chained(wanted.keys, filled_buffers(wanted.keys, SLOT, 2), epoch=epoch)))
        tier.close()


def test_h37_gc_removes_what_no_engine_will_ask_for(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of an epoch that a dead engine drew for itself, and of older formats; nothing that is younger."""
    monkeypatch.setattr(record, "RECORD_FORMAT", record.RECORD_FORMAT - 1)
    stored_under(place, {"old format": Epoch()})
    monkeypatch.undo()
    stored_under(place, {"first epoch": Epoch(), "named": Epoch.of_word("v1"), "drawn": Epoch.draw()})
    assert kvpact("gc", place, "--yes", "--older-than", "1h").stdout == "removed 0 records\n"
    counted = json.loads(kvpact("gc", place, "--json", "--dry-run", "--older-than", "0s").stdout)
    assert counted == {"place": place, "records": 4, "removed": False}
    assert kvpact("gc", place, "--yes", "--older-than", "0s").stdout == "removed 4 records\n"
    tier = open_tier(parse_tier_url(place), TierContext(MODELS["llama"], SLOT))
    left = {name: sum(tier.lookup(document(name, 2).keys)) for name in ("old format", "first epoch", "named", "drawn")}
    assert left == {"old format": 0, "first epoch": 2, "named": 2, "drawn": 0}
    tier.close()
    named = ("--namespace", MODELS["llama"].name)
    assert kvpact("gc", place, "--yes", "--older-than", "1d", *named).stdout == "removed 0 records\n"
    gone = json.loads(kvpact("gc", place, "--json", "--yes", "--older-than", "0s", *named).stdout)
    assert gone == {"place": place, "records": 4, "removed": True}
    assert json.loads(kvpact("gc", place, "--json", "--dry-run", "--older-than", "0s", *named).stdout)["records"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "gc needs --namespace NAME, --older-than AGE, or both"),
        (("--older-than", "a while"), 'a time with its unit is needed, such as "7d"'),
        (("--older-than", "7x"), 'a time with its unit is needed, such as "7d"'),
        (("--older-than", "7"), 'say in which unit: "7d" for days'),
        (("--older-than", "0.5"), 'say in which unit: "0.5d" for days'),
        (("--namespace", "0123abc"), "at least the first 8 digits"),
        (("--older-than", "0s"), "would remove 1 slab; standard input is not a terminal, so pass --yes"),
    ],
)
def test_gc_that_is_not_told_what_to_remove_removes_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    open_tier(parse_tier_url(f"disk://{tmp_path}?capacity=16MiB"), TierContext(MODELS["llama"], SLOT)).close()
    refused = kvpact("gc", tmp_path, *arguments)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.split())
    assert len(list(tmp_path.glob("kvpact/*.slab"))) == 1


def test_gc_says_how_many_and_removes_none_with_dry_run(place: str) -> None:
    fill(place)
    for arguments in (
        ("--namespace", MODELS["llama"].name),
        ("--older-than", "0s", "--namespace", MODELS["llama"].name),
    ):
        said = kvpact("gc", place, *arguments, "--dry-run", "--yes")
        assert (said.exit_code, said.stdout.split()[:2]) == (0, ["would", "remove"]), said.output
        removed = kvpact("inspect", place, "--json").stdout
        assert len(json.loads(removed)["namespaces"]) == 2


def test_gc_removes_slabs_that_were_not_used_for_long(tmp_path: Path) -> None:
    place = f"disk://{tmp_path}/slabs?capacity=16MiB"
    open_tier(parse_tier_url(place), TierContext(MODELS["llama"], SLOT)).close()
    used = open_tier(parse_tier_url(place), TierContext(MODELS["qwen"], SLOT))
    assert kvpact("gc", place, "--yes", "--older-than", "1h").stdout == "removed 0 slabs\n"
    assert kvpact("gc", place, "--yes", "--older-than", "0s").stdout == "removed 1 slab\n"
    used.close()


def test_gc_removes_an_idle_slab(tmp_path: Path) -> None:
    place = f"disk://{tmp_path}/slabs?capacity=16MiB"
    tier = open_tier(parse_tier_url(place), TierContext(MODELS["llama"], SLOT))
    refused = kvpact("gc", place, "--yes", "--namespace", MODELS["llama"].name)
    assert "in use by an engine" in refused.stderr
    tier.close()
    assert kvpact("gc", place, "--yes", "--namespace", MODELS["llama"].name).stdout == "removed 1 slab\n"
    assert list((tmp_path / "slabs").glob("kvpact/*.slab")) == []


def test_gc_and_inspect_know_the_slabs_of_all_engines_of_a_model(tmp_path: Path) -> None:
    place = f"disk://{tmp_path}/slabs?capacity=16MiB"
    tiers = [open_tier(parse_tier_url(place), TierContext(MODELS["llama"], SLOT)) for _ in range(2)]
    name = MODELS["llama"].name
    shown = [line.split()[:4] for line in kvpact("inspect", place).stdout.splitlines() if name in line]
    assert shown == [[slab, "llama", "pid", str(os.getpid())] for slab in (f"{name}-1", name)]
    tiers[0].close()
    assert "in use by an engine" in kvpact("gc", place, "--yes", "--namespace", name).stderr
    tiers[1].close()
    assert kvpact("gc", place, "--yes", "--namespace", name).stdout == "removed 2 slabs\n"
    assert list((tmp_path / "slabs").glob("kvpact/*.slab")) == []


def test_tiers_tells_which_store_works(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    dead = "redis://user:hunter2@127.0.0.1:9/0?timeout=200ms"
    result = kvpact("tiers", f"redis://{server.address}?timeout=20s", f"dir://{tmp_path}/store?capacity=1GiB", dead)
    assert result.exit_code == 1
    assert result.stdout.count("works") == 2
    assert "hunter2" not in result.output
    rows = json.loads(kvpact("tiers", f"redis://{server.address}?timeout=20s", "--json").stdout)["now"]
    assert rows[0]["state"] == "works"
    assert 0 < rows[0]["lookup_seconds"] < 20
    assert type(rows[0]["used_bytes"]) is int


def refusal(*arguments: object) -> str:
    """The one line that kvpact says no with."""
    result = kvpact(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("kvpact: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("scheme", ["dir", "file"])
@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("gc", "--yes", "--namespace", "0123abcd")])
def test_whoever_only_looks_makes_no_directory(command: tuple[str, ...], scheme: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    for name in ("missing", "a-file"):
        assert f"{tmp_path}/{name} is not a directory" in refusal(*command, f"{scheme}://{tmp_path}/{name}")
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_store_that_cannot_be_reached_is_named_once_and_without_its_password() -> None:
    for command in (("inspect",), ("verify",), ("gc", "--yes", "--namespace", "0123abcd")):
        line = refusal(*command, "redis://kira:hunter2@127.0.0.1:1/0")
        assert line.startswith("kvpact: redis://127.0.0.1:1/0: cannot connect to 127.0.0.1:1")
        assert line.count("redis://") == 1
        assert "hunter2" not in line


def test_tiers_says_why_one_does_not_work_in_full_however_narrow_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    (tmp_path / "a-file").write_text("")
    (tmp_path / "tier").mkdir()
    names = ("a-file", "missing/slabs", "tier", "new")
    result = kvpact("tiers", *(f"disk://{tmp_path}/{name}?capacity=1GiB" for name in names))
    assert result.exit_code == 1
    shown = result.stdout.splitlines()[1:]
    for line, state in zip(
        shown,
        (f"{tmp_path}/a-file is not a directory", f"there is no directory {tmp_path}/missing", "works", "works"),
        strict=True,
    ):
        assert re.search(rf"\?capacity=1GiB +{re.escape(state)} ", line), line
    assert not (tmp_path / "new").exists()


def test_tiers_without_tiers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_sockets(tmp_path, monkeypatch)
    assert kvpact("tiers").stdout.startswith("no tier is configured")
    assert json.loads(kvpact("tiers", "--json").stdout) == {"now": [], "engine": []}
