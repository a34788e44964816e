"""A worker whose states can be made wrong: a `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch

from kvpact_testkit.vllm.state_copies import StateCopies


class WrongStates(StateCopies):
    """A method for vLLM's workers."""

    model_runner: Any

    def negate_states(self, layer: int, kind: int) -> None:
        """Turn the signs of all of one layer's states: 0 of its convolution, 1 of its recurrence. Again: as before."""
        layers = self.model_runner.compilation_config.static_forward_context.values()
        with_states = [one for one in layers if isinstance(getattr(one, "kv_cache", None), list | tuple)]
        with torch.inference_mode():
            with_states[layer].kv_cache[kind].neg_()
