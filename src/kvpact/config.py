"""The one configuration model: what a user may set, where it may come from, and what each value means.

Owns the keys and the order of the three sources: the engine's `kv_connector_extra_config` beats the environment, which
beats the TOML file. Never touches the file system beyond that file, and never shows a credential.
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

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from kvpact.errors import ConfigError, reason_of
from kvpact.tiers.backends import MEMORY, SCHEMES
from kvpact.tiers.urls import TierURL, nearest, parse_tier_url, redact
from kvpact.units import POWERS, parse_duration, parse_size

ENVIRONMENT_PREFIX: Final = "KVPACT_"
CONFIG_FILE_VARIABLE: Final = "KVPACT_CONFIG"

_OF_A_SERVICE: Final = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""How the variables end that Kubernetes sets for each service, whose name may begin like a key of ours."""

REPLACED_KEYS: Final = {
    "sync_load_limit": (
        '"sync_load_budget": the bytes on each rank that one scheduler step may wait for, by default "256MiB"; 0 still '
        "makes every load asynchronous"
    ),
}
"""Keys of earlier versions, and what to set instead."""

NO_TIERS: Final = 'tiers, and "match_at": "step", which asks them, belong to kvpact\'s own cache; leave them out'
"""What a user with another author's cache is told."""


CANNOT_BE_USED: Final = (
    '"require_tiers": true, and {} cannot be used: {}; mend that, or leave "require_tiers" out, and the engine serves '
    "without the tier until it can be used"
)
"""The refusal of a tier and the reason."""


def _parse_tier_urls(value: object) -> tuple[TierURL, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f'a list of tier URLs is needed, such as ["{SCHEMES["disk"].example}"]')
    tiers = tuple(parse_tier_url(url) for url in value)
    places = [tier.place for tier in tiers]
    for place, tier in zip(places, tiers, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"two tiers share {tier.path or place[1]}; each needs a place of its own")
    names = [MEMORY, *(tier.options["name"] for tier in tiers if "name" in tier.options)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f'name="{name}" is another tier\'s; each needs a name of its own')
    return tiers


def _exact_size(num_bytes: int) -> str | int:
    """A size by the smallest number that loses no byte, of 1024-based and 1000-based units."""
    units = [(base**power, f"{letter}{end}") for base, end in ((1024, "iB"), (1000, "B")) for power, letter in POWERS]
    exact = [(num_bytes // size, unit) for size, unit in units if num_bytes and num_bytes % size == 0]
    number, unit = min(exact, key=itemgetter(0), default=(num_bytes, ""))
    return f"{number}{unit}" if unit else number


def _parse_path(value: object) -> Path:
    """A path from the root or the working folder, with "~" for a home folder."""
    with suppress(RuntimeError):  # nobody here has that name
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


Size: TypeAlias = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_exact_size)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(parse_duration)]
FilePath: TypeAlias = Annotated[Path, BeforeValidator(_parse_path)]
Count: TypeAlias = Annotated[int, BeforeValidator(_refuse_bool)]
TierURLs: TypeAlias = Annotated[
    tuple[TierURL, ...],
    BeforeValidator(_parse_tier_urls),
    PlainSerializer(lambda tiers: [tier.url for tier in tiers]),
]


