"""What a user may set, from where, and what he is told when it is wrong."""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvpact.config import REPLACED_KEYS, KvpactConfig, load_config
from kvpact.errors import ConfigError
from kvpact.tiers.urls import TierURL, parse_tier_url, redact
from kvpact.units import format_size, parse_duration, parse_size
from user_settings import ALONE, settings_of_a_user

GIB = 1024**3
DISK = "disk:///var/cache/kvpact?capacity=200GiB"
BINARY_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": GIB, "TiB": 1024**4, "PiB": 1024**5}
DECIMAL_UNITS = {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "PB": 1000**5}
WITHOUT_DEFAULT = {"cache", "model_id", "weights_version", "stats_file", "timeline", "record_key_file", "tenants"}
SECONDS = {"us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": 1, "m": 60, "h": 3600, "": 1}


def message_of(
    extra_config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(extra_config, environ or {}, toml_path)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Sizes and times


@given(st.integers(0, 2**60), st.sampled_from(sorted((BINARY_UNITS | DECIMAL_UNITS).items())), st.booleans())
def test_a_size_is_its_number_times_its_unit(number: int, unit: tuple[str, int], spaced: bool) -> None:
    name, num_bytes = unit
    for text in (name, name.lower(), name.upper()):
        assert parse_size(f"{number}{' ' if spaced else ''}{text}") == number * num_bytes


@given(st.integers(0, 2**62))
def test_a_size_in_bytes_is_itself_as_number_and_as_text(num_bytes: int) -> None:
    assert parse_size(num_bytes) == parse_size(str(num_bytes)) == parse_size(f" {num_bytes} ") == num_bytes


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(BINARY_UNITS.items())))
def test_a_fraction_of_a_unit_is_exact_to_the_byte(number: Decimal, unit: tuple[str, int]) -> None:
    name, num_bytes = unit
    assert parse_size(f"{number}{name}") == int(Fraction(number) * num_bytes)


@given(st.integers(1, 2**62))
def test_a_size_survives_the_way_through_the_engines_json(num_bytes: int) -> None:
    config = KvpactConfig.model_validate({"memory": num_bytes})
    again = load_config(json.loads(config.to_connector_json())["kv_connector_extra_config"], {})
    assert again == config
    assert again.memory == num_bytes


@given(st.integers(0, 2**60))
def test_a_shown_size_is_within_a_thousandth(num_bytes: int) -> None:
    assert math.isclose(parse_size(format_size(num_bytes)), num_bytes, rel_tol=0.001, abs_tol=1)


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(SECONDS.items())))
def test_a_time_is_its_number_times_its_unit(number: Decimal, unit: tuple[str, Fraction | int]) -> None:
    name, seconds = unit
    assert parse_duration(f"{number}{name}") == float(Fraction(number) * seconds)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    "value", ["", "GiB", "-1GiB", "4 4GiB", "1e3", "4GiBs", "٤GiB", None, True, -1, 1.5, math.nan, []]
)
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match='a size such as "4GiB"'):
        parse_size(value)


@pytest.mark.parametrize("value", ["4G", "4g", "4Gi", "4gi"])
def test_an_ambiguous_unit_is_refused_with_both_readings(value: object) -> None:
    with pytest.raises(ValueError, match=r'write "4GiB" \(1024-based\) or "4GB" \(1000-based\)'):
        parse_size(value)


@pytest.mark.parametrize("value", ["", "s", "-1s", "2w", "2 s s", None, False, -0.1, math.inf, math.nan, {}])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match='a time such as "2s"'):
        parse_duration(value)


# Sources and their strength


def test_nothing_set_is_the_documented_default() -> None:
    assert load_config(None, {}) == KvpactConfig(
        memory=4 * GIB,
        tiers=(),
        prepare_deadline=2.0,
        plan_lifetime=30.0,
        load_deadline=30.0,
        write_queue=GIB,
        shutdown_timeout=10.0,
        sync_load_budget=GIB // 4,
        min_match_blocks=1,
        save="eager",
        model_id=None,
        io_threads=2,
        huge_pages="auto",
        layerwise=True,
        stats_file=None,
    )


