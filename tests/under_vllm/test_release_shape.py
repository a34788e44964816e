"""An unknown release of vLLM is judged by its shape: of the installed one, one thing after another is taken away, and
each time kvpact names it, and either refuses or says what it works without."""

from __future__ import annotations

import enum
import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import vllm.model_executor.layers.attention.attention
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.request import Request

import kvpact.vllm
from kvpact.errors import ConfigError
from kvpact.vllm.compat.shape import what_is_missing
from kvpact.vllm.compat.uses import USES, Use
from kvpact.vllm.connector import PactConnector
from kvpact.vllm.scheduler import pact_scheduler
from kvpact_testkit.results import as_text
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine

UNKNOWN = "0.99.0"
ANY = SimpleNamespace()
"""A configuration of which nothing can be told, so that everything is used."""
CONFIG = {"memory": "1MiB", "model_id": "testkit"}
TRANSFER = {
    "kv_connector": "PactConnector",
    "kv_connector_module_path": "kvpact.vllm",
    "kv_connector_extra_config": CONFIG,
}


def missing() -> dict[str, str]:
    return {one.what: one.without for one in what_is_missing(ANY, ANY, PactConnector)}


def owner_of(use: Use) -> Any:
    module, _, name = use.place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def single_uses() -> Iterator[tuple[Use, str]]:
    """All that a release like the installed one is examined for."""
    for use in USES:
        is_there = not use.in_workers or use.place.partition(":")[0] in sys.modules
        if is_there:
            yield from ((use, names) for names in use.names.split())


SINGLE_USES = [*single_uses()]
TAKES_ANYTHING = "build_prom_metrics"
HOOKS = [(use, name) for use, name in SINGLE_USES if use.is_hook and "|" not in name and name != TAKES_ANYTHING]


def take_away(monkeypatch: pytest.MonkeyPatch, use: Use, name: str) -> None:
    """As if the release had another name for it."""
    owner = owner_of(use)
    if inspect.isclass(owner) and issubclass(owner, enum.Enum):
        module, _, kind = use.place.partition(":")
        others = {one.name: one for one in owner if one.name != name}
        monkeypatch.setattr(importlib.import_module(module), kind, type(kind, (), others))
    elif inspect.isclass(owner):
        for base in inspect.getmro(owner)[:-1]:
            take_from(monkeypatch, base, name)
    elif isinstance(owner, FunctionType):
        monkeypatch.setattr(owner, "__code__", without_name(owner, name))
    else:
        monkeypatch.delattr(owner, name)


def take_from(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    if name in vars(kind):
        monkeypatch.delattr(kind, name)
    annotations = vars(kind).get("__annotations__", {})
    if name in annotations:
        monkeypatch.setitem(annotations, name, None)
        monkeypatch.delitem(annotations, name)
    if isinstance(make := vars(kind).get("__init__"), FunctionType):
        monkeypatch.setattr(make, "__code__", without_name(make, name))


def without_name(function: FunctionType, name: str) -> Any:
    code = function.__code__
    return code.replace(co_names=tuple(f"{one}_renamed" if one == name else one for one in code.co_names))


def named(value: Any) -> str:
    return value.place.rpartition(".")[2] if isinstance(value, Use) else str(value)


def test_nothing_is_missing_here() -> None:
    assert missing() == {}


@pytest.mark.parametrize(("use", "names"), SINGLE_USES, ids=named)
def test_whatever_is_taken_away_is_named(monkeypatch: pytest.MonkeyPatch, use: Use, names: str) -> None:
    for name in names.split("|"):
        take_away(monkeypatch, use, name.partition("(")[0])
    module, _, owner = use.place.partition(":")
    what = f"{owner or module}.{names.replace('|', ' or ')}"
    found = missing()
    assert what in found
    assert found[what] == (use.without.format(what) if use.without else "")


@pytest.mark.parametrize(("use", "name"), HOOKS, ids=named)
def test_a_hook_with_one_more_argument_is_refused(monkeypatch: pytest.MonkeyPatch, use: Use, name: str) -> None:
    """vLLM would pass it, and the connector's method raise in every step."""
    monkeypatch.setattr(owner_of(use), name, lambda one, two, three, four, five, six, seven, *, eighth: None)
    assert f"{use.place.partition(':')[2]}.{name}" in missing()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(BlockPool, "touch"), (BlockPool, "free_blocks"), (FreeKVCacheBlockQueue, "remove"), (Request, "is_finished")],
    ids=str,
)
def test_a_method_that_wants_other_arguments_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, lambda self, one, two: None)
    assert any(what.startswith(f"{owner.__name__}.{name}(") for what in missing())


