"""One real engine whose weights are changed in every way that vLLM leaves open, with no reset by its user.

The engine's own prefix cache is dropped without the connector each time, so that whatever is reused comes from kvpact.
What the weights of the moment say is asked with a salt that nobody has used: nothing stored can be served for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from trainer import ARGUMENTS, ENVIRONMENT, Trainer

from documents import block_with
from engines import BLOCK, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineError, EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(300)]

BLOCKS = 3
ALL = BLOCKS * BLOCK
LONG = 24
"""Blocks of a prompt that takes long enough to be paused in."""

SALTS = count()
SEEDS = count(100)
"""Of prompts and of weights."""

UNSAID = "the weights have changed without notice"


def new_seed() -> int:
    """For a prompt that no test has asked for, or weights that none has had."""
    return next(SEEDS)


class Trained(Trainer):
    """An engine with kvpact whose weights a test may change as it likes."""

    def ask(self, asked: list[int]) -> Output:
        """The answer, nothing of which comes from the engine's own prefix cache."""
        self.process.reset_prefix_cache()
        (output,) = self.process.generate([asked])
        return output

    def computed(self, asked: list[int]) -> Output:
        """What the weights say as they are."""
        (output,) = self.process.generate([asked], cache_salt=f"salt {next(SALTS)}")
        assert output.cached_tokens == 0
        return output

    def store(self, seed: int) -> tuple[list[int], Output]:
        """A new prompt that kvpact serves, and the answer to it."""
        asked = prompt(seed, BLOCKS)
        self.ask(asked)
        output = self.ask(asked)
        assert output.cached_tokens == BLOCKS * BLOCK
        assert output.same_answer(self.computed(asked))
        return asked, output

    def pause_behind(self, blocks: int) -> None:
        """Pause the engine in a prompt of which at least so many blocks are computed, as vLLM keeps its requests."""
        self.wait_until_computing(blocks * BLOCK)
        self.process.call("sleep", 0, "keep")
        self.rpc("assert_computing", blocks * BLOCK)

    def assert_change_is_seen(self, seed: int, change: Callable[[], object]) -> None:
        """After `change`, what was stored before is not served, and what comes after is."""
        asked, before = self.store(seed)
        change()
        after = self.ask(asked)
        now = self.computed(asked)
        assert not now.same_answer(before), "the weights are the same, so this test tells nothing"
        assert after.same_answer(now)
        again = self.ask(asked)
        assert again.cached_tokens == BLOCKS * BLOCK, "the new weights' own blocks are served"
        assert again.same_answer(now)

    def log(self) -> str:
        return self.process.log.read_text()


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    settings = EngineSettings(tiny_model, kvpact_transfer_config(memory="64MiB"), ARGUMENTS, ENVIRONMENT)
    with ForkedEngine(settings, tmp_path_factory.mktemp("weights") / "engine.log") as process:
        yield Trained(process.wait_ready())


def test_h32_an_extension_overwrites_the_weights(trained: Trained) -> None:
    trained.assert_change_is_seen(1, lambda: trained.overwrite(1))
    trained.assert_change_is_seen(2, lambda: trained.overwrite(2))
    assert UNSAID not in trained.log()


def test_an_extension_that_only_reads_costs_no_epoch(trained: Trained) -> None:
    asked, before = trained.store(3)
    trained.rpc("sum_of_weights")
    after = trained.ask(asked)
    assert after.cached_tokens == BLOCKS * BLOCK
    assert after.same_answer(before)


def test_h32_an_extension_fails_when_it_has_overwritten_the_weights(trained: Trained) -> None:
    def fail() -> None:
        with pytest.raises(EngineError, match="the trainer is gone"):
            trained.rpc("overwrite_and_fail", 3)

    trained.assert_change_is_seen(4, fail)


def test_h32_apply_model_overwrites_the_weights(trained: Trained) -> None:
    change = "weights_extension:overwrite_model"
    trained.assert_change_is_seen(5, lambda: trained.process.call("apply_model", function=change))


