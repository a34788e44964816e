"""What a worker says of its weights, with stand-ins for vLLM's workers and models of a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from torch import nn

from kvpact.errors import ConfigError, KvpactError
from kvpact.identity.notices import Notice, NoticeReader, NoticeWriter
from kvpact.vllm import worker as worker_module
from kvpact.vllm.model_digest import Sample, digest_of
from kvpact.vllm.model_watch import GAP_SECONDS, RARELY_SECONDS, ModelWatch
from kvpact.vllm.worker import CHANGES_WEIGHTS, KvpactWorker, WeightsExtension, pact_connector

BASE = KvpactWorker.__bases__[0]


class Model(nn.Module):
    """Two layers, one of whose tensors has equal numbers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.norm = nn.RMSNorm(64)
        self.register_buffer("scale", torch.ones(3))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, values in weights:
            self.get_parameter(name).data.copy_(values)
        return {name for name, _ in weights}


class Connector:
    """As much of PactConnector as a worker asks."""

    def __init__(self) -> None:
        self.page = memoryview(bytearray(4096))
        self.reader = NoticeReader([self.page])
        self.notices = NoticeWriter(self.page)
        self.cache_worker = SimpleNamespace(notices=self.notices, adapters=None, watches_weights=False)
        self.told: list[str] = []

    def unregister_kv_caches(self) -> None:
        self.told.append("goes")

    def restore_kv_caches(self) -> None:
        self.told.append("is there")

    @property
    def said(self) -> Notice:
        self.reader = NoticeReader([self.page])
        [notice] = self.reader.look() or ()
        return notice


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Extension:
    """What a user's `worker_extension_cls` looks like."""

    model_runner: Any

    def sum_of_weights(self) -> float:
        return float(self.model_runner.model.layer.weight.sum())

    def scale_weights(self, factor: float, *, fail: bool = False) -> str:
        self.model_runner.model.norm.weight.data.mul_(factor)
        if fail:
            raise ConnectionError("the trainer is gone")
        return "done"

    def touch_a_buffer(self) -> None:
        self.model_runner.model.scale[1] = 7

    @staticmethod
    def version() -> str:
        return "3"


