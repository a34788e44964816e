"""A house rule: a wrong value of an option is refused by one sentence, wherever it is read, which names the option, the
value and one that is right."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvpact.cli.serve import COMMAND_LINE, chosen_settings
from kvpact.config import KvpactConfig, load_config
from kvpact.errors import ConfigError
from kvpact.own_files import group_number
from kvpact.tiers import backend, objects
from kvpact.tiers.backends import SCHEMES
from kvpact.tiers.urls import parse_tier_url
from kvpact.units import parse_size

DISK = "disk:///srv/kv?capacity=1GiB"

SIZES = ["4G", "lots", "-1", "1.5.5GiB", "4 4GiB", "1e3", "GiB", "٤GiB", "4GiBs", "nan", True]
TIMES = ["soon", "-1s", "2 weeks", "2w", "s", "1h30m", "1e3", "nan", "inf", "--", True]
COUNTS = ["0", "-1", "two", "1.5", "1x", "2 3", "nan", "1e3", "0x10", "++1", True]
WORDS = ["later", "EAGER", "1", "yes ", "none of them", "[]", "null", "off,on", "Auto", "'auto'", 5]
SWITCHES = ["perhaps", "2", "y es", "truee", "[]", "null", "-1", "ja", "nein", "1.5", [True]]
NO_TEXT: list[Any] = [5, True, 1.5, [], [""], {}, {"a": 1}, -1, ["a"], False]
"""Any text is right there; a file and JSON can hold something else."""
PATHS = [*NO_TEXT, "~nobody-of-this-name/file"]
FACTORIES = ["cache", "a.b", "a:", ":b", "a b:c", "a:b:c", "a:b()", "1a:b", "a-b:c", "a/b.py:c", 5]
TIERS: list[Any] = [
    "/var/kv", "~/kv", "./kv", "dsik:///kv?capacity=1GiB", "disk:///kv", "disk://kv?capacity=1GiB",
    "redis://cache:99999", "redis://cache:0", "redis://cache:x", "redis://a,b", "redis://cache/zero", "redis://",
    "mooncake://a:1,b:2", "mooncake://m:99999", "redis+sentinel://guard", "redis+cluster://a/1",
    f"{DISK},redis://cache", f'["{DISK}"]', 5,
]  # fmt: skip

TENANT = {"salt_file": "/run/secrets/alice", "memory": "60%"}
TENANTS: list[Any] = [
    "alice", "alice=25%", "[]", 5, True, ["alice"], {"alice": "25%"}, {"alice": {}}, {"Alice": TENANT},
    {"others": TENANT}, {"a b": TENANT}, {"alice": TENANT, "bob": TENANT}, {"alice": {"memory": "25%"}},
    {"alice": {**TENANT, "memory": 25}}, {"alice": {**TENANT, "memory": "2GiB"}}, {"alice": {**TENANT, "salt": "x"}},
    {"alice": {**TENANT, "memory": "0%"}}, {"alice": {**TENANT, "salt_file": "~nobody-of-this-name/file"}},
]  # fmt: skip

WRONG: Mapping[str, list[Any]] = {
    "memory": [*SIZES, "0"], "write_queue": [*SIZES, "0"], "sync_load_budget": SIZES,
    "prepare_deadline": TIMES, "plan_lifetime": [*TIMES, "0"], "load_deadline": [*TIMES, "0"],
    "shutdown_timeout": TIMES, "step_deadline": [*TIMES, "0s"],
    "min_match_blocks": COUNTS, "io_threads": [*COUNTS, "65"],
    "save": WORDS, "admit": WORDS, "match_at": WORDS, "gpu": WORDS, "kv_layout": WORDS, "huge_pages": WORDS,
    "require": WORDS, "pool": WORDS, "hints": WORDS,
    "recompute_if_faster": SWITCHES, "require_tiers": SWITCHES, "share_drawn_epochs": SWITCHES, "layerwise": SWITCHES,
    "model_id": NO_TEXT, "weights_version": NO_TEXT, "record_key_file": PATHS, "stats_file": PATHS, "timeline": PATHS,
    "cache": FACTORIES, "tiers": [[each] for each in TIERS], "tenants": TENANTS,
}  # fmt: skip
"""Key -> ten wrong values or more."""

PROPOSAL = re.compile(
    r'(?:such as|like|write|be|or|, ) ?("(?:[^"\\]|\\.)*"|\'[^\']*\'|\[[^\]]*\]|\d+(?:\.\d+)?|true|false)'
)


def as_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("{}", "{}").replace(": ", " = ")


def sources(key: str, value: Any, folder: Path) -> dict[str, Callable[[], KvpactConfig]]:
    """The ways in which this value can be given, by what a refusal calls each."""
    found: dict[str, Callable[[], KvpactConfig]] = {
        "kv_connector_extra_config": lambda: load_config(json.loads(json.dumps({key: value})), {}),
    }
    file = folder / "kvpact.toml"
    file.write_text(f"{key} = {as_toml(value)}\n", encoding="utf-8")
    found[str(file)] = lambda: load_config(None, {}, file)
    texts = value if key == "tiers" else [value]
    if all(isinstance(text, str) and text for text in texts):
        name = f"KVPACT_{key.upper()}"
        found[f"the environment ({name})"] = lambda: load_config(None, {name: " ".join(texts)})
        given = {"memory": lambda: chosen_settings(value, None), "tiers": lambda: chosen_settings(None, texts)}
        if key in given:
            settings = given[key]()
            found[COMMAND_LINE] = lambda: load_config(settings, {}, extra_source=COMMAND_LINE)
    return found


def refused(load: Callable[[], KvpactConfig]) -> str:
    with pytest.raises(ConfigError) as caught:
        load()
    return str(caught.value)


def is_right(key: str, proposal: str) -> bool:
    """Whether what a sentence proposes is taken."""
    text = proposal.strip("'") if proposal.startswith("'") else json.loads(proposal)
    for value in (text, [text]) if key == "tiers" else (text,):
        try:
            load_config({key: value}, {})
        except ConfigError:
            continue
        return True
    return False


@pytest.mark.parametrize("key", KvpactConfig.model_fields)
def test_each_wrong_value_is_refused_by_one_sentence_wherever_it_is_read(key: str, tmp_path: Path) -> None:
    assert len(WRONG[key]) >= 10
    for value in WRONG[key]:
        said = set()
        for source, load in sources(key, value, tmp_path).items():
            message = refused(load)
            shown = value[0] if key == "tiers" else value
            assert message.startswith(f"{key}="), message
            assert f" in {source}: " in message, message
            assert "\n" not in message
            named, reason = message.split(f" in {source}: ", 1)
            if isinstance(shown, str):
                assert shown in named, message
            said.add(reason)
        (reason,) = said
        assert any(is_right(key, found) for found in PROPOSAL.findall(reason)) or "unknown kind" in reason, message


OPTIONS = sorted({(scheme, name) for scheme, rules in SCHEMES.items() for name in rules.options})
WRONG_OPTIONS: Mapping[Any, list[str]] = {
    parse_size: [str(each) for each in SIZES],
    backend.some_size: ["0", *map(str, SIZES)],
    backend.some_time: ["0", "0s", *map(str, TIMES)],
    backend.whole_number: list(map(str, COUNTS)),
    SCHEMES["redis"].options["part"]: ["0", "1KiB", "4095", "513MiB", "1TiB", *map(str, SIZES)],
    objects.endpoint: [
        "objects",
        "ftp://x",
        "https://",
        "https://:9",
        "https://a:0",
        "https://a:99999",
        "http://::1:9",
        "https://[::1",
        "https://a b",
        "https://a/x?y",
    ],
    backend.some_port: ["0", "65536", "99999", "-1", "http", "1.5", "80x", "٤", "8 0", "0x50"],
    backend.yes_or_no: ["yes", "no", "1", "0", "True", "on", "", "tru", "null", "false "],
    backend.some_file: ["", *(f"~{name}" for name in ("", "/a", "a", "a/b", "/", "root/x", "/.x", "/a b", "x"))],
    backend.some_text: [""],
    group_number: ["", "no-such-group", "-1", "a b", "kvpact!", "0x1", "1.5", "nobody-of-this-name", "~", "*"],
}


def with_option(scheme: str, name: str, text: str) -> str:
    """The example of a scheme with this option."""
    base, _, options = SCHEMES[scheme].example.partition("?")
    kept = [each for each in options.split("&") if each and not each.startswith(f"{name}=")]
    escaped = text.replace(" ", "%20").replace("+", "%2B")
    return f"{base}?{'&'.join([*kept, f'{name}={escaped}'])}"


@pytest.mark.parametrize(("scheme", "name"), OPTIONS)
def test_each_wrong_value_of_a_tiers_option_is_refused_before_anything_is_opened(scheme: str, name: str) -> None:
    wrong = WRONG_OPTIONS[SCHEMES[scheme].options[name]]
    assert len(wrong) >= 10 or SCHEMES[scheme].options[name] is backend.some_text
    for text in wrong:
        message = refused(lambda: load_config({"tiers": [with_option(scheme, name, text)]}, {}))  # noqa: B023
        assert message.startswith(f'tiers=["{scheme}://'), message
        shown = "***" if re.search("password|key", name) else text
        assert f'{name}="{text}": ' in message or f"{name}={shown}" in message, message
        reason = message.rpartition(f'{name}="{text}": ')[2]
        proposed = [json.loads(found) for found in PROPOSAL.findall(reason) if found[0] != "'"]
        assert (
            any(takes(scheme, name, str(each)) for each in proposed)
            or "leave the option out" in reason
            or ("as in /etc/group" in reason)
        ), message


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("redis://cache?ca_file=/x", "ca_file is for TLS; write rediss instead of redis"),
        ("redis+cluster://cache?key_file=/x", "key_file is for TLS; write rediss instead of redis"),
        ("redis+sentinel://a/b?cert_file=/x", "cert_file is for TLS; write rediss instead of redis"),
        ("s3://b?endpoint=http://a:1", 'its endpoint is not encrypted; use https, or add "allow_http=true"'),
        ("gs://b?endpoint=http://a&allow_http=true&ca_file=/x", "ca_file is for TLS; write https in its endpoint"),
        ("s3://b?ca_file=~/ca.pem", "the whole path of a file is needed"),
        ("s3://me:hidden@b", "a s3 tier takes its credentials from the environment; leave them out of the URL"),
        ("s3://b?endpoint=https://me:hidden@c", 'it is no address such as "https://objects.example:9000"'),
        ("mooncake://m/a*b", "the path begins names: use letters, digits, _, - and / between them"),
    ],
)
def test_what_does_not_fit_together_in_a_tiers_url_is_refused_when_it_is_read(url: str, right: str) -> None:
    message = refused(lambda: load_config({"tiers": [url]}, {}))
    assert right in message
    assert "hidden" not in message


def test_what_fits_together_in_a_tiers_url_is_taken() -> None:
    for url in (
        "rediss://cache?ca_file=/x", "redis+sentinel://a/b?ca_file=/x&sentinel_tls=true", "redis://cache?part=512MiB",
        "s3://b?endpoint=https://a:1/x&ca_file=/x", "s3://b?endpoint=http://[::1]:9&allow_http=true",
        "mooncake://m", "mooncake://m/", "mooncake://m/a/b-c_d", "mooncake://m/a/",
    ):  # fmt: skip
        load_config({"tiers": [url]}, {})


def takes(scheme: str, name: str, text: str) -> bool:
    with_tls = re.sub(r"^redis(?!s)", "rediss", scheme) if name in ("ca_file", "cert_file", "key_file") else scheme
    try:
        parse_tier_url(with_option(with_tls, name, text))
    except ValueError:
        return False
    return True


def test_one_store_is_one_store_however_it_is_written() -> None:
    for first, second in (
        ("redis://localhost:6379/0", "redis://localhost/0"),
        ("redis://cache", "redis://CACHE:6379/0"),
        ("redis+cluster://a,b", "redis+cluster://b:6379,a:6379/0"),
        ("mooncake://m", "mooncake://m:50051"),
    ):
        assert "two tiers share" in refused(lambda: load_config({"tiers": [first, second]}, {}))  # noqa: B023
    load_config({"tiers": ["redis://localhost/0", "redis://localhost/1", "redis://localhost:6380/0"]}, {})


def test_a_home_folder_is_filled_in_wherever_a_path_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "k.toml").write_bytes(b'\xef\xbb\xbfstats_file = "~/stats.json"\n')
    config = load_config({"record_key_file": "~/key"}, {"KVPACT_CONFIG": "~/k.toml"})
    assert (config.record_key_file, config.stats_file) == (tmp_path / "key", tmp_path / "stats.json")


def test_a_file_of_another_kind_is_said_to_be_one(tmp_path: Path) -> None:
    yaml, table = tmp_path / "vllm.yaml", tmp_path / "kvpact.toml"
    yaml.write_text("port: 8000\n")
    said = refused(lambda: load_config(None, {}, yaml))
    assert said.endswith(f"; pass vLLM's own file behind --: kvpact serve MODEL -- --config {yaml}")
    assert shlex.split(said.rpartition(": ")[2])[-2:] == ["--config", str(yaml)]
    table.write_text('[kvpact]\nmemory = "1GiB"\n')
    assert refused(lambda: load_config(None, {}, table)) == (
        f"[kvpact] in {table} is a table; keys belong at the top level: remove the line [kvpact]"
    )


@pytest.mark.parametrize(
    ("given", "shown"), [("8GB", "8GB"), ("1.5GiB", "1536MiB"), ("4096", "4KiB"), ("1000", "1KB"), ("7", 7)]
)
def test_a_size_is_printed_as_it_was_written(given: str, shown: object) -> None:
    config = load_config({"memory": given}, {})
    assert config.connector_extra_config() == {"memory": shown}
    assert config.described() == f"memory={json.dumps(shown)}"
