"""What an engine without kvpact answers: cold, and from its own prefix cache up to any block.

A prefix hit is not bit-equal to a cold run (the chunks have other shapes), so an answer that reused `blocks` blocks
from kvpact is compared with one that reused as many from the engine's own cache. Those two must agree bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines import BLOCK
from kvpact_testkit.demo.engine import EngineProcess
from kvpact_testkit.demo.messages import Output


class References:
    """Answers of one engine that has no kvpact, each asked for once."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], int, int], Output] = {}

    def answer(self, prompt: Sequence[int], blocks: int, max_tokens: int = 4) -> Output:
        """The answer to `prompt` when the first `blocks` blocks come from the engine's own prefix cache."""
        key = (tuple(prompt), blocks, max_tokens)
        if key not in self._known:
            self._engine.reset_prefix_cache()
            if blocks:
                self._engine.generate([prompt[: blocks * BLOCK + 1]], max_tokens=1)
            (output,) = self._engine.generate([prompt], max_tokens=max_tokens)
            assert output.cached_tokens == blocks * BLOCK
            self._known[key] = output
        return self._known[key]

    def agree(self, prompt: Sequence[int], output: Output) -> bool:
        """Whether `output` is bit for bit what the engine says with as much of the prompt from its own cache."""
        return output.same_answer(self.answer(prompt, output.cached_tokens // BLOCK, len(output.tokens)))