@pytest.fixture
def toml_file(tmp_path: Path) -> Path:
    path = tmp_path / "kvpact.toml"
    path.write_text('memory = "1GiB"\nload_deadline = 1\nio_threads = 3\n')
    return path


def test_the_engine_beats_the_environment_which_beats_the_file(toml_file: Path) -> None:
    environ = {"KVPACT_MEMORY": "2GiB", "KVPACT_LOAD_DEADLINE": "2s", "PATH": "/bin"}
    config = load_config({"memory": "3GiB"}, environ, toml_file)
    assert (config.memory, config.load_deadline, config.io_threads) == (3 * GIB, 2.0, 3)


def test_the_environment_names_the_file(toml_file: Path) -> None:
    assert load_config({}, {"KVPACT_CONFIG": str(toml_file)}).memory == GIB


def test_every_key_can_be_set_in_the_environment() -> None:
    environ = {
        "KVPACT_MEMORY": "1GiB",
        "KVPACT_TIERS": f"{DISK}  disk:///b?capacity=1GiB",
        "KVPACT_PREPARE_DEADLINE": "0",
        "KVPACT_PLAN_LIFETIME": "1m",
        "KVPACT_LOAD_DEADLINE": "50ms",
        "KVPACT_WRITE_QUEUE": "1MB",
        "KVPACT_SHUTDOWN_TIMEOUT": "0s",
        "KVPACT_SYNC_LOAD_BUDGET": "0",
        "KVPACT_MIN_MATCH_BLOCKS": "2",
        "KVPACT_POOL": "engine",
        "KVPACT_SAVE": "off",
        "KVPACT_MODEL_ID": "llama@1",
        "KVPACT_CACHE": "my_package.my_cache:MyCache",
        "KVPACT_WEIGHTS_VERSION": "step-1200",
        "KVPACT_SHARE_DRAWN_EPOCHS": "true",
        "KVPACT_REQUIRE_TIERS": "true",
        "KVPACT_IO_THREADS": "4",
        "KVPACT_LAYERWISE": "false",
        "KVPACT_GPU": "auto",
        "KVPACT_KV_LAYOUT": "blocks",
        "KVPACT_HUGE_PAGES": "on",
        "KVPACT_STATS_FILE": "/tmp/stats.json",
        "KVPACT_TIMELINE": "/tmp/timeline",
        "KVPACT_ADMIT": "second-use",
        "KVPACT_RECOMPUTE_IF_FASTER": "false",
        "KVPACT_MATCH_AT": "step",
        "KVPACT_TENANTS": '{"alice": {"salt_file": "/run/secrets/alice", "memory": "25%"}}',
        "KVPACT_HINTS": "clients",
        "KVPACT_STEP_DEADLINE": "20ms",
        "KVPACT_RECORD_KEY_FILE": "/run/secrets/records",
        "KVPACT_REQUIRE": "all",
    }
    config = load_config(None, environ)
    assert config.model_fields_set == set(KvpactConfig.model_fields)
    assert [tier.path for tier in config.tiers] == ["/var/cache/kvpact", "/b"]
    assert (config.plan_lifetime, config.load_deadline, config.layerwise) == (60.0, 0.05, False)


def test_a_variable_set_to_nothing_is_not_set() -> None:
    assert load_config(None, {"KVPACT_MODEL_ID": "", "KVPACT_MEMORY": "", "KVPACT_CONFIG": ""}) == KvpactConfig()


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        KvpactConfig().memory = 1


# What the user is told


