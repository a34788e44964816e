"""From a URL to a tier: kvpact's own kinds, those of other packages, and what is said when it cannot be."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from documents import PACKAGES
from kvpact.config import load_config
from kvpact.errors import ConfigError, TierError
from kvpact.identity.keys import Namespace
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.backends import BACKENDS, SCHEMES, kind_of
from kvpact.tiers.base import Tier
from kvpact.tiers.directory.store import DirectoryStore
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.mooncake.store import MooncakeStore
from kvpact.tiers.objects.store import ObjectStore
from kvpact.tiers.redis.store import RedisStore
from kvpact.tiers.registry import TierContext, load_seal, open_store, open_tier
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import TierURL, parse_tier_url, tier_labels
from kvpact_testkit.tier.dictionary_store import DictionaryStore

PLACE = TierContext(Namespace({"model": "kinds"}), 8192)


def open_ours(url: TierURL, place: TierContext) -> Tier:
    """What another package would bring."""
    if "broken" in url.options:
        raise RuntimeError("cannot think")
    return SharedTier(DictionaryStore(), place.namespace, place.slot_bytes, seal=place.seal)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package with an entry point."""
    entry = importlib.metadata.EntryPoint("ours", f"{__name__}:open_ours", "kvpact.tiers")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def entry_points(**wanted: str) -> list[importlib.metadata.EntryPoint]:
        return [entry] if wanted.get("name", "ours") == "ours" else []

    monkeypatch.setattr("kvpact.tiers.registry.entry_points", entry_points)
    monkeypatch.setattr("kvpact.tiers.urls.entry_points", entry_points)


@pytest.mark.usefixtures("installed")
def test_a_tier_of_another_package_is_opened_by_its_scheme() -> None:
    (url,) = load_config({"tiers": ["ours://somewhere/else?whatever=1"]}, {}).tiers
    tier = open_tier(url, PLACE)
    assert isinstance(tier, SharedTier)
    tier.close()


@pytest.mark.usefixtures("installed")
def test_what_another_packages_tier_raises_costs_the_tier_and_not_the_engine() -> None:
    (tier,) = open_tiers([parse_tier_url("ours://x?broken=1")], PLACE, 10.0)
    assert tier.health().reason == "RuntimeError: cannot think"
    tier.close()


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match='unknown kind of tier "reds"; did you mean "redis'):
        load_config({"tiers": ["reds://cache"]}, {})


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_kinds_example_is_a_url_that_parses_back(scheme: str) -> None:
    url = parse_tier_url(SCHEMES[scheme].example)
    assert parse_tier_url(url.url) == url
    assert url.scheme == scheme


def test_every_kind_has_a_label_of_its_own_and_anothers_kind_its_scheme() -> None:
    kinds = [DiskTier.name, *(store.kind for store in (DirectoryStore, RedisStore, ObjectStore, MooncakeStore))]
    assert kinds == [backend.label for backend in BACKENDS]
    assert [kind_of(scheme) for scheme in ("rediss", "dir", "s3", "tape")] == ["redis", "directory", "object", "tape"]


def labels(*urls: str) -> tuple[str, ...]:
    return tier_labels([parse_tier_url(url) for url in urls])


def test_a_tier_is_called_by_its_name_or_its_kind_and_the_second_of_a_kind_by_a_number() -> None:
    assert labels("redis://a", "disk:///x?capacity=1GiB") == ("redis", "disk")
    assert labels("redis://a", "rediss://b", "redis://c") == ("redis", "redis-2", "redis-3")
    assert labels("redis://a?name=rack", "redis://b") == ("rack", "redis")
    assert labels("redis://a", "redis://b", "redis://c?name=redis-2") == ("redis", "redis-3", "redis-2")
    assert tier_labels([TierURL("tape", "", {}, "x"), TierURL("memory", "", {}, "y")]) == ("tape", "memory-2")


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["redis://a?name=Rack%20one"], 'name="Rack one": small letters, digits, "-" and "_" are needed'),
        (["redis://a?name="], "small letters"),
        (["redis://a?name=memory"], 'name="memory" is a source of its own; give each tier a name of its own'),
        (["redis://a?name=neighbours"], 'name="neighbours" is a source of its own'),
        (["redis://a?name=engine"], 'name="engine" is a source of its own'),
        (["redis://a?name=one", "disk:///x?capacity=1GiB&name=one"], 'name="one" is taken by another tier'),
        (["redis://a?nam=x"], 'unknown option "nam"; did you mean "name"?'),
    ],
)
def test_a_name_that_cannot_be_a_label_or_is_taken_is_refused(urls: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"tiers": urls}, {})
    assert message in str(caught.value)


