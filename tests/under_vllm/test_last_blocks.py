"""The last whole block of a request is stored, also where its last token is known only after the last step (H107)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from steps_that_fail import engine_over

from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from kvpact_testkit.vllm.model_groups import GEMMA, STATES

CONFIG = {"memory": "4MiB", "model_id": "testkit"}
TAIL = 7
"""Tokens of the prompts behind their first block."""

LENGTHS = [1, *range(BLOCK - TAIL, BLOCK - TAIL + 3), 2 * BLOCK - TAIL + 1, 3 * BLOCK]
"""Tokens of the answers. With one more than fills a block, the last step fills it with a token that is not known yet
where the step is planned before the one before it has ended."""


def say(engine: VllmEngine, name: str, tokens: list[int], length: int) -> list[int]:
    """The engine's answer; what it computed is stored then, as far as it ever is."""
    engine.add(name, tokens, max_tokens=length)
    assert engine.finish(name)
    assert engine.drain()
    return engine.observed.outputs[name]


def promised(engine: VllmEngine, name: str) -> int:
    return max(probe.answer or 0 for probe in engine.observed.probes if probe.request_id == name)


SCHEDULING = [{}, {"overlap": True}, {"overlap": True, "draft_tokens": 3}]


@pytest.mark.parametrize("scheduling", SCHEDULING, ids=["one step at a time", "asynchronous", "asynchronous drafts"])
@pytest.mark.parametrize("save", ["eager", "lazy"])
def test_h107_every_whole_block_of_an_answer_is_stored(save: str, scheduling: dict[str, Any]) -> None:
    room = {"num_blocks": 14} if save == "lazy" else {}
    with engine_over({**CONFIG, "save": save}, **room, **scheduling) as engine:
        for length in LENGTHS:
            asked = prompt(length, 1, TAIL)
            said = say(engine, f"first {length}", asked, length)
            if save == "lazy":
                say(engine, f"needs all blocks after {length}", prompt(1_000 + length, 11), 1)
            engine.forget_computed()
            say(engine, f"again {length}", [*asked, *said, 1, 2], 1)
            whole = (len(asked) + length - 1) // BLOCK * BLOCK  # nobody computes the last token
            assert promised(engine, f"again {length}") == whole, f"an answer of {length} tokens"
            assert said == engine.expected(f"first {length}")
            assert engine.observed.outputs[f"again {length}"] == engine.expected(f"again {length}")
            engine.forget_computed()


@pytest.mark.parametrize("groups", [GEMMA, STATES], ids=["windows", "states"])
def test_h107_what_is_stored_of_several_groups_is_right(groups: Any) -> None:
    """A state runs on with the request: none is stored that is not the block's own."""
    with engine_over(CONFIG, groups=groups, overlap=True) as engine:
        for length in LENGTHS:
            asked = prompt(length, 3, TAIL)
            said = say(engine, f"first {length}", asked, length)
            engine.forget_computed()
            again = say(engine, f"again {length}", [*asked, *said, 1, 2], 4)
            assert promised(engine, f"again {length}") >= 2 * BLOCK
            assert again == engine.expected(f"again {length}")
            assert not engine.observed.wrong_slots
            engine.forget_computed()


@pytest.mark.parametrize("while_computing", [False, True])
def test_h107_of_a_request_that_is_cancelled_nothing_is_stored_that_was_not_computed(while_computing: bool) -> None:
    with engine_over(CONFIG, overlap=True) as engine:
        for steps in range(1, 2 * BLOCK, 5):
            asked = prompt(steps, 1, TAIL)
            engine.add(f"first {steps}", asked, max_tokens=3 * BLOCK)
            engine.step(steps)
            engine.abort(f"first {steps}", during_step=while_computing)
            engine.step()
            assert engine.drain()
            said = engine.observed.outputs[f"first {steps}"]
            engine.forget_computed()
            again = say(engine, f"again {steps}", [*asked, *said, 1, 2], 2)
            assert again == engine.expected(f"again {steps}")
            assert not engine.held_blocks