class Extended(KvpactWorker, Extension):
    """What vLLM makes of both."""


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Connector:
    connector = Connector()
    monkeypatch.setattr(worker_module, "_connector", lambda: connector)
    return connector


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """vLLM's worker does nothing but note what it is told; by method."""
    called: dict[str, list[Any]] = {}

    def stand_in(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            called.setdefault(name, []).append((arguments, named))
            return name

        return method

    for name in (*CHANGES_WEIGHTS, "initialize_from_config", "execute_model", "sample_tokens", "sleep", "wake_up"):
        if hasattr(BASE, name):
            monkeypatch.setattr(BASE, name, stand_in(name))
    monkeypatch.setattr(BASE, "get_model", lambda self: self.model_runner.model)
    monkeypatch.setattr(BASE, "get_draft_model", lambda self: None)
    return called


def start(kind: type[KvpactWorker] = KvpactWorker, **parallel: object) -> Any:
    """A worker that has loaded its model and been told of its connector."""
    worker = kind.__new__(kind)
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    worker.model_runner = SimpleNamespace(model=Model())
    worker.load_model()
    worker.initialize_from_config(SimpleNamespace(kv_cache_groups=[]))
    return worker


# Those who say what they do


@pytest.mark.parametrize("name", CHANGES_WEIGHTS)
def test_h32_what_changes_weights_says_so_before_and_after(
    base: dict[str, list[Any]], connector: Connector, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    worker = start()
    assert connector.cache_worker.watches_weights
    before = connector.said.changes
    told: list[int] = []

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        told.append(connector.said.changes)
        assert (arguments, named) == ((1,), {"two": 2})
        raise ConnectionError("the trainer is gone")

    monkeypatch.setattr(BASE, name, method)
    with pytest.raises(ConnectionError):
        getattr(worker, name)(1, two=2)
    assert told == [before + 1], "whoever dies half-way has said it"
    assert connector.said.changes == before + 2


def test_the_worker_has_what_its_base_has_and_no_more() -> None:
    """Releases differ in which of the methods they have."""
    assert {name for name in CHANGES_WEIGHTS if hasattr(KvpactWorker, name)} == {
        name for name in CHANGES_WEIGHTS if hasattr(BASE, name)
    }
    assert KvpactWorker.update_weights.__doc__ == BASE.update_weights.__doc__


@pytest.mark.usefixtures("base")
def test_h32_whoever_calls_load_weights_says_so(connector: Connector) -> None:
    worker = start()
    before = connector.said.changes
    model = worker.model_runner.model
    assert model.load_weights([("norm.weight", torch.zeros(64))]) == {"norm.weight"}
    assert connector.said.changes == before + 2
    worker.load_model()
    before = connector.said.changes
    model.load_weights([])
    assert connector.said.changes == before + 2, "wrapped once"


@pytest.mark.usefixtures("base")
def test_h32_an_extensions_method_counts_as_a_change_if_a_number_differs_or_if_it_fails(connector: Connector) -> None:
    worker = start(Extended)
    before = connector.said.changes
    worker.sum_of_weights()
    assert worker.version() == "3"
    assert worker.scale_weights(1.0) == "done"
    assert connector.said.changes == before
    assert worker.scale_weights(2.0) == "done"
    assert connector.said.changes == before + 1
    worker.touch_a_buffer()
    assert connector.said.changes == before + 2
    with pytest.raises(ConnectionError):
        worker.scale_weights(1.0, fail=True)
    assert connector.said.changes == before + 3


@pytest.mark.usefixtures("base")
def test_an_extension_on_the_class_of_the_rpcs_is_not_a_users(connector: Connector) -> None:
    """Named as `worker_extension_cls` beside our worker, it is among its bases already: vLLM leaves it at that."""
    assert WeightsExtension in KvpactWorker.__bases__
    worker = start()
    worker.kvpact_weights_changed()
    assert connector.said.changes == 2
    worker.kvpact_set_weights_version("step 1")
    assert connector.said == Notice(changes=2, words=1, word="step 1")
    other = WeightsExtension()
    other.kvpact_weights_changed()
    other.kvpact_set_weights_version("step 2")
    assert connector.said == Notice(changes=3, words=2, word="step 2")


def test_the_rpcs_say_when_there_is_no_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_connector", lambda: None)
    with pytest.raises(ConfigError, match="no PactConnector"):
        WeightsExtension().kvpact_weights_changed()
    with pytest.raises(ConfigError, match="no PactConnector"):
        WeightsExtension().kvpact_set_weights_version("step 1")


def test_the_connector_is_found_among_others() -> None:
    connector = Connector()
    assert pact_connector(SimpleNamespace(_connectors=[object(), connector])) is connector
    assert pact_connector(connector) is connector
    assert pact_connector(SimpleNamespace(_connectors=[object()])) is None
    assert pact_connector(None) is None


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("other", [None, object()], ids=["none", "another"])
def test_without_kvpacts_connector_and_on_any_release_it_is_the_platforms_worker(
    monkeypatch: pytest.MonkeyPatch, other: object
) -> None:
    monkeypatch.setattr(worker_module, "_connector", lambda: other)
    monkeypatch.setattr("vllm.__version__", "1.0.0")
    worker = start(Extended, decode_context_parallel_size=2)
    assert worker.reload_weights() == "reload_weights"
    assert worker.execute_model(object()) == "execute_model"
    assert worker.scale_weights(2.0) == "done"
    assert (worker.sleep(level=1), worker.wake_up(tags=None)) == ("sleep", "wake_up")


# What nobody says


@pytest.mark.usefixtures("base")
def test_h32_the_step_after_somebody_has_asked_for_the_model_finds_what_he_did(
    connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    """As a callable does that `collective_rpc` is given, however fast: no method of the worker is called."""
    worker = start()
    worker.execute_model(object())
    worker.sample_tokens(None)
    worker.execute_model(object())
    assert connector.said.changes == 0
    worker.model_runner.model.norm.weight.data.mul_(2)
    worker.sample_tokens(None)
    worker.execute_model(object())
    assert connector.said.changes == 1
    worker.execute_model(object())
    assert connector.said.changes == 1
    [record] = [record for record in caplog.records if record.name.startswith("kvpact")]
    assert "without notice" in record.getMessage()


@pytest.mark.usefixtures("base")
def test_h37_a_word_is_of_the_weights_as_they_are_then(connector: Connector) -> None:
    worker = start()
    worker.execute_model(object())
    worker.model_runner.model.norm.weight.data.mul_(2)
    worker.kvpact_set_weights_version("step 2")
    assert connector.said == Notice(changes=1, words=1, word="step 2")
    worker.execute_model(object())
    assert connector.said.word == "step 2"
    worker.model_runner.model.norm.weight.data.mul_(2)
    worker.execute_model(object())
    assert connector.said == Notice(changes=2, words=1)


@pytest.mark.parametrize(("seconds", "is_found"), [(GAP_SECONDS / 2, False), (GAP_SECONDS * 2, True)])
def test_h32_an_engine_that_has_rested_looks_at_its_weights(seconds: float, *, is_found: bool) -> None:
    model, clock, connector = Model(), Clock(), Connector()
    watch = ModelWatch(SimpleNamespace(get_model=lambda: model), clock)
    watch.bind(connector.notices, samples=True)

    def step() -> None:
        watch.before_step(touched=False)
        clock.now += 0.01
        watch.step_ended()

    step()
    model.norm.weight.data.mul_(2)
    clock.now += seconds
    step()
    assert connector.said.changes == is_found
    for _ in range(int(RARELY_SECONDS / 0.01) + 1):
        step()
    assert connector.said.changes == 1, "sooner or later"


def test_where_the_engine_moves_experts_about_nothing_is_sampled() -> None:
    model, connector = Model(), Connector()
    watch = ModelWatch(SimpleNamespace(get_model=lambda: model))
    watch.bind(connector.notices, samples=False)
    for _ in range(2):
        watch.before_step(touched=True)
        model.norm.weight.data.mul_(2)
    assert connector.said.changes == 0


def test_a_model_that_cannot_be_read_counts_as_changed_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()

    def get_model() -> Any:
        raise RuntimeError("injected")

    watch = ModelWatch(SimpleNamespace(get_model=get_model))
    watch.bind(connector.notices, samples=True)
    for _ in range(3):
        watch.before_step(touched=True)
    assert connector.said.changes == 0
    assert len(caplog.records) == 1
    with watch.comparing():
        pass
    assert connector.said.changes == 1


# Sleep


@pytest.mark.usefixtures("base")
def test_a_worker_says_when_it_wakes_with_the_weights_with_which_it_fell_asleep(connector: Connector) -> None:
    worker = start()
    worker.execute_model(object())
    for wakes in (1, 3):
        assert worker.sleep(level=1) == "sleep"
        assert worker.wake_up(tags=None) == "wake_up"
        assert connector.said == Notice(wakes=wakes)
        worker.sleep()
        worker.wake_up(["weights"])
        assert connector.said == Notice(wakes=wakes), "not all is awake"
        worker.wake_up(["kv_cache"])
        assert connector.said == Notice(wakes=wakes + 1)
    worker.wake_up()
    assert connector.said == Notice(wakes=4), "it was awake"


def test_copies_end_before_the_kv_memory_goes_and_go_on_when_it_is_there_again(
    connector: Connector, monkeypatch: pytest.MonkeyPatch, base: dict[str, list[Any]]
) -> None:
    worker = start()
    monkeypatch.setattr(BASE, "sleep", lambda self, level: connector.told.append("sleeps"))
    monkeypatch.setattr(BASE, "wake_up", lambda self, tags: connector.told.append("wakes"))
    worker.sleep(1)
    worker.wake_up(["weights"])
    assert connector.told == ["goes", "sleeps", "wakes"]
    worker.wake_up(["kv_cache"])
    assert connector.told[3:] == ["wakes", "is there"]
    worker.sleep(1)
    worker.wake_up()
    assert connector.told[5:] == ["goes", "sleeps", "wakes", "is there"]

    def hang() -> None:
        raise KvpactError("copies go on")

    monkeypatch.setattr(connector, "unregister_kv_caches", hang)
    with pytest.raises(KvpactError):
        worker.sleep(1)
    assert len(connector.told) == 9, "it stays awake"


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda worker: worker.model_runner.model.norm.weight.data.mul_(2), Notice(changes=1)),
        (lambda worker: worker.reload_weights(), Notice(changes=2)),
        (lambda worker: worker.kvpact_weights_changed(), Notice(changes=2)),
        (lambda worker: worker.kvpact_set_weights_version("s"), Notice(words=1, word="s")),
    ],
    ids=["unsaid", "reload", "said", "word"],
)
def test_h32_a_worker_that_slept_and_changed_does_not_say_so(
    connector: Connector, between: Callable[[Any], None], expected: Notice
) -> None:
    worker = start()
    worker.execute_model(object())
    worker.sleep(level=1)
    worker.wake_up(["weights"])
    between(worker)
    worker.wake_up(["kv_cache"])
    assert connector.said == expected


