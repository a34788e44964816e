"""What a worker of vLLM has in its KV memory, as digests in a file: a `worker_extension_cls`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blake3 import blake3


class KVDigests:
    """A method for vLLM's workers."""

    model_runner: Any
    rank: int

    def write_kv_digests(self, directory: str) -> None:
        """Write a digest over all layers for each block that is not zero, a line each, to a file of this rank."""
        import torch

        layers = [tensor.contiguous().view(torch.uint8).flatten(1).numpy() for tensor in self.model_runner.kv_caches]
        blocks = [b"".join(layer[block].tobytes() for layer in layers) for block in range(len(layers[0]))]
        digests = [blake3(block).hexdigest() for block in blocks if any(block)]
        Path(directory, f"rank-{self.rank}").write_text("\n".join(digests))