class KvpactConfig(BaseModel):
    """Everything a user may set, checked. Build it with `load_config`; sizes are bytes, times seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    memory: Size = Field(default=4 * 1024**3, gt=0)
    """Bytes of the memory tier: the arena that every load passes through."""
    cache: Annotated[str, AfterValidator(_check_factory)] | None = Field(
        default=None, examples=["my_package.my_cache:MyCache"]
    )
    """Another author's cache in the place of kvpact's own: "module:factory", see `kvpact.contract.CacheSpec`."""
    tiers: TierURLs = Field(default=(), examples=[[SCHEMES["disk"].example]])
    """Where blocks outlive memory, fastest first."""
    prepare_deadline: Seconds = 2.0
    """How long prepare may answer "ask again later" while tiers are asked and read; 0 serves from memory only."""
    plan_lifetime: Seconds = Field(default=30.0, gt=0)
    """A plan that was neither renewed nor committed for this long is aborted, unless the engine says why sooner."""
    load_deadline: Seconds = Field(default=30.0, gt=0)
    """A committed load is reported, arrived or lost, within this time."""
    write_queue: Size = Field(default=1024**3, gt=0)
    """Bytes that may wait to be written to the tiers; blocks that do not fit are dropped, the engine never waits."""
    shutdown_timeout: Seconds = 10.0
    """How long a shutdown may wait for the tiers."""
    sync_load_budget: Size = 256 * 1024**2
    """Bytes on each rank that a step may wait for; a load that no longer fits is asynchronous. 0: every load is."""
    min_match_blocks: Count = Field(default=1, ge=1)
    """A shorter match is not promised."""
    save: Literal["eager", "lazy", "off"] = "eager"
    """Whether computed blocks are stored as they appear, when the engine is about to evict them, or not at all."""
    admit: Literal["always", "second-use"] = "always"
    """Whether tiers get every saved block, or those that were saved or loaded a second time."""
    match_at: Literal["schedule", "step"] = "schedule"
    """When shared tiers are asked: before a request is scheduled, or by the workers when its step begins."""
    step_deadline: Seconds = Field(default=0.1, gt=0)
    """With `match_at` "step", how long a step may wait for shared tiers; every request in it waits."""
    recompute_if_faster: bool = True
    """Whether a match is not loaded if the engine is expected to compute it sooner than a tier would deliver it."""
    require_tiers: bool = False
    """Whether an engine with a tier that cannot be used at the start does not start, instead of using it later."""
    record_key_file: FilePath | None = Field(default=None, examples=["/run/secrets/records"])
    """A file with 16 secret bytes or more: records in shared tiers are sealed with it, and others are not served."""
    model_id: str | None = Field(default=None, min_length=1, examples=["llama-3@1"])
    """Identity of the base weights, for weights that their files do not identify: equal only where the weights are."""
    weights_version: str | None = Field(default=None, min_length=1, examples=["step-1200"])
    """A word for the weights that the engine starts with, beside their identity; after a reset it must be said anew."""
    share_drawn_epochs: bool = False
    """Whether shared tiers are written after a reset without a word, though no other engine can use those blocks."""
    io_threads: Count = Field(default=2, ge=1, le=64)
    """Host threads that read and write the tiers."""
    stats_file: FilePath | None = Field(default=None, examples=["/run/kvpact/stats.json"])
    """A JSON file that the idle engine keeps up to date with all counts; for programs beside it."""
    gpu: Literal["auto", "off"] = "auto"
    """Whether an engine with KV memory on a GPU starts, if the copies there pass a trial; later they are checked."""
    kv_layout: Literal["auto", "engine", "blocks"] = "auto"
    """How vLLM is to lay out KV memory: as it likes, or with all layers of a block side by side; "auto" decides."""
    huge_pages: Literal["auto", "on", "off"] = "auto"
    """Whether the arena takes its memory in huge pages where the kernel has them; "auto": not for copies of a GPU."""
    require: Literal["none", "all"] = "none"
    """With "all" an engine that was started without kvpact's worker and scheduler class does not start."""
    layerwise: bool = True
    """Load layer by layer during the forward pass, where the engine allows it."""

    def secret_keys(self) -> frozenset[str]:
        """The keys whose values hold a password, or another secret, that no command line and no log may show."""
        return frozenset({"tiers"}) if any(tier.holds_secret for tier in self.tiers) else frozenset()

    def connector_extra_config(self, *, without: Collection[str] = ()) -> dict[str, object]:
        """What was set, as JSON values that `load_config` reads back to the same; holds URLs in full."""
        return self.model_dump(mode="json", exclude_unset=True, exclude=set(without))

    def described(self) -> str:
        """What was set, for a log: no value holds a credential."""
        values = dict(sorted(self.connector_extra_config().items()))
        return ", ".join(f"{key}={_shown(value)}" for key, value in values.items()) or "nothing"

    def kv_transfer_config(self, *, without: Collection[str] = ()) -> dict[str, object]:
        """The value of vLLM's `--kv-transfer-config`, `without` keys that the engine is to read elsewhere.

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
    """The class or function of "module:name" that makes a cache, imported. Raises ConfigError if there is none."""
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
    """The setting's name in an error message."""
    variable: str = ""
    """What the environment must hold for another process to find the same value there."""


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
        environ: the process environment; `KVPACT_MEMORY` sets `memory`, and so on. `KVPACT_TIERS` takes URLs apart at
            spaces.
        toml_path: a TOML file with the same keys; without it the file that `KVPACT_CONFIG` names, if any.
        extra_source: what an error calls `extra_config`.

    Raises:
        ConfigError: an unknown key, a value that cannot be right, a file that cannot be read. Names the source.
    """
    return load_with_variables(extra_config, environ, toml_path, extra_source=extra_source)[0]


def load_with_variables(
    extra_config: Mapping[str, object] | None,
    environ: Mapping[str, str],
    toml_path: Path | None = None,
    *,
    extra_source: str = "kv_connector_extra_config",
) -> tuple[KvpactConfig, dict[str, str]]:
    """`load_config`, and for each key that was set the variable from which another process would get the same value.

    That is "KVPACT_MEMORY", or "KVPACT_CONFIG=" and the file's path; "" for a value of `extra_config`.
    """
    if toml_path is None and environ.get(CONFIG_FILE_VARIABLE):
        toml_path = Path(environ[CONFIG_FILE_VARIABLE])
    settings = _toml_settings(toml_path) if toml_path is not None else {}
    settings |= _environment_settings(environ)
    settings |= {key: _Setting(value, extra_source) for key, value in (extra_config or {}).items()}
    for key in settings.keys() & REPLACED_KEYS.keys():
        raise ConfigError(f"{key} in {settings[key].source} is gone; set {REPLACED_KEYS[key]}")
    variables = {key: setting.variable for key, setting in settings.items()}
    try:
        return KvpactConfig.model_validate({key: setting.value for key, setting in settings.items()}), variables
    except ValidationError as errors:
        first = errors.errors()[0]
        key = str(first["loc"][0])
        setting = settings[key]
        if first["type"] == "extra_forbidden" and isinstance(setting.value, Mapping):
            message = f"[{key}] in {setting.source} is a table, and keys stand at the top level: leave [{key}] out"
        elif first["type"] == "extra_forbidden":
            message = f'unknown key "{key}" in {setting.source}{nearest(key, KvpactConfig.model_fields)}'
        else:
            reason = first["msg"].removeprefix("Value error, ")
            if first["type"] != "value_error":
                reason += f", such as {_example(key)}"
            message = f"{key}={_shown(setting.value)} in {setting.source}: {reason}"
        raise ConfigError(message) from None


def _example(key: str) -> str:
    """A value that is right for a key, as it is written in JSON: its example, or its default."""
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
        hint = f"; a file of vLLM's stands behind --: kvpact serve MODEL -- --config {path}" if theirs else ""
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
        if key in KvpactConfig.model_fields or key in REPLACED_KEYS:
            value: object = text.split() if key == "tiers" else text
            settings[key] = _Setting(value, f"the environment ({name})", name)
        elif near := difflib.get_close_matches(key, KvpactConfig.model_fields, n=1, cutoff=0.7):
            # Others put names there too, so only a likely slip is an error.
            known = ENVIRONMENT_PREFIX + near[0].upper()
            raise ConfigError(f"unknown key {name} in the environment; did you mean {known}?")
    return settings


def _shown(value: object) -> str:
    """A value as the user wrote it, without its credentials."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, TierURL | Path):
        value = str(value)
    return f'"{redact(value)}"' if isinstance(value, str) else repr(value)
