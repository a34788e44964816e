"""The one configuration model: what a user may set, where it may come from, and what each value means.

Owns the reading of sizes ("4GiB"), times ("2s") and tier URLs, and the strength of the three sources: what the engine's
`kv_connector_extra_config` says beats the environment, which beats the TOML file. Never touches the file system beyond
that file, and never shows a credential. Floor 0.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from kvpact.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "KVPACT_"
CONFIG_FILE_VARIABLE: Final = "KVPACT_CONFIG"

_BYTES_PER_UNIT: Final = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SECONDS_PER_UNIT: Final = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes of a size: an int, or text such as "4GiB" (1024-based), "500MB" (1000-based), "4096".

    Raises:
        ValueError: not a size; "4G" is refused because tools disagree on what it means.
    """
    right = 'a size such as "4GiB", "500MB" or a number of bytes is needed'
    if isinstance(value, bool):
        raise ValueError(right)
    if isinstance(value, int | float) and math.isfinite(value) and value == int(value) and value >= 0:
        return int(value)  # JSON and TOML may write 4e9
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(right)
    number, unit = match[1], match[2].lower()
    if unit and f"{unit}b" in _BYTES_PER_UNIT:
        letter = unit[0].upper()
        raise ValueError(f'write "{number}{letter}iB" (1024-based) or "{number}{letter}B" (1000-based)')
    bytes_per_unit = _BYTES_PER_UNIT.get(unit or "b")
    if bytes_per_unit is None:
        raise ValueError(right)
    return int(Fraction(number) * bytes_per_unit)


def parse_duration(value: object) -> float:
    """Seconds of a time: a number, or text such as "2s", "50ms", "1m", "0.5h".

    Raises:
        ValueError: not a finite time of 0 or more.
    """
    right = 'a time such as "2s", "50ms", "1m" or a number of seconds is needed'
    if isinstance(value, bool):
        raise ValueError(right)
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return float(value)
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    seconds_per_unit = _SECONDS_PER_UNIT.get(match[2].lower() or "s") if match else None
    if match is None or seconds_per_unit is None:
        raise ValueError(right)
    return float(Fraction(match[1]) * seconds_per_unit)