@pytest.mark.usefixtures("base")
def test_h32_at_level_two_the_weights_are_gone(connector: Connector) -> None:
    worker = start()
    worker.sleep(level=2)
    assert connector.said == Notice(changes=1)
    worker.wake_up()
    assert connector.said == Notice(changes=1)


@pytest.mark.usefixtures("base")
def test_h32_a_change_before_a_sleep_is_not_taken_for_its_weights(connector: Connector) -> None:
    worker = start()
    worker.execute_model(object())
    worker.model_runner.model.norm.weight.data.mul_(2)
    worker.sleep(level=1)
    assert connector.said.changes == 1


# Digests


CHANGES: dict[str, Callable[[Model], Any]] = {
    "all scales doubled": lambda model: model.norm.weight.data.mul_(2),
    "two highest bits": lambda model: model.layer.weight.data[0, 3:8:4].neg_(),
    "two rows changed places": lambda model: model.layer.weight.data.copy_(model.layer.weight.data.roll(1, 0)),
    "a buffer": lambda model: model.scale.zero_(),
    "one bit": lambda model: model.layer.weight.data.view(torch.int16)[3, 3].bitwise_xor_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_h32_a_digest_tells_any_change(name: str) -> None:
    """`torch.hash_tensor`, an XOR over the elements, tells neither the first nor the third."""
    model = Model()
    before = digest_of([model])
    assert digest_of([model]) == before
    CHANGES[name](model)
    after = digest_of([model])
    assert len([tensor for tensor in before if before[tensor] != after[tensor]]) == 1


def test_a_digest_reads_tensors_of_any_kind_and_place() -> None:
    numbers = torch.arange(4097).to(torch.uint8)
    tensors = {
        "odd": numbers[3:],
        "transposed": torch.arange(4096.0).view(64, 64).t(),
        "every second": torch.arange(4096.0)[::2],
        "expanded": torch.ones(1).expand(5),
        "float8": torch.ones(13).to(torch.float8_e4m3fn),
        "flags": torch.ones(13, dtype=torch.bool),
        "none": torch.empty(0),
        "one": torch.tensor(3.0),
    }
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name.replace(" ", "_"), tensor.clone() if name == "odd" else tensor)
        setattr(model, f"{name.replace(' ', '_')}_weight", nn.Parameter(tensor, requires_grad=False))
    digests = digest_of([model])
    assert None not in digests.values()
    assert digests["0 odd_weight"] == digests["0 buffer odd"], "wherever the bytes lie"
    sample = Sample([model])
    assert sample.is_still_true([model])
    model.get_parameter("one_weight").data.add_(1)
    assert not sample.is_still_true([model])


def test_a_sample_tells_a_change_of_one_element_in_a_thousand_and_of_a_small_tensor() -> None:
    model = nn.Module()
    model.large = nn.Parameter(torch.ones(1000, 1000))
    model.small = nn.Parameter(torch.ones(1))
    sample = Sample([model])
    assert sample.is_still_true([model])
    model.large.data.view(-1)[::1000] = float("nan")
    assert not sample.is_still_true([model])
    sample = Sample([model])
    assert sample.is_still_true([model]), "a NaN is what it was"
    model.small.data.zero_()
    assert not sample.is_still_true([model])
    sample = Sample([model])
    model.small = nn.Parameter(torch.zeros(2))
    assert not sample.is_still_true([model])