def test_a_kind_of_tier_is_one_folder_and_a_word_in_the_table() -> None:
    """Its options, label and opener are there; outside, only who looks into slabs, or tests with them, names a kind."""
    source = PACKAGES[0]
    kinds = {file.parent.name for file in source.glob("tiers/*/__init__.py") if "BACKEND = " in file.read_text()}
    assert sorted(kinds) == sorted(backend.opener.split(".")[2] for backend in BACKENDS)
    imported = re.compile(rf"kvpact\.tiers\.({'|'.join(kinds)})\b")
    inside = tuple(source / "tiers" / kind for kind in kinds)
    outside = {
        file.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for file in package.rglob("*.py")
        if imported.search(file.read_text()) and not any(map(file.is_relative_to, inside))
    }
    assert outside == {
        "kvpact/cli/slabs.py",
        "kvpact/cli/stores.py",
        "kvpact_testkit/cache/subjects.py",
        "kvpact_testkit/compare/stores.py",
        "kvpact_testkit/peers/own.py",
    }


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis:///0", "needs a host or bucket behind two slashes"),
        ("redis://cache?timeout=soon", 'timeout="soon": a time such as'),
        ("redis://cache?tiemout=1s", 'unknown option "tiemout"; did you mean "timeout"?'),
        ("s3://bucket?concurrency=0", "a whole number of 1 or more is needed"),
        ("s3://bucket?allow_http=yes", '"true" or "false" is needed'),
        ("dir:///mnt/x", 'a dir tier needs a limit: add "?capacity=200GiB"'),
        ("dir://mnt/x?capacity=1GiB", "needs an absolute path behind three slashes"),
        ("redis://:a/b@cache", 'must be written as "%2F"'),
        ("redis://user:6379/b@cache", 'must be written as "%2F"'),
    ],
)
def test_a_url_that_cannot_be_right_says_what_would_be(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"tiers": [url]}, {})
    assert message in str(caught.value)


def test_two_tiers_at_one_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="each needs a place of its own"):
        load_config({"tiers": ["redis://a:b@cache/0", "redis://c:d@cache/0"]}, {})


@pytest.mark.parametrize("make", [open_store, lambda url: open_tier(url, PLACE)])
def test_a_scheme_that_nobody_opens_is_an_error_for_people(make: Callable[[TierURL], object]) -> None:
    with pytest.raises(TierError, match="nobody://x"):
        make(TierURL("nobody", "", {}, "x"))


def test_a_client_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    """In a process that cannot import them: kvpact itself must be importable without any store's client."""
    code = """
import sys
for name in ("redis", "obstore", "mooncake"):
    sys.modules[name] = None
from kvpact.identity.keys import Namespace
from kvpact.tiers.urls import parse_tier_url
from kvpact.tiers.directory.store import DirectoryStore
from kvpact.tiers.registry import TierContext, open_tier
for url in ("redis://127.0.0.1", "s3://bucket", "mooncake://127.0.0.1:1"):
    try:
        open_tier(parse_tier_url(url), TierContext(Namespace({}), 8192))
    except Exception as error:
        print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = ran.stdout.splitlines()
    assert len(lines) == 3
    for line, extra in zip(lines, ("redis", "s3", "mooncake"), strict=True):
        assert line.startswith("NoSuchTier "), line
        assert f"kvpact[{extra}]" in line, line


def test_a_key_file_must_hold_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_seal(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16 bytes or more, not 5; make one with: openssl rand -hex 32"):
        load_seal(tmp_path / "short")
    assert load_seal(None).name == ""