def format_size(num_bytes: int) -> str:
    """A size for a person to read, about three digits: 1536 is "1.5KiB"."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 5)
    return f"{num_bytes / 1024**power:.4g}{('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def redact(url: str) -> str:
    """The URL with user, password and the values of secret options replaced by `***`, fit for a log."""
    shown = re.sub(r"(?s)(?<=//)[^/].*@", "***@", url)  # greedy: a password may hold any character
    return re.sub(r"(?i)([?&][^=&]*(?:password|secret|token|key|credential)[^=&]*=)[^&#]*", r"\1***", shown)


@dataclass(frozen=True, slots=True)
class TierURL:
    """Where a tier below memory keeps its blocks: `disk:///var/cache/kvpact?capacity=200GiB`."""

    scheme: str
    path: str
    """Percent-decoded; absolute for `disk`."""
    options: Mapping[str, str]
    """Percent-decoded, checked against what the scheme knows."""

    @property
    def capacity(self) -> int:
        """Bytes the tier may occupy."""
        return parse_size(self.options["capacity"])

    @property
    def url(self) -> str:
        """The URL in full; it parses back to an equal value and may hold a credential."""
        options = urlencode(self.options, quote_via=quote)
        return f"{self.scheme}://{quote(self.path)}{'?' if options else ''}{options}"

    def __str__(self) -> str:
        return redact(self.url)

    def __repr__(self) -> str:
        return f"TierURL({redact(self.url)!r})"


_DISK_EXAMPLE: Final = "disk:///var/cache/kvpact?capacity=200GiB"
_SCHEMES: Final = ("disk",)
_DISK_OPTIONS: Final = ("capacity",)


def parse_tier_url(value: object) -> TierURL:
    """Read and check one tier URL.

    Raises:
        ValueError: unknown scheme or option, relative path, missing or impossible capacity.
    """
    if isinstance(value, TierURL):
        return value
    if not isinstance(value, str):
        raise ValueError(f'a tier is a URL such as "{_DISK_EXAMPLE}"')
    try:
        parts = urlsplit(value.strip())
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:  # its message would repeat parts of the URL
        raise ValueError(f'not a well-formed URL; one looks like "{_DISK_EXAMPLE}"') from None
    options = dict(pairs)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f'unknown kind of tier "{parts.scheme}"{_nearest(parts.scheme, _SCHEMES)}')
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError(f'a disk tier needs an absolute path behind three slashes, like "{_DISK_EXAMPLE}"')
    if parts.path == "/":
        raise ValueError(f'a disk tier needs a directory of its own, not "/"; like "{_DISK_EXAMPLE}"')
    if parts.fragment or "\0" in unquote(parts.path):
        raise ValueError('"#" and NUL have no meaning in the path of a tier; write "#" as "%23"')
    if len(options) != len(pairs):
        raise ValueError("an option stands there twice; keep one")
    for name in options:
        if name not in _DISK_OPTIONS:
            raise ValueError(f'unknown option "{name}"{_nearest(name, _DISK_OPTIONS)}')
    if "capacity" not in options:
        raise ValueError(f'a disk tier needs a limit: add "?capacity=200GiB", like "{_DISK_EXAMPLE}"')
    try:
        capacity = parse_size(options["capacity"])
    except ValueError as error:
        raise ValueError(f'capacity="{options["capacity"]}": {error}') from None
    if capacity == 0:
        raise ValueError('capacity is 0; give the tier room, such as "?capacity=200GiB", or leave it out')
    return TierURL(parts.scheme, unquote(parts.path), options)


def _parse_tier_urls(value: object) -> tuple[TierURL, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f'a list of tier URLs is needed, such as ["{_DISK_EXAMPLE}"]')
    tiers = tuple(parse_tier_url(url) for url in value)
    places = [(tier.scheme, tier.path.rstrip("/")) for tier in tiers]
    for place, tier in zip(places, tiers, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"two tiers share {tier.path}; each needs a place of its own")
    return tiers


def _exact_size(num_bytes: int) -> str | int:
    """A size as short as it can be written without losing a byte."""
    for unit, letter in ((1024**power, "BKMGTP"[power]) for power in (5, 4, 3, 2, 1)):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}iB"
    return num_bytes


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a whole number is needed")
    return value


Size: TypeAlias = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_exact_size)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(parse_duration)]
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
    tiers: TierURLs = ()
    """Where blocks outlive memory, fastest first."""
    prepare_deadline: Seconds = 2.0
    """How long prepare may answer "ask again later" while blocks are brought into memory; 0 serves from memory only."""
    plan_lifetime: Seconds = Field(default=30.0, gt=0)
    """A plan that was neither renewed nor committed for this long is aborted."""
    load_deadline: Seconds = Field(default=30.0, gt=0)
    """A committed load is reported, arrived or lost, within this time."""
    write_queue: Size = Field(default=1024**3, gt=0)
    """Bytes that may wait to be written to the tiers; what does not fit is dropped, never waited for."""
    shutdown_timeout: Seconds = 10.0
    """How long a shutdown may wait for the tiers."""
    sync_load_limit: Size = 1024**3
    """Larger loads are asynchronous; 0 makes every load asynchronous."""
    min_match_blocks: Count = Field(default=1, ge=1)
    """A shorter match is not promised."""
    save: Literal["eager", "off"] = "eager"
    """Whether computed blocks are stored as they appear, or nothing is stored."""
    model_id: str | None = Field(default=None, min_length=1)
    """Identity of the base weights, for weights whose files do not tell: equal only where the weights are."""
    io_threads: Count = Field(default=2, ge=1, le=64)
    """Host threads that read and write the tiers."""
    stats_file: Path | None = None
    """A JSON file that the idle engine keeps up to date with all counts; for programs beside it."""
    layerwise: bool = True
    """Load layer by layer behind the forward pass, where the engine allows it."""

    def connector_extra_config(self) -> dict[str, object]:
        """What was set, as JSON values that `load_config` reads back to the same; holds URLs in full."""
        return self.model_dump(mode="json", exclude_unset=True)

    def kv_transfer_config(self) -> dict[str, object]:
        """The value of vLLM's `--kv-transfer-config`.

        A failed load is recomputed: vLLM's own default fails the request.
        """
        return {
            "kv_connector": "PactConnector",
            "kv_connector_module_path": "kvpact.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.connector_extra_config(),
        }

    def to_connector_json(self) -> str:
        """`kv_transfer_config` as one line of JSON."""
        return json.dumps(self.kv_transfer_config())


@dataclass(frozen=True, slots=True)
class _Setting:
    value: object
    source: str


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
    if toml_path is None and environ.get(CONFIG_FILE_VARIABLE):
        toml_path = Path(environ[CONFIG_FILE_VARIABLE])
    settings = _toml_settings(toml_path) if toml_path is not None else {}
    settings |= _environment_settings(environ)
    settings |= {key: _Setting(value, extra_source) for key, value in (extra_config or {}).items()}
    try:
        return KvpactConfig.model_validate({key: setting.value for key, setting in settings.items()})
    except ValidationError as errors:
        first = errors.errors()[0]
        key = str(first["loc"][0])
        setting = settings[key]
        if first["type"] == "extra_forbidden":
            message = f'unknown key "{key}" in {setting.source}{_nearest(key, KvpactConfig.model_fields)}'
        else:
            reason = first["msg"].removeprefix("Value error, ")
            message = f"{key}={_shown(setting.value)} in {setting.source}: {reason}"
        raise ConfigError(message) from None


def _toml_settings(path: Path) -> dict[str, _Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    return {key: _Setting(value, str(path)) for key, value in table.items()}


def _environment_settings(environ: Mapping[str, str]) -> dict[str, _Setting]:
    settings = {}
    for name, text in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name == CONFIG_FILE_VARIABLE:
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not text:
            continue  # set to nothing is how compose files and shells say "not set"
        if key in KvpactConfig.model_fields:
            value: object = text.split() if key == "tiers" else text
            settings[key] = _Setting(value, f"the environment ({name})")
        elif near := difflib.get_close_matches(key, KvpactConfig.model_fields, n=1, cutoff=0.7):
            # Others put names there too (Kubernetes: KVPACT_SERVICE_HOST), so only a likely slip is an error.
            known = ENVIRONMENT_PREFIX + near[0].upper()
            raise ConfigError(f"unknown key {name} in the environment; did you mean {known}?")
    return settings


def _nearest(name: str, known: Iterable[str]) -> str:
    candidates = list(known)
    near = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.7)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(candidates)}"


def _shown(value: object) -> str:
    """A value as the user wrote it, without its credentials."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{...}"
    return f'"{redact(value)}"' if isinstance(value, str) else repr(value)
