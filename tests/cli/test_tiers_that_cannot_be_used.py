"""`kvpact tiers`, `config --check` and `serve` say of a tier what an engine would find, and leave nothing there."""

from __future__ import annotations

import json
import os
import shlex
import threading
from pathlib import Path

import pytest

from documents import block_with
from kvpact.cli import stores
from kvpact.cli.serve import tiers_not_as_wanted
from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.tiers.disk.slab_directory import SlabDirectory
from kvpact.tiers.free_space import scarcity
from kvpact_command import kvpact, without_settings
from other_user import OTHER_USER, as_user, needs_root, open_place


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


def now(*urls: str) -> tuple[int, list[tuple[bool, str]]]:
    """The exit code of `kvpact tiers`, and of each tier whether it is usable, and its state."""
    result = kvpact("tiers", *urls, "--json")
    return result.exit_code, [(row["usable"], row["state"]) for row in json.loads(result.stdout)["now"]]


@pytest.mark.parametrize("scheme", ["disk", "dir"])
def test_a_directory_in_which_no_folder_can_be_made_does_not_work(scheme: str) -> None:
    """Every user's right to write to /proc is said there, and nobody can."""
    url = f"{scheme}:///proc/kv?capacity=1GiB"
    code, ((usable, state),) = now(url)
    assert (code, usable) == (1, False)
    assert "works" not in state
    assert state.startswith(("cannot create /proc/kv: ", "/proc cannot be written by user "))
    checked = kvpact("config", "--check", "--tier", url)
    assert f"ERROR tier {url}: {state}" in checked.stdout
    assert checked.exit_code == 1


def test_who_asks_whether_a_folder_can_be_made_leaves_none(tmp_path: Path) -> None:
    names = ("new", "there", "used")
    (tmp_path / "there").mkdir()
    SlabDirectory.prepare(tmp_path / "used", 1 << 30)
    before = sorted(tmp_path.rglob("*"))
    urls = [f"disk://{tmp_path}/{name}?capacity=1MiB" for name in names]
    assert now(*urls) == (0, [(True, "works")] * 3)
    assert tiers_not_as_wanted(load_config({"tiers": urls}, {})) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("scheme", ["disk", "dir"])
@pytest.mark.parametrize("name", ["new", "there"])
def test_a_capacity_above_what_is_free_is_said_and_not_refused(scheme: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    url = f"{scheme}://{tmp_path}/{name}?capacity=8000TiB"
    code, ((usable, state),) = now(url)
    assert (code, usable) == (0, True)
    assert state.startswith("a capacity of 7.812PiB is more than the ")
    assert "works" not in state
    assert "ok    tier" in kvpact("config", "--check", "--tier", url).stdout
    (said,) = tiers_not_as_wanted(load_config({"tiers": [url], "require_tiers": True}, {}))
    assert said.startswith(f"kvpact: tier {url}: a capacity of 7.812PiB is more than the ")  # others fill the disk, too


def test_what_a_tier_holds_itself_is_room_too(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    assert scarcity(tmp_path, free // 2 + (1 << 60), 1 << 60) == ""
    assert scarcity(tmp_path, 2 * free + (1 << 60), 1 << 60)


def test_h97_serve_says_what_cannot_be_used_and_starts_unless_tiers_are_required(tmp_path: Path) -> None:
    urls = ["disk:///no/where/at/all?capacity=1GiB", f"disk://{tmp_path}?capacity=1MiB", "redis://127.0.0.1:9/0"]
    first, second = tiers_not_as_wanted(load_config({"tiers": urls}, {}))
    assert first == (
        "kvpact: tier disk:///no/where/at/all?capacity=1GiB: cannot be used now; the engine starts without it: "
        "there is no directory /no/where/at"
    )
    assert "cannot connect to 127.0.0.1:9" in second
    with pytest.raises(ConfigError, match=r'"require_tiers": true, and disk:///no/where.* cannot be used: there is no'):
        tiers_not_as_wanted(load_config({"tiers": urls, "require_tiers": True}, {}))


def test_h97_a_place_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a mounted directory whose server is gone; the others are shown."""
    hangs = threading.Event()
    monkeypatch.setattr(stores, "_ANSWER_S", 0.5)
    monkeypatch.setattr(stores, "require_makeable", lambda path: hangs.wait() if path.name == "gone" else None)
    rows = [(row["usable"], row["state"]) for row in stores.probe_all(load_config({
        "tiers": [f"disk://{tmp_path}/gone?capacity=1MiB", f"disk://{tmp_path}/here?capacity=1MiB"]
    }, {}).tiers)]  # fmt: skip
    hangs.set()
    assert rows == [(False, "no answer within 0 s"), (True, "works")]


IMPORTS = """
from kvpact.cli.serve import tiers_not_as_wanted
from kvpact.config import load_config
from kvpact.tiers.disk.slab_directory import SlabDirectory
import kvpact.cli.stores
"""


@needs_root
def test_the_readmes_path_is_one_that_an_ordinary_user_may_write() -> None:
    """A folder that only root may write to is said to be one."""
    (line,) = (each for each in block_with("README.md", "kvpact serve").text.splitlines() if each.startswith("kvpact"))
    url = shlex.split(line)[shlex.split(line).index("--tier") + 1]
    assert url.startswith("disk://$HOME/")
    with open_place() as home:
        program = f"""
os.environ["HOME"] = str(place)
url = os.path.expandvars({url!r}).replace("200GiB", "1MiB")
said = tiers_not_as_wanted(load_config({{"tiers": [url, "disk:///var/cache/kvpact-of-root?capacity=1MiB"]}}, {{}}))
SlabDirectory.prepare(Path(parse_tier_url(url).path), 1 << 20)
print(json.dumps([said, sorted(str(path.relative_to(place)) for path in place.rglob("*"))]))
"""
        found = as_user(OTHER_USER, program, home, imports=IMPORTS)
    assert isinstance(found, list)
    said, made = found
    (line,) = said
    assert line.startswith("kvpact: tier disk:///var/cache/kvpact-of-root?capacity=1MiB: cannot be used now; ")
    assert line.endswith(f": /var/cache cannot be written by user {OTHER_USER}; give this user the right to")
    assert made[:2] == ["kvpact", "kvpact/kvpact"]
