"""`KvpactWorker`: the platform's worker, which records changes of its weights, and calls connectors before each step.

Owns the class, which of vLLM's methods change weights, and on which engines the hook is known to be right. With another
connector than kvpact's, and without such a hook, it is the platform's worker. Imported by workers only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from vllm.platforms import current_platform

from kvpact.errors import ConfigError
from kvpact.identity.notices import NoticeWriter
from kvpact.vllm.adapter_watch import watch_adapters
from kvpact.vllm.compat.configuration import moves_experts, split_context
from kvpact.vllm.compat.objects import adapter_manager, connectors_of
from kvpact.vllm.compat.platforms import base_worker
from kvpact.vllm.compat.releases import refuse_unread
from kvpact.vllm.model_watch import ModelWatch, extension_methods
from kvpact.vllm.step_hook import Minimum, StepHook, hook_of

logger = logging.getLogger(__name__)

FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"


def bind_step_hook(worker: Any, connector: Any, kv_cache_config: Any) -> StepHook | None:
    """The hook of this worker's connector, or of those inside MultiConnector; None if there is none, and then nothing
    changes.

    Raises ConfigError where the hook would not be right: an unknown release or model runner, split or recurrent state.
    """
    if hook_of(connector) is None:
        return None
    import vllm

    from kvpact.vllm.scheduler import counts_step_hits

    refuse_unread(str(vllm.__version__))
    for setting, size in split_context(worker.vllm_config.parallel_config).items():
        raise ConfigError(f"the step hook does not serve {setting}={size}: a rank has a part")
    for group in kv_cache_config.kv_cache_groups:
        if "Mamba" in type(group.kv_cache_spec).__name__:
            raise ConfigError("the step hook does not serve models with recurrent state: leave worker_cls out")
    hook = StepHook(
        connector, new_requests_only=is_second_runner(worker.model_runner), minimum=minimum_over_ranks(_rank_groups())
    )
    if counts_step_hits(worker.vllm_config):
        hook.report_hits()
    logger.info("kvpact: %s is asked before each step", " and ".join(hook.bound()))
    return hook


def is_second_runner(runner: Any) -> bool:
    """True if the model runner is vLLM's second one, whose running requests keep their position on the device.

    Decided by the object that will run and not by a setting (H92). Raises ConfigError if it is neither of the two.
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(runner).__mro__}
    if SECOND_RUNNER in names:
        return True
    if FIRST_RUNNER in names:
        return False
    raise ConfigError(
        f"the step hook does not know the model runner {type(runner).__module__}.{type(runner).__qualname__}; it knows "
        f"{FIRST_RUNNER} and {SECOND_RUNNER}: leave worker_cls out"
    )


def minimum_over_ranks(groups: Sequence[Any]) -> Minimum | None:
    """The minimum over the members of all process groups, one group after another; None without groups."""
    if not groups:
        return None
    import torch

    def minimum(numbers: Sequence[int]) -> Sequence[int]:
        agreed = torch.tensor(numbers, dtype=torch.int64)
        for group in groups:
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=group)
        result: Sequence[int] = agreed.tolist()
        return result

    return minimum


def _rank_groups() -> list[Any]:
    """The process groups whose ranks must skip the same tokens: tensor-parallel and pipeline-parallel ones."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return [group.cpu_group for group in (get_tp_group(), get_pp_group()) if group.world_size > 1]


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


CHANGES_WEIGHTS = (
    "load_model",
    "reload_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_weights",
    "apply_model",
)
"""Methods of vLLM's workers that may change the weights; a release has some of them."""

BETWEEN_STEPS = ("sample_tokens", "take_draft_token_ids", "execute_dummy_batch")
"""Methods that belong to a step and use the models themselves."""


def pact_connector(connector: Any) -> Any:
    """kvpact's connector: the given one, or one inside MultiConnector; None if there is none."""
    for one in connectors_of(connector):
        if getattr(one, "cache_worker", None) is not None:
            return one
    return None


def weights_notices() -> NoticeWriter:
    """This rank's notice, for changes of its weights. Raises ConfigError without PactConnector."""
    connector = pact_connector(_connector())
    notices: NoticeWriter | None = connector.cache_worker.notices if connector is not None else None
    if notices is None:
        raise ConfigError("this engine has no PactConnector, so there is no cache to invalidate")
    return notices


class WeightsExtension:
    """Announces changes of weights by `collective_rpc`: a `worker_extension_cls` for workers that are not KvpactWorker.

    Both methods raise ConfigError if the engine has no PactConnector.
    """

    def kvpact_weights_changed(self) -> None:
        """The weights have changed, or are about to: nothing stored so far is served any more."""
        weights_notices().weights_change()

    def kvpact_set_weights_version(self, version: str) -> None:
        """Announce the current weights' version: engines of equal versions share. Call it after the change.

        Raises ValueError for an empty version or one of more than 1024 bytes. Without a change or reset since the last
        one a version is refused; the scheduler's process logs that.
        """
        weights_notices().set_word(version)