@pytest.mark.parametrize(
    ("written", "known"),
    [("memroy", "memory"), ("tier", "tiers"), ("IO_THREADS", "io_threads"), ("layer_wise", "layerwise")],
)
def test_an_unknown_key_names_the_nearest_known_one(written: str, known: str, tmp_path: Path) -> None:
    assert message_of({written: 1}) == f'unknown key "{written}" in kv_connector_extra_config; did you mean "{known}"?'
    path = tmp_path / "kvpact.toml"
    path.write_text(f"{written} = 1\n")
    assert message_of(toml_path=path) == f'unknown key "{written}" in {path}; did you mean "{known}"?'


def test_the_key_of_earlier_versions_is_refused_in_each_source_with_what_to_set_instead(tmp_path: Path) -> None:
    path = tmp_path / "kvpact.toml"
    path.write_text('sync_load_limit = "1GiB"\n')
    for message, source in (
        (message_of({"sync_load_limit": "1GiB"}), "kv_connector_extra_config"),
        (message_of(environ={"KVPACT_SYNC_LOAD_LIMIT": "0"}), "the environment (KVPACT_SYNC_LOAD_LIMIT)"),
        (message_of(toml_path=path), str(path)),
        (message_of({"sync_load_limit": 0, "memroy": 1}), "kv_connector_extra_config"),
    ):
        assert message == (
            f'sync_load_limit in {source} was removed; set "sync_load_budget": the bytes on each rank that one '
            'scheduler step may wait for, by default "256MiB"; 0 still makes every load asynchronous'
        )


def test_a_key_like_no_other_lists_the_known_ones() -> None:
    message = message_of({"zzz": 1})
    assert all(key in message for key in KvpactConfig.model_fields)


def test_a_slip_in_the_environment_is_an_error_but_foreign_names_are_not() -> None:
    assert message_of(environ={"KVPACT_MEMROY": "1GiB"}) == (
        "unknown key KVPACT_MEMROY in the environment; did you mean KVPACT_MEMORY?"
    )
    foreign = {"KVPACT_SERVICE_HOST": "10.0.0.1", "KVPACT_PORT": "tcp://10.0.0.1:80", "KVPACT_PORT_80_TCP_PROTO": "tcp"}
    assert load_config(None, foreign) == KvpactConfig()


SERVICE = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "6379",
    "SERVICE_PORT_TCP_REDIS": "6379",
    "PORT": "tcp://10.0.0.1:6379",
    "PORT_6379_TCP": "tcp://10.0.0.1:6379",
    "PORT_6379_TCP_PROTO": "tcp",
    "PORT_6379_TCP_PORT": "6379",
    "PORT_6379_TCP_ADDR": "10.0.0.1",
    "PORT_53_UDP": "udp://10.0.0.1:53",
}
"""What Kubernetes sets in each container of a namespace with a service, after the service's name."""


@pytest.mark.parametrize("service", ["", *KvpactConfig.model_fields, "config", "memry", "sync_load_limit", "store"])
def test_h102_a_kubernetes_service_of_any_name_is_no_setting(service: str) -> None:
    """Also one named like a key, like a slip in a key, or like the variable that names the file."""
    prefix = "_".join(filter(None, ["KVPACT", service.upper()]))
    assert load_config(None, {f"{prefix}_{end}": value for end, value in SERVICE.items()}) == KvpactConfig()


def test_h102_no_key_ends_like_a_services_variable() -> None:
    """So no setting is taken for one."""
    ends = ("_port", "_host", "_tcp", "_udp", "_addr", "_proto")
    assert not [key for key in (*KvpactConfig.model_fields, *REPLACED_KEYS) if key.endswith(ends)]


