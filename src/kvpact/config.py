"""Configuration model: the keys that a user may set, their sources, and the meaning of each value.

Owns the keys and the order of the three sources: the engine's `kv_connector_extra_config` beats the environment, which
beats the TOML file. Never touches the file system beyond that file, and never prints a credential.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
)

from kvpact.errors import ConfigError, reason_of
from kvpact.identity.tenants import EXAMPLE, TenantSettings, parse_tenants
from kvpact.tiers.backends import SCHEMES, SOURCES
from kvpact.tiers.urls import TierURL, nearest, parse_tier_url, redact
from kvpact.units import POWERS, parse_duration, parse_size

ENVIRONMENT_PREFIX: Final = "KVPACT_"
CONFIG_FILE_VARIABLE: Final = "KVPACT_CONFIG"

_OF_A_SERVICE: Final = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""Ends of the variables that Kubernetes sets for each service, whose name may begin like one of kvpact's keys."""

_TIERS_FILE: Final = f"{ENVIRONMENT_PREFIX}TIERS_FILE"
"""Variable with a file that holds the value of `KVPACT_TIERS`, the one variable with secrets."""

REPLACED_KEYS: Final = {
    "sync_load_limit": (
        '"sync_load_budget": the bytes on each rank that one scheduler step may wait for, by default "256MiB"; 0 still '
        "makes every load asynchronous"
    ),
}
"""Keys of earlier versions, and the key to set instead."""

NO_TIERS: Final = 'tiers and "match_at": "step" need kvpact\'s own cache; leave them out'
"""Refusal of these keys beside another author's cache."""


CANNOT_BE_USED: Final = (
    '"require_tiers": true, and {} cannot be used: {}; repair it, or leave "require_tiers" out to serve without the '
    "tier until it can be used"
)
"""Refusal of a tier (its URL) and the reason."""


def _parse_tier_urls(value: object) -> tuple[TierURL, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f'a list of tier URLs is needed, such as ["{SCHEMES["disk"].example}"]')
    tiers = tuple(parse_tier_url(url) for url in value)
    places = [tier.place for tier in tiers]
    for place, tier in zip(places, tiers, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"two tiers share {tier.path or place[1]}; each needs a place of its own")
    names = [*SOURCES, *(tier.options["name"] for tier in tiers if "name" in tier.options)]
    for name in names:
        if names.count(name) > 1:
            taken = "a source of its own" if name in SOURCES else "taken by another tier"
            raise ValueError(f'name="{name}" is {taken}; give each tier a name of its own')
    return tiers


