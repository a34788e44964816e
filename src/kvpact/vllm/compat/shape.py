"""Examination of an untested release of vLLM: does it have all that kvpact uses of it?

Names and signatures are inspected, never what the code behind them does: an unknown release stays one that nobody has
tested. Imports nothing of vLLM by itself.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from kvpact.errors import ConfigError
from kvpact.vllm.compat.releases import SERIES, is_known
from kvpact.vllm.compat.uses import OF_GROUPS, USES, Use, find


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that kvpact uses and the release does not have."""

    what: str
    """Such as "Request.cache_salt"."""
    without: str
    """The ability that is lost then; empty: kvpact would not work at all."""


def what_is_missing(vllm_config: Any, kv_cache_config: Any, connector: type | None = None) -> list[Missing]:
    """Names that an engine of this configuration uses and does not have. `connector` is the class with the hooks.

    Without `kv_cache_config`, which comes after the weights, what only some KV cache groups use is not examined.
    """
    found = [
        Missing(what, use.without.format(what))
        for use in USES
        if _concerns(use, vllm_config, kv_cache_config)
        for what in _missing(use, connector)
    ]
    return list(dict.fromkeys(found))


def check_shape(release: str, vllm_config: Any, kv_cache_config: Any, connector: type | None = None) -> str:
    """For a release that is not known: the one warning to be given, which names what does not work.

    Raises ConfigError, naming what is missing, if nothing would work, or if it would be wrong.
    """
    missing = what_is_missing(vllm_config, kv_cache_config, connector)
    if needed := [one.what for one in missing if not one.without]:
        raise ConfigError(
            f"{_untested(release)}, and has not what kvpact needs: {', '.join(needed)}. Use a tested release"
        )
    if missing:
        lost = "; ".join(f"{one.without}: there is no {one.what}" for one in missing)
        return f"{_untested(release)}; kvpact works there without {lost}"
    return f"{_untested(release)}; what kvpact uses of it has the names and the arguments of {SERIES[-1]}"


def refuse_unknown(error: ImportError) -> None:
    """Raise ConfigError for an unknown release on which the connector cannot be imported, for whatever `error`.

    Does nothing on a known release, or without vLLM.
    """
    if (vllm := sys.modules.get("vllm")) is None or is_known(release := str(vllm.__version__)):
        return
    raise ConfigError(f"{_untested(release)}, and has not what kvpact needs: {error}. Use a tested release") from error


def _untested(release: str) -> str:
    return f"vLLM {release} is not among the tested releases ({SERIES[0]} to {SERIES[-1]})"


def _concerns(use: Use, vllm_config: Any, kv_cache_config: Any) -> bool:
    if use.in_workers and use.place.partition(":")[0] not in sys.modules:
        return False
    if kv_cache_config is None and use.when in OF_GROUPS:
        return False
    try:
        return use.when(vllm_config, kv_cache_config)
    except Exception:  # unknown
        return True


def _missing(use: Use, connector: type | None) -> Iterator[str]:
    owner = find(use.place)
    module, _, shown = use.place.partition(":")
    if owner is None:
        yield f"{module}.{shown}".rstrip(".")
        return
    has = _members(owner)
    for names in use.names.split():
        if not any(_is_right(owner, name, has, connector if use.is_hook else None) for name in names.split("|")):
            yield f"{shown or module}.{names.replace('|', ' or ')}"


def _is_right(owner: Any, name: str, has: frozenset[str], connector: type | None) -> bool:
    name, _, count = name.rstrip(")").partition("(")
    if name not in has:
        return False
    if count:
        given = [None] * (int(count) + inspect.isclass(owner))
        return _takes(getattr(owner, name, None), given, {})
    if connector is not None and callable(base := getattr(owner, name, None)):
        return _takes(getattr(connector, name, None), *_arguments(base))
    return True


def _members(owner: Any) -> frozenset[str]:
    """The attributes of a class and of its instances, of a module, or those that a function sets."""
    if inspect.ismodule(owner):
        return frozenset(vars(owner))
    if isinstance(owner, FunctionType):
        return _set_by(owner)
    found: set[str] = set()
    for kind in inspect.getmro(owner):
        found |= vars(kind).keys() | vars(kind).get("__annotations__", {}).keys()
        if isinstance(make := vars(kind).get("__init__"), FunctionType):
            found |= _set_by(make)
    return frozenset(found)


def _set_by(function: FunctionType) -> frozenset[str]:
    return frozenset(one.argval for one in dis.get_instructions(function) if one.opname == "STORE_ATTR")


def _arguments(function: Any) -> tuple[list[None], dict[str, None]]:
    """Return as many arguments as vLLM may pass to a hook, by place and by name."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    return [None for one in parameters if one.kind in positional], dict.fromkeys(by_name)


def _takes(function: Any, arguments: Sequence[None], named: dict[str, None]) -> bool:
    """True if it can be called with these arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # compiled, so that it does not show them
        return True
    return True