@pytest.mark.parametrize("name", ["KVPACT_MEMORYS", "KVPACT_TIERS_", "KVPACT_MEMROY", "KVPACT_GPU_"])
def test_a_slip_that_is_no_services_variable_is_still_named(name: str) -> None:
    assert message_of(environ={name: "1GiB"}).startswith(f"unknown key {name} in the environment; did you mean")


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("memory", "4 bananas", 'such as "4GiB"'),
        ("memory", 0, "greater than 0"),
        ("memory", "4G", 'write "4GiB"'),
        ("plan_lifetime", "0s", "greater than 0"),
        ("load_deadline", "soon", 'such as "2s"'),
        ("prepare_deadline", -1, 'such as "2s"'),
        ("save", "later", "'eager', 'lazy' or 'off'"),
        ("io_threads", 0, "greater than or equal to 1"),
        ("io_threads", True, "whole number"),
        ("min_match_blocks", 1.5, "integer"),
        ("layerwise", "perhaps", "boolean"),
        ("model_id", "", "at least 1 character"),
        ("tiers", DISK, "list of tier URLs"),
        ("tiers", ["/var/cache"], "a path alone is no tier; write the whole path into a URL"),
        ("tiers", ["dsik:///a?capacity=1GiB"], 'did you mean "disk"?'),
        ("tiers", ["disk://var/cache?capacity=1GiB"], "three slashes"),
        ("tiers", ["disk:cache?capacity=1GiB"], "three slashes"),
        ("tiers", ["disk:///?capacity=1GiB"], "directory of its own"),
        ("tiers", ["disk:///a"], "needs a limit"),
        ("tiers", ["disk:///a?capacity=lots"], 'capacity="lots": a size'),
        ("tiers", ["disk:///a?capacity=0"], "capacity is 0"),
        ("tiers", ["disk:///a?capcity=1GiB"], 'unknown option "capcity"; did you mean "capacity"?'),
        ("tiers", ["disk:///a?capacity=1GiB&capacity=2GiB"], "twice"),
        ("tiers", ["disk:///a?capacity"], "well-formed"),
        ("tiers", ["disk:///a#b?capacity=1GiB"], '"%23"'),
        ("tiers", [DISK, "disk:///var/cache/kvpact/?capacity=1GiB"], "two tiers share"),
        ("tiers", [5], "a tier is a URL"),
    ],
)
def test_a_bad_value_is_one_message_with_key_value_source_and_remedy(key: str, value: object, right: str) -> None:
    message = message_of({key: value})
    shown = f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')
    assert message.startswith(f"{key}={shown} in kv_connector_extra_config: ")
    assert right in message


def test_the_message_names_the_source_that_was_wrong(toml_file: Path) -> None:
    assert "in the environment (KVPACT_MEMORY)" in message_of({}, {"KVPACT_MEMORY": "much"})
    toml_file.write_text('memory = "much"')
    assert f"in {toml_file}" in message_of(toml_path=toml_file)


def test_a_missing_or_broken_file_is_one_message(tmp_path: Path) -> None:
    assert message_of(toml_path=tmp_path / "none.toml").endswith("cannot be read: No such file or directory")
    assert message_of(environ={"KVPACT_CONFIG": str(tmp_path)}).endswith("cannot be read: Is a directory")
    broken = tmp_path / "broken.toml"
    broken.write_text("memory = 4GiB\n")
    assert "is not TOML: " in message_of(toml_path=broken)
    broken.write_bytes(b"\xff\xfe")
    assert "is not TOML: " in message_of(toml_path=broken)


# Tier URLs and their secrets