def _exact_size(num_bytes: int) -> str | int:
    """A size as the smallest number that loses no byte, in 1024-based and 1000-based units."""
    units = [(base**power, f"{letter}{end}") for base, end in ((1024, "iB"), (1000, "B")) for power, letter in POWERS]
    exact = [(num_bytes // size, unit) for size, unit in units if num_bytes and num_bytes % size == 0]
    number, unit = min(exact, key=itemgetter(0), default=(num_bytes, ""))
    return f"{number}{unit}" if unit else number


def _parse_path(value: object) -> Path:
    """Path from the root or the working folder, with "~" for a home folder. Raises ValueError."""
    with suppress(RuntimeError):  # no user has that name
        if isinstance(value, str | Path) and str(value):
            return Path(value).expanduser()
    raise ValueError('the path of a file is needed, such as "/run/kvpact/file"')


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a whole number is needed, such as 2")
    return value


def _check_factory(name: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise ValueError('a module and a class or function in it are needed, such as "my_package.my_cache:MyCache"')
    return name


def _parse_hints(value: object, info: ValidationInfo) -> object:
    """Clients whose hints count: "off", "clients", or the names of configured tenants. Raises ValueError."""
    if isinstance(value, str) and value in ("off", "clients"):
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError('"off", "clients" or a list with names of "tenants" is needed')
    tenants = info.data.get("tenants", {})
    for name in value:
        if name not in tenants:
            known = f"known: {', '.join(tenants)}" if tenants else '"tenants" has none'
            raise ValueError(f'"{name}" is no tenant, {known}; name tenants, or write "clients" for all')
    return tuple(value)


Size: TypeAlias = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_exact_size)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(parse_duration)]
FilePath: TypeAlias = Annotated[Path, BeforeValidator(_parse_path)]
Count: TypeAlias = Annotated[int, BeforeValidator(_refuse_bool)]
TierURLs: TypeAlias = Annotated[
    tuple[TierURL, ...],
    BeforeValidator(_parse_tier_urls),
    PlainSerializer(lambda tiers: [tier.url for tier in tiers]),
]
TenantsByName: TypeAlias = Annotated[
    dict[str, TenantSettings],
    BeforeValidator(parse_tenants),
    PlainSerializer(lambda tenants: {name: settings.described() for name, settings in tenants.items()}),
]


class KvpactConfig(BaseModel):
    """All settings, checked. Build it with `load_config`; sizes are bytes, times seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    memory: Size = Field(default=4 * 1024**3, gt=0)
    """Bytes of the memory tier: the arena through which every load passes."""
    cache: Annotated[str, AfterValidator(_check_factory)] | None = Field(
        default=None, examples=["my_package.my_cache:MyCache"]
    )
    """Another author's cache instead of kvpact's own: "module:factory", see `kvpact.contract.CacheSpec`."""
    tiers: TierURLs = Field(default=(), examples=[[SCHEMES["disk"].example]])
    """URLs of the tiers below memory, fastest first."""
    prepare_deadline: Seconds = 2.0
    """Most seconds that prepare answers "ask again later" while tiers answer; 0 serves from memory only."""
    plan_lifetime: Seconds = Field(default=30.0, gt=0)
    """Seconds until a plan that was neither renewed nor committed is aborted, unless the engine ends it."""
    load_deadline: Seconds = Field(default=30.0, gt=0)
    """Most seconds until a committed load is reported, as arrived or lost."""
    write_queue: Size = Field(default=1024**3, gt=0)
    """Most bytes that wait to be written to the tiers; blocks that do not fit are dropped, the engine never waits."""
    shutdown_timeout: Seconds = 10.0
    """Most seconds that a shutdown waits for the tiers."""
    sync_load_budget: Size = 256 * 1024**2
    """Most bytes per rank for which one step waits; loads that do not fit are asynchronous. 0: every load is."""
    min_match_blocks: Count = Field(default=1, ge=1)
    """Least number of blocks of a match; a shorter one is not promised."""
    pool: Literal["host", "engine"] = "host"
    """Load also from the memory of this user's other engines on this host, as they from this one's; or from none."""
    save: Literal["eager", "lazy", "off"] = "eager"
    """Time of saving computed blocks: at once, when the engine is about to evict them, or never."""
    admit: Literal["always", "second-use"] = "always"
    """Blocks written to tiers: every saved block, or those saved or loaded a second time."""
    tenants: TenantsByName = Field(default={}, examples=[json.loads(EXAMPLE)])
    """Clients that have a share of memory, by name, each with the file of its requests' salt."""
    hints: Annotated[Literal["off", "clients"] | tuple[str, ...], BeforeValidator(_parse_hints)] = "off"
    """Act on hints in `kv_transfer_params` of any client's requests, of those of these tenants, or on none."""
    match_at: Literal["schedule", "step"] = "schedule"
    """Time of lookups in shared tiers: before a request is scheduled, or by the workers when its step begins."""
    step_deadline: Seconds = Field(default=0.1, gt=0)
    """With `match_at` "step": seconds for which a step may wait for shared tiers, with every request in it."""
    recompute_if_faster: bool = True
    """Recompute a match that the engine is expected to compute sooner than a tier would deliver it."""
    require_tiers: bool = False
    """Refuse to start while a tier cannot be used, instead of starting without it and using it later."""
    record_key_file: FilePath | None = Field(default=None, examples=["/run/secrets/records"])
    """File with 16 secret bytes or more: records in shared tiers are sealed with them, and others are not served."""
    model_id: str | None = Field(default=None, min_length=1, examples=["llama-3@1"])
    """Identity of base weights that their files do not identify: equal only for engines with equal weights."""
    weights_version: str | None = Field(default=None, min_length=1, examples=["step-1200"])
    """Version of the weights at the start, beside their identity; after a reset it must be set anew."""
    share_drawn_epochs: bool = False
    """Write to shared tiers after a reset without a weights version, although no other engine can use those blocks."""
    io_threads: Count = Field(default=2, ge=1, le=64)
    """Host threads that read and write the tiers."""
    stats_file: FilePath | None = Field(default=None, examples=["/run/kvpact/stats.json"])
    """JSON file with the engine's status, as `kvpact status --json` prints it; rewritten while the engine is idle."""
    timeline: FilePath | None = Field(default=None, examples=["/run/kvpact/timeline"])
    """Folder for a line about each call that loads blocks for a request; see `kvpact.events.timeline`."""
    gpu: Literal["auto", "off"] = "auto"
    """Start with KV memory on a GPU, if its copies pass a test ("auto"), or refuse to ("off")."""
    kv_layout: Literal["auto", "engine", "blocks"] = "auto"
    """Layout of KV memory: vLLM's choice, or all layers of a block side by side; "auto" decides."""
    huge_pages: Literal["auto", "on", "off"] = "auto"
    """Take the arena's memory in huge pages where the kernel has them; "auto": not for copies of a GPU."""
    require: Literal["none", "all"] = "none"
    """With "all", refuse to start without kvpact's worker and scheduler classes."""
    layerwise: bool = True
    """Load layer by layer during the forward pass, where the engine allows it."""

    def secret_keys(self) -> frozenset[str]:
        """Keys whose values hold a password or another secret, for no command line and no log."""
        return frozenset({"tiers"}) if any(tier.holds_secret for tier in self.tiers) else frozenset()

    def connector_extra_config(self, *, without: Collection[str] = ()) -> dict[str, object]:
        """Keys that were set, as JSON values from which `load_config` makes the same; with URLs in full."""
        return self.model_dump(mode="json", exclude_unset=True, exclude=set(without))

    def described(self) -> str:
        """Keys that were set, for a log: no value holds a credential."""
        values = dict(sorted(self.connector_extra_config().items()))
        return ", ".join(f"{key}={_shown(value)}" for key, value in values.items()) or "all defaults"

    def kv_transfer_config(self, *, without: Collection[str] = ()) -> dict[str, object]:
        """Value of vLLM's `--kv-transfer-config`, `without` keys that the engine reads from another source.

        A failed load is recomputed: vLLM's own default fails the request.
        """
        return {
            "kv_connector": "PactConnector",
            "kv_connector_module_path": "kvpact.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.connector_extra_config(without=without),
        }

    def to_connector_json(self, *, without: Collection[str] = ()) -> str:
        """`kv_transfer_config` as one line of JSON."""
        return json.dumps(self.kv_transfer_config(without=without))


def check_cache(config: KvpactConfig) -> None:
    """Raise ConfigError for settings that exclude another author's cache."""
    if config.cache is not None and (config.tiers or config.match_at == "step"):
        raise ConfigError(f'"cache": "{config.cache}" excludes other settings: {NO_TIERS}')


def find_factory(name: str) -> Callable[..., object]:
    """Import the class or function "module:name" that makes a cache. Raises ConfigError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except Exception as error:  # another author's module
        raise ConfigError(
            f'"cache": "{name}" cannot be loaded: {reason_of(error)}; name a module that the engine\'s Python can '
            "import, and a class or function in it"
        ) from error
    if not callable(factory):
        raise ConfigError(f'"cache": "{name}" is a {type(factory).__name__}; a class or function is needed')
    made: Callable[..., object] = factory
    return made


@dataclass(frozen=True, slots=True)
class _Setting:
    value: object
    source: str
    """Name of the setting's source in an error message."""
    variable: str = ""
    """Environment variable that gives another process the same value; "" if there is none."""


def load_config(
    extra_config: Mapping[str, object] | None,
    environ: Mapping[str, str],
    toml_path: Path | None = None,
    *,
    extra_source: str = "kv_connector_extra_config",
) -> KvpactConfig:
    """Merge the three sources, strongest first, and check the result.

    Args:
        extra_config: the engine's `kv_connector_extra_config`.
        environ: the process environment; `KVPACT_MEMORY` sets `memory`, and so on. `KVPACT_TIERS` holds URLs separated
            by spaces; `KVPACT_TIERS_FILE` names a file with them.
        toml_path: a TOML file with the same keys; without it the file that `KVPACT_CONFIG` names, if any.
        extra_source: name of `extra_config` in errors.

    Raises:
        ConfigError: an unknown key, a wrong value, an unreadable file. Names the source.
    """
    return load_with_variables(extra_config, environ, toml_path, extra_source=extra_source)[0]


def load_with_variables(
    extra_config: Mapping[str, object] | None,
    environ: Mapping[str, str],
    toml_path: Path | None = None,
    *,
    extra_source: str = "kv_connector_extra_config",
) -> tuple[KvpactConfig, dict[str, str]]:
    """`load_config`, and for each key that was set the variable from which another process gets the same value.

    That is "KVPACT_MEMORY", or "KVPACT_CONFIG=" and the file's path; "" for a value of `extra_config`.
    """
    if toml_path is None and environ.get(CONFIG_FILE_VARIABLE):
        toml_path = Path(environ[CONFIG_FILE_VARIABLE])
    settings = _toml_settings(toml_path) if toml_path is not None else {}
    settings |= _environment_settings(environ)
    settings |= {key: _Setting(value, extra_source) for key, value in (extra_config or {}).items()}
    for key in settings.keys() & REPLACED_KEYS.keys():
        raise ConfigError(f"{key} in {settings[key].source} was removed; set {REPLACED_KEYS[key]}")
    variables = {key: setting.variable for key, setting in settings.items()}
    try:
        return KvpactConfig.model_validate({key: setting.value for key, setting in settings.items()}), variables
    except ValidationError as errors:
        first = errors.errors()[0]
        key = str(first["loc"][0])
        setting = settings[key]
        if first["type"] == "extra_forbidden" and isinstance(setting.value, Mapping):
            message = f"[{key}] in {setting.source} is a table; keys belong at the top level: remove the line [{key}]"
        elif first["type"] == "extra_forbidden":
            message = f'unknown key "{key}" in {setting.source}{nearest(key, KvpactConfig.model_fields)}'
        else:
            reason = first["msg"].removeprefix("Value error, ")
            if first["type"] != "value_error":
                reason += f", such as {_example(key)}"
            message = f"{key}={_shown(setting.value)} in {setting.source}: {reason}"
        raise ConfigError(message) from None


def _example(key: str) -> str:
    """Right value for a key, in JSON: its example, or its default."""
    examples = KvpactConfig.model_fields[key].examples
    return json.dumps(examples[0] if examples else KvpactConfig().model_dump(mode="json")[key])


def _toml_settings(path: Path) -> dict[str, _Setting]:
    import tomllib

    try:
        path = _parse_path(path)
    except ValueError as error:
        raise ConfigError(f"the configuration file {path}: {error}") from None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        theirs = path.suffix in (".yaml", ".yml")
        hint = f"; pass vLLM's own file behind --: kvpact serve MODEL -- --config {path}" if theirs else ""
        raise ConfigError(f"the configuration file {path} is not TOML: {error}{hint}") from None
    variable = f"{CONFIG_FILE_VARIABLE}={path.absolute()}"
    return {key: _Setting(value, str(path), variable) for key, value in table.items()}


def _environment_settings(environ: Mapping[str, str]) -> dict[str, _Setting]:
    settings = {}
    for name, text in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name == CONFIG_FILE_VARIABLE or _OF_A_SERVICE.search(name):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not text:
            continue  # compose files and shells write "not set" as the empty string
        if name == _TIERS_FILE:
            if environ.get(f"{ENVIRONMENT_PREFIX}TIERS"):
                raise ConfigError(f"{ENVIRONMENT_PREFIX}TIERS and {name} are both set in the environment; unset one")
            settings["tiers"] = _Setting(_words_of(text, name), f"{text} ({name})", name)
        elif key in KvpactConfig.model_fields or key in REPLACED_KEYS:
            value: object = text.split() if key == "tiers" else text
            settings[key] = _Setting(value, f"the environment ({name})", name)
        elif near := difflib.get_close_matches(key, KvpactConfig.model_fields, n=1, cutoff=0.7):
            # Other programs set variables with this prefix too, so only a likely misspelling is an error.
            known = ENVIRONMENT_PREFIX + near[0].upper()
            raise ConfigError(f"unknown key {name} in the environment; did you mean {known}?")
    return settings


def _words_of(path: str, name: str) -> list[str]:
    """Words of the file that a variable names, separated by spaces or lines. Raises ConfigError."""
    try:
        return _parse_path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(f"{name}={path}: the file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{name}={path}: {error}") from None


def _shown(value: object) -> str:
    """A value as the user wrote it, without its credentials."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{")):
        return "{...}"
    if isinstance(value, TierURL | Path):
        value = str(value)
    return f'"{redact(value)}"' if isinstance(value, str) else repr(value)