class KvpactWorker(base_worker(current_platform), WeightsExtension):  # type: ignore[misc]
    """The platform's worker: `worker_cls="kvpact.vllm.worker.KvpactWorker"`, which `kvpact serve` sets.

    It records in the rank's shared memory when its weights change, and calls the connector before each step: see
    `kvpact.vllm.step_hook.StepHookConnector` for what that needs.
    """

    step_hook: StepHook | None = None
    _kvpact_watch: ModelWatch | None = None
    _kvpact_adapters: Any = None
    """vLLM's manager of adapters, once it records what it loads."""
    _kvpact_touched = False
    """True if the model runner was requested since the last step: all ways to the weights lead through it."""

    @property
    def model_runner(self) -> Any:
        """vLLM's model runner."""
        self._kvpact_touched = True
        return self.__dict__.get("model_runner")

    @model_runner.setter
    def model_runner(self, runner: Any) -> None:
        self.__dict__["model_runner"] = runner

    @property
    def kvpact_watch(self) -> ModelWatch:
        """The watch over this worker's weights."""
        if self._kvpact_watch is None:
            self._kvpact_watch = ModelWatch(self)
        return self._kvpact_watch

    def load_model(self, *arguments: Any, **named: Any) -> Any:
        """Load the model like vLLM; from now on each call of the models' `load_weights` is recorded."""
        with self.kvpact_watch.changing():
            answer = super().load_model(*arguments, **named)
            self.kvpact_watch.watch_loading()
        self._watch_adapters(pact_connector(_connector()))
        return answer

    def kvpact_weights_changed(self) -> None:
        """Announce changed weights (`WeightsExtension`)."""
        with self.kvpact_watch.changing():
            weights_notices()

    def kvpact_set_weights_version(self, version: str) -> None:
        """Announce the weights' version (`WeightsExtension`). An unrecorded change is recorded first."""
        weights_notices()
        self.kvpact_watch.set_word(version)

    def initialize_from_config(self, kv_cache_config: Any) -> Any:
        """The connector exists once this has run. Raises ConfigError if its hook cannot be served on this engine."""
        answer = super().initialize_from_config(kv_cache_config)
        connector = _connector()
        for one in connectors_of(connector):
            if (tell := getattr(one, "model_at", None)) is not None:
                tell(self.get_model)
        self.step_hook = bind_step_hook(self, connector, kv_cache_config)
        self._watch_weights(pact_connector(connector))
        self._watch_adapters(pact_connector(connector))
        return answer

    def _watch_weights(self, connector: Any) -> None:
        if connector is None or connector.cache_worker.notices is None:
            return
        self.kvpact_watch.bind(connector.cache_worker.notices, samples=not moves_experts(self.vllm_config))
        connector.cache_worker.watches_weights = True
        for name in extension_methods(type(self)):
            if name not in vars(self):
                setattr(self, name, self.kvpact_watch.comparing()(getattr(self, name)))

    def _watch_adapters(self, connector: Any) -> None:
        manager = adapter_manager(self.model_runner)
        table = connector.cache_worker.adapters if connector is not None else None
        if manager is None or table is None or manager is self._kvpact_adapters:
            return
        self._kvpact_adapters = manager
        if not watch_adapters(manager, table):
            logger.warning("kvpact: %s does not show when it loads adapters", type(manager).__name__)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step without what the connector supplies; returns what the platform's worker returns (H91)."""
        if self._kvpact_watch is not None:
            self._kvpact_watch.before_step(touched=self._kvpact_touched)
        try:
            if self.step_hook is not None:
                scheduler_output = self.step_hook.apply(scheduler_output)
            return super().execute_model(scheduler_output)
        finally:
            self._kvpact_touched = False
            if self._kvpact_watch is not None:
                self._kvpact_watch.step_ended()

    def sleep(self, level: int = 1, *arguments: Any, **named: Any) -> Any:
        """Sleep like vLLM; the weights' digests are kept, and copies end before the KV memory goes.

        Raises KvpactError if they do not end; the worker is awake then.
        """
        self.kvpact_watch.before_sleep(level)
        if (connector := pact_connector(_connector())) is not None:
            connector.unregister_kv_caches()
        return super().sleep(level, *arguments, **named)

    def wake_up(self, tags: list[str] | None = None, *arguments: Any, **named: Any) -> Any:
        """Wake up like vLLM; the weights are compared with those before the sleep, and copies go on."""
        answer = super().wake_up(tags, *arguments, **named)
        connector = pact_connector(_connector())
        if connector is not None and (tags is None or "kv_cache" in tags):
            connector.restore_kv_caches()
        self.kvpact_watch.woke(tags)
        return answer


@contextmanager
def _in_step(worker: KvpactWorker) -> Iterator[None]:
    """Around a method that uses the models on behalf of the step."""
    touched = worker._kvpact_touched
    try:
        yield
    finally:
        worker._kvpact_touched = touched
        worker.kvpact_watch.step_ended()


def _within(name: str, context: Callable[[KvpactWorker], AbstractContextManager[None]]) -> Callable[..., Any]:
    """The base's method, run within `context`."""

    @wraps(getattr(KvpactWorker, name))
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        with context(self):
            return getattr(super(KvpactWorker, self), name)(*arguments, **named)

    return method


for _name in CHANGES_WEIGHTS:
    if _name not in vars(KvpactWorker) and hasattr(KvpactWorker, _name):
        setattr(KvpactWorker, _name, _within(_name, lambda worker: worker.kvpact_watch.changing()))
for _name in BETWEEN_STEPS:
    if hasattr(KvpactWorker, _name):
        setattr(KvpactWorker, _name, _within(_name, _in_step))


__all__ = ["KvpactWorker", "StepHook", "WeightsExtension", "base_worker", "bind_step_hook", "pact_connector"]