def test_a_disk_tier_is_a_path_and_a_capacity() -> None:
    tier = parse_tier_url(DISK)
    assert (tier.scheme, tier.path, tier.capacity) == ("disk", "/var/cache/kvpact", 200 * GIB)


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).map(
        lambda name: f"/tier/{name}"
    ),
    st.integers(1, 2**60),
)
def test_any_path_survives_the_way_through_the_engines_json(path: str, capacity: int) -> None:
    tier = TierURL("disk", path, {"capacity": str(capacity)})
    config = load_config({"tiers": [tier.url]}, {})
    assert config.tiers == (tier,)
    assert load_config(json.loads(config.to_connector_json())["kv_connector_extra_config"], {}) == config


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"redis://:{SECRET}@host",
        f"redis://user:a/{SECRET}#?@host",
        f"redis://user:a/{SECRET}@host",
        f"s3://bucket?secret_access_key={SECRET}",
        f"redis://host?db=1&Password={SECRET}&x=2",
        f"http://u:{SECRET}@[::broken",
        f"disk://u:{SECRET}@host/a?capacity=1GiB",
        f"s3://bucket?endpoint=https://u:{SECRET}@host",
        f"s3://bucket?endpoint=https%3A%2F%2Fu%3A{SECRET}%40host&region=a",
    ],
)
def test_a_credential_is_never_shown(url: str) -> None:
    assert SECRET not in redact(url)
    url += f"{'&' if '?' in url else '?'}nonsense=1"
    assert SECRET not in message_of({"tiers": [url]})
    assert SECRET not in message_of({"tiers": url})
    assert SECRET not in message_of({}, {"KVPACT_TIERS": url})
    assert SECRET not in message_of({"memory": url})
    with pytest.raises(ValidationError) as caught:
        KvpactConfig.model_validate({"tiers": [url]})
    assert SECRET not in str(caught.value)
    tier = TierURL("s3", "/bucket", {"secret": SECRET})
    assert SECRET not in f"{tier} {tier!r} {KvpactConfig.model_construct(tiers=(tier,))!r}"
    assert SECRET in tier.url


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        (DISK, False),
        ("redis://host", False),
        ("rediss://alice@host?password_file=/run/secrets/redis", False),
        (f"redis://alice:{SECRET}@host", True),
        (f"redis://:{SECRET}@host", True),
        (f"redis+sentinel://u:{SECRET}@a,b/mymaster", True),
    ],
)
def test_a_password_in_a_tiers_url_is_a_secret_and_a_file_with_one_is_not(url: str, secret: bool) -> None:
    assert load_config({"tiers": [url]}, {}).secret_keys() == ({"tiers"} if secret else set())
    assert parse_tier_url(url).holds_secret is secret
    assert SECRET not in load_config({"tiers": [url]}, {}).described()


def test_what_tiers_of_other_packages_do_with_a_user_and_with_a_token_is_not_known() -> None:
    assert TierURL("mystore", "/", {}, host="token@host").holds_secret
    assert TierURL("mystore", "/", {"token": SECRET}, host="host").holds_secret
    assert TierURL("mystore", "/", {"endpoint": f"https://u:{SECRET}@host"}, host="host").holds_secret


# What vLLM gets


def test_the_engine_gets_what_was_set_and_recomputes_what_cannot_be_loaded() -> None:
    config = load_config({"memory": "1.5GiB", "tiers": [DISK]}, {"KVPACT_LOAD_DEADLINE": "1m"})
    assert json.loads(config.to_connector_json()) == {
        "kv_connector": "PactConnector",
        "kv_connector_module_path": "kvpact.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"memory": "1536MiB", "tiers": [DISK], "load_deadline": 60.0},
    }


def test_the_example_file_holds_every_key_with_its_default() -> None:
    example = load_config(None, {}, Path(__file__).parents[1] / "examples" / "kvpact.toml")
    assert example == KvpactConfig()
    assert example.model_fields_set == set(KvpactConfig.model_fields) - WITHOUT_DEFAULT


def test_a_users_settings_have_a_value_for_every_key_and_none_is_the_default(tmp_path: Path) -> None:
    settings = settings_of_a_user(tmp_path, "127.0.0.1:1")
    assert settings.keys() | {ALONE} == KvpactConfig.model_fields.keys()
    given, defaults = KvpactConfig(**settings), KvpactConfig()
    assert {key for key in settings if getattr(given, key) == getattr(defaults, key)} == {"save"}


def test_the_documentation_names_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", text, re.MULTILINE))
    assert set(rows) == set(KvpactConfig.model_fields)
    documented = {key: json.loads(value) for key, value in rows.items() if key not in WITHOUT_DEFAULT}
    assert load_config(documented, {}) == KvpactConfig()