FORMS = pytest.mark.parametrize("form", ["layerwise", "in place"])


@FORMS
def test_h32_a_weight_transfer_engine_updates_the_weights(trained: Trained, form: str) -> None:
    trained.assert_change_is_seen(new_seed(), lambda: trained.transfer(new_seed(), form))
    trained.assert_change_is_seen(new_seed(), lambda: trained.transfer(new_seed(), form))
    assert UNSAID not in trained.log()


def test_h32_blocks_computed_before_a_weight_transfer_is_finished_are_not_served(trained: Trained) -> None:
    """The first of them when half of the weights are new. In a layerwise reload vLLM itself cannot compute."""
    asked, seed = [prompt(new_seed(), BLOCKS) for _ in range(2)], new_seed()
    trained.start_transfer("in place")
    for part in range(2):
        trained.deliver(seed, part=part, parts=2)
        trained.ask(asked[part])
        assert trained.ask(asked[part]).cached_tokens == ALL
    trained.finish_transfer()
    for tokens in asked:
        after = trained.ask(tokens)
        assert after.same_answer(trained.computed(tokens))
        assert after.cached_tokens == 0
    assert UNSAID not in trained.log()


def test_h32_a_weight_transfer_fails_when_half_of_the_weights_are_there(trained: Trained) -> None:
    def fail() -> None:
        trained.start_transfer("in place")
        with pytest.raises(EngineError, match="the trainer is gone"):
            trained.deliver(new_seed(), parts=2, fails=True)

    trained.assert_change_is_seen(new_seed(), fail)


@FORMS
def test_h38_a_request_that_runs_across_a_weight_transfer_stores_nothing(trained: Trained, form: str) -> None:
    """Its first blocks are of the old weights, so none of what it computes is stored under the new ones' word."""
    asked = prompt(new_seed(), LONG)
    trained.transfer(new_seed(), form)
    trained.process.reset_prefix_cache()
    trained.process.call("enqueue", [{"prompt_token_ids": asked}])
    trained.pause_behind(3)
    trained.transfer(new_seed(), form)
    trained.say(f"across {form}")
    trained.rpc("assert_computing", 3 * BLOCK)  # once it goes on, it may end before anybody looks
    trained.process.call("wake_up", ["scheduling"])
    trained.process.call("wait_for_completion")
    after = trained.ask(asked)
    assert after.same_answer(trained.computed(asked))
    assert after.cached_tokens == 0
    again = trained.ask(asked)
    assert again.cached_tokens == LONG * BLOCK, "the new weights' own blocks are served"
    assert again.same_answer(after)


@FORMS
def test_h37_an_engine_whose_weights_were_transferred_shares_under_their_word(trained: Trained, form: str) -> None:
    """The same weights come again: what was stored of them is served once their word is said, and no sooner."""
    stored, (first, second) = [], (new_seed(), new_seed())
    for seed in (first, second):
        trained.transfer(seed, form)
        trained.say(f"weights {seed}")
        stored.append(trained.store(new_seed()))
    (of_first, answer), (of_second, other_answer) = stored
    trained.transfer(first, form)
    assert trained.ask(of_first).cached_tokens == 0, "before the word"
    assert trained.ask(of_second).cached_tokens == 0, "of other weights"
    trained.rpc("kvpact_weights_changed")
    trained.say(f"weights {first}")
    again = trained.ask(of_first)
    assert again.cached_tokens == ALL
    assert again.same_answer(answer)
    after = trained.ask(of_second)
    assert after.cached_tokens == 0
    assert not after.same_answer(other_answer)


def test_h32_reload_weights(trained: Trained) -> None:
    trained.assert_change_is_seen(6, lambda: trained.rpc("reload_weights"))


