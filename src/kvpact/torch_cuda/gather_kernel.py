"""A Triton kernel that copies scattered runs of bytes into the device's memory. Importing this imports Triton.

Owns nothing but the kernel: each program takes every n-th run, word by word. Host memory is read where it lies, which
registered memory allows.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_WORDS = 1024
"""Words that a program copies at a time: 8 KiB."""

WORD_BYTES = 8


@triton.jit  # type: ignore[untyped-decorator]
def copy_runs(sources, targets, num_words, num_runs, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """`num_words` words of 8 bytes from each of the addresses `sources` to that of `targets`; both are int64."""
    # while, not range: Triton's interpreter cannot count to a value that it has loaded (triton#9171)
    run = tl.program_id(0)
    while run < num_runs:
        source = tl.load(sources + run).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + run).to(tl.pointer_type(tl.int64))
        start = 0
        while start < num_words:
            at = start + tl.arange(0, chunk)
            inside = at < num_words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
            start += chunk
        run += tl.num_programs(0)