def test_a_module_or_class_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue")
    monkeypatch.setitem(sys.modules, "vllm.forward_context", None)
    assert {"vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue", "vllm.forward_context.ForwardContext"} <= set(
        missing()
    )


# What an engine does with it


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", UNKNOWN)


def started(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of the scheduler's half, each once."""
    caplog.set_level(logging.WARNING, "kvpact")
    VllmEngine(EngineSettings(), TRANSFER, lambda line: None).close()
    return sorted({record.getMessage() for record in caplog.records if "tested releases" in record.getMessage()})


@pytest.mark.usefixtures("unknown")
def test_an_unknown_release_of_the_same_shape_is_served(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = started(caplog)
    assert said == (
        f"kvpact: vLLM {UNKNOWN} is not among the tested releases (0.30 to 0.33); what kvpact uses of it has the names "
        "and the arguments of 0.33"
    )
    report = VllmDriver("kvpact.vllm:PactConnector", CONFIG).run(["stores_and_loads"])
    assert not report.broken, as_text(report)


@pytest.mark.usefixtures("unknown")
def test_what_it_works_without_is_said_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(FreeKVCacheBlockQueue, "prepend_n")
    monkeypatch.delattr(base.KVConnectorBase_V1, "get_required_kvcache_layout")
    (said,) = started(caplog)
    assert '; kvpact works there without kv_layout="blocks": there is no KVConnectorBase_V1.get_required_kv' in said
    assert '"save": "lazy", and blocks' in said


@pytest.mark.usefixtures("unknown")
def test_what_it_cannot_work_without_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(base.KVConnectorBase_V1, "wait_for_layer_load")
    monkeypatch.delattr(BlockPool, "evict_blocks")
    needed = r"KVConnectorBase_V1\.wait_for_layer_load, BlockPool\.evict_blocks\(1\)\. Use a tested release"
    with pytest.raises(ConfigError, match=needed):
        started(caplog)


@pytest.mark.usefixtures("unknown")
def test_what_no_engine_of_this_configuration_uses_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for use in USES:
        if use.place == "vllm.config:LoRAConfig":
            take_away(monkeypatch, use, "enable_tower_connector_lora")
    assert "enable_tower_connector_lora" not in vars(LoRAConfig)
    (said,) = started(caplog)
    assert "without" not in said


def test_a_known_release_is_not_examined(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kvpact.vllm.compat.shape.check_shape", lambda *_: pytest.fail("examined"))
    assert started(caplog) == []


@pytest.mark.parametrize(("version", "error"), [(UNKNOWN, ConfigError), ("0.33.1", ImportError)])
def test_a_connector_that_cannot_be_imported_says_why(
    monkeypatch: pytest.MonkeyPatch, version: str, error: type[Exception]
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.delattr(base, "KVConnectorHandshakeMetadata")
    monkeypatch.delitem(sys.modules, "kvpact.vllm.connector")
    with pytest.raises(error, match="KVConnectorHandshakeMetadata"):
        _ = kvpact.vllm.PactConnector


def test_a_release_before_all_others_is_refused_whatever_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.29.1")
    for name in kvpact.vllm.__all__:
        with pytest.raises(ConfigError, match=r"vLLM 0\.29\.1 is installed, and kvpact serves 0\.30 and later"):
            getattr(kvpact.vllm, name)
    with pytest.raises(ValueError, match=r"vLLM 0\.29\.1 is installed"):
        started(caplog)
    with pytest.raises(ConfigError, match=r"vLLM 0\.29\.1 is installed"):
        pact_scheduler(vllm_config=None)