class FrontEnd:
    """As much of `vllm.LLM` as the page on weights uses."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> None:
        self._process.call("collective_rpc", method, None, list(args))

    def reset_prefix_cache(self) -> None:
        self._process.reset_prefix_cache()


def test_h37_the_page_on_weights_takes_in_those_of_a_training_step(trained: Trained) -> None:
    """The weights of each step are those of the files, so what was stored under a step's word is right for it."""
    names: dict[str, Any] = {}
    exec(block_with("docs/weights.md", "take_in_weights").text, names)
    trained.overwrite(10)
    trained.assert_change_is_seen(13, lambda: names["take_in_weights"](FrontEnd(trained.process), 1))
    asked, before = trained.store(14)
    names["take_in_weights"](FrontEnd(trained.process), 2)
    assert trained.ask(asked).cached_tokens == 0
    names["take_in_weights"](FrontEnd(trained.process), 1)
    again = trained.ask(asked)
    assert again.cached_tokens == BLOCKS * BLOCK
    assert again.same_answer(before)
    assert "is refused" not in trained.log()


def test_h32_a_callable_overwrites_the_weights_and_nobody_says_so(trained: Trained) -> None:
    """It passes through no method of the worker; the step after it finds the change before it loads or saves."""
    assert UNSAID not in trained.log()
    change = "weights_extension:overwrite_through_worker"
    trained.assert_change_is_seen(7, lambda: trained.process.call("collective_rpc", None, [4], function=change))
    assert trained.log().count(UNSAID) == 1


def test_h37_engines_that_say_the_same_word_for_their_weights_share(trained: Trained) -> None:
    """One engine after itself: what it stored under a word is there again when the word is, and no sooner."""
    trained.overwrite(5)
    trained.rpc("kvpact_set_weights_version", "step 5")
    asked, of_five = trained.store(8)
    trained.overwrite(6)
    trained.rpc("kvpact_set_weights_version", "step 6")
    of_six = trained.ask(asked)
    assert of_six.cached_tokens == 0
    assert of_six.same_answer(trained.computed(asked))
    trained.overwrite(5)
    assert trained.ask(asked).cached_tokens == 0, "before the word"
    trained.rpc("kvpact_weights_changed")
    trained.rpc("kvpact_set_weights_version", "step 5")
    again = trained.ask(asked)
    assert again.cached_tokens == BLOCKS * BLOCK
    assert again.same_answer(of_five)


def test_h37_the_word_from_before_the_change_is_refused(trained: Trained) -> None:
    trained.overwrite(7)
    trained.rpc("kvpact_set_weights_version", "step 7")
    asked, of_seven = trained.store(9)
    trained.overwrite(8)
    for _ in range(2):
        trained.rpc("kvpact_set_weights_version", "step 7")
        after = trained.ask(asked)
        assert not after.same_answer(of_seven)
        assert after.same_answer(trained.computed(asked))
    assert trained.log().count("the weights version 'step 7' is refused") == 1


def test_a_sleep_from_which_the_same_weights_wake_costs_nothing(trained: Trained) -> None:
    """On CPUs vLLM puts nothing to sleep, but resets and calls as it does where it does."""
    asked, before = trained.store(10)
    for _ in range(2):
        trained.process.call("sleep", 1)
        trained.process.call("wake_up")
        after = trained.ask(asked)
        assert after.cached_tokens == BLOCKS * BLOCK
        assert after.same_answer(before)


def test_h32_other_weights_wake_from_a_sleep(trained: Trained) -> None:
    def sleep_and_change() -> None:
        trained.process.call("sleep", 1)
        trained.process.call("wake_up", ["weights"])
        trained.overwrite(9)
        trained.process.call("wake_up", ["kv_cache"])

    trained.assert_change_is_seen(11, sleep_and_change)
    asked, before = trained.store(12)
    trained.process.call("sleep", 2)
    trained.process.call("wake_up")
    after = trained.ask(asked)
    assert after.cached_tokens == 0, "whatever is there again: at level 2 the weights were thrown away"
    assert after.same_answer(before), "on a CPU they were not"
