"""A worker's watch over its own weights: announced changes are recorded before they happen, others are found later.

Owns when which check is made; writes its findings into the rank's notice, which the scheduler's half reads before
anything else (`kvpact.cache.weights_watch`). `kvpact.vllm.worker` calls this.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvpact.identity.notices import NoticeWriter
from kvpact.vllm.compat.objects import weight_loader
from kvpact.vllm.model_digest import Sample, digest_of, models_of

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

GAP_SECONDS = 0.05
"""Seconds without a step after which an engine may have been given other weights; under load a step takes less."""

RARELY_SECONDS = 10.0
"""The sample is compared at least this often, in seconds. It takes some milliseconds."""

SLEEP_TAGS = frozenset(("weights", "kv_cache"))
"""The parts that vLLM puts to sleep and may wake one by one."""


class ModelWatch:
    """Watches one worker's models. Reports nothing until `bind`, because nothing is stored before that."""

    def __init__(self, worker: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._notices: NoticeWriter | None = None
        self._sample: Sample | None = None
        """The weights at the last step; None if they are known to have changed since."""
        self._samples = True
        self._step_ended = self._sampled = clock()
        self._asleep: set[str] = set()
        self._before_sleep: tuple[dict[str, int | None], int, int] | None = None
        """The digests when it fell asleep, and the numbers of changes and versions recorded by then."""
        self._asked: set[int] = set()
        """The models whose `load_weights` records that it changes them."""

    def bind(self, notices: NoticeWriter, *, samples: bool) -> None:
        """The rank's notice is there. `samples` is False if the engine itself moves weights between steps."""
        self._notices = notices
        self._samples = samples

    # Recorded changes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of weights. It is recorded before too: a process that dies half-way has changed them."""
        self._say_change()
        try:
            yield
        finally:
            self._say_change()

    def watch_loading(self) -> None:
        """The models are there: from now on their `load_weights` records that it changes them, whatever calls it."""
        for model in models_of(self._worker):
            load = weight_loader(model)
            if load is not None and id(model) not in self._asked:
                self._asked.add(id(model))
                model.load_weights = self.changing()(load)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Around a possible change of weights: it counts as a change if one number differs, or if it fails."""
        if self._notices is None:
            yield
            return
        before = self._digest()
        try:
            yield
        except BaseException:
            self._say_change()
            raise
        if before is None or self._digest() != before:
            self._say_change()

    def set_word(self, word: str) -> None:
        """Record the weights' version; an unrecorded change is recorded first, so that the version applies to it."""
        if self._notices is not None:
            self.before_step(touched=True)
            self._notices.set_word(word)

    # Other changes

    def before_step(self, *, touched: bool) -> None:
        """The engine is about to compute. `touched`: the worker's models were requested since the last step.

        If the weights have changed unrecorded, the worker's half refuses the copies that were ordered for this step.
        """
        if self._notices is None or not self._samples:
            return
        now = self._clock()
        if self._sample is None:
            self._sample = self._new_sample()
            self._sampled = now
        elif touched or now - self._step_ended > GAP_SECONDS or now - self._sampled > RARELY_SECONDS:
            self._sampled = now
            if not self._read(self._sample.is_still_true):
                logger.warning(
                    "kvpact: the weights have changed without notice; nothing stored before is served any more"
                )
                self._say_change()
                self._sample = self._new_sample()

    def step_ended(self) -> None:
        """The engine has computed the step."""
        self._step_ended = self._clock()

    # Sleep

    def before_sleep(self, level: int) -> None:
        """The worker falls asleep; at level 2 its weights are gone afterwards."""
        if self._notices is None:
            return
        self.before_step(touched=True)
        if level > 1:
            self._say_change()
        digests = self._digest() if level == 1 else None
        self._asleep = set(SLEEP_TAGS)
        words = self._notices.words
        self._before_sleep = (digests, self._notices.changes, words) if digests is not None else None

    def woke(self, tags: Sequence[str] | None) -> None:
        """The parts that the tags name are awake again; all, without tags. Once all is awake, unchanged weights are
        reported."""
        self._asleep -= set(tags) if tags else self._asleep
        if self._asleep or self._before_sleep is None or self._notices is None:
            return
        digests, changes, words = self._before_sleep
        self._before_sleep = None
        if (changes, words) != (self._notices.changes, self._notices.words):
            return
        if self._digest() == digests:
            self._notices.woke_equal()
        else:
            self._say_change()

    # Helpers

    def _say_change(self) -> None:
        self._sample = None
        if self._notices is not None:
            self._notices.weights_change()

    def _digest(self) -> dict[str, int | None] | None:
        """The digests; None, equal to nothing, if the models, or one tensor of them, cannot be read."""
        digests = self._read(digest_of)
        return None if digests is None or None in digests.values() else digests

    def _read(self, read: Callable[[Sequence[Any]], Found]) -> Found | None:
        """The result of `read` on the models; None if they cannot be read."""
        try:
            return read(models_of(self._worker))
        except Exception:
            logger.exception("kvpact: the weights could not be read; they count as changed")
            return None

    def _new_sample(self) -> Sample | None:
        try:
            return Sample(models_of(self._worker))
        except Exception:
            logger.exception("kvpact: the weights cannot be sampled; changes without notice go undetected")
            self._samples = False
            return None


def extension_methods(kind: type) -> list[str]:
    """The public methods of a worker class that come from neither vLLM, kvpact nor Python: those of an extension.

    vLLM adds a `worker_extension_cls` to the bases of the worker's class, and refuses one that redefines its names.
    """
    foreign: set[str] = set()
    ours: set[str] = set()
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        known = package in ("vllm", "kvpact") or package in sys.stdlib_module_names
        (ours if known else foreign).update(vars(base))
    public = {name: getattr(kind, name) for name in foreign - ours if not name.startswith("_")}
    return sorted(name for name, member in public.items() if callable(member) and not isinstance(member, type))
