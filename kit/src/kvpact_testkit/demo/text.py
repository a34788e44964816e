"""Real text for the demonstration: kvpact's own documentation and source, cut into long documents with questions.

Owns the questions. Never needs a network or a file outside the two packages: a checkout adds its Markdown pages,
installed wheels have their modules with their docstrings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kvpact
import kvpact_testkit

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QUESTIONS = (
    "Question: what becomes of a promise when the scheduler never commits it?\nAnswer:",
    "Question: who may evict a stored block while a lease on it is held?\nAnswer:",
    "Question: which tokens are computed again after a load failed in part?\nAnswer:",
    "Question: what does a block key depend on, and what does it never depend on?\nAnswer:",
    "Question: when does a saved block become visible to a lookup?\nAnswer:",
    "Question: how does the disk tier know that a record was torn?\nAnswer:",
    "Question: which process owns the index, and what do workers do?\nAnswer:",
    "Question: how long may a request wait for a lower tier?\nAnswer:",
)


def corpus() -> str:
    """The text of all files, each under its name, in a fixed order."""
    packages = [Path(package.__file__ or "").resolve().parent for package in (kvpact, kvpact_testkit)]
    checkout = packages[0].parents[1]
    pages = [path for path in (checkout / "README.md", *sorted((checkout / "docs").rglob("*.md"))) if path.is_file()]
    named = [(path.relative_to(checkout), path) for path in pages]
    named += [
        (path.relative_to(package.parent), path) for package in packages for path in sorted(package.rglob("*.py"))
    ]
    return "\n".join(f"--- {name}\n{path.read_text()}" for name, path in named)


def documents(tokens: Sequence[int], count: int, length: int) -> Iterator[Sequence[int]]:
    """`count` windows of `length` tokens, spread evenly over `tokens`; they overlap where the text is short."""
    if len(tokens) < length + count:
        raise ValueError(
            f"{count} documents of {length} tokens need a text of at least {length + count}, not {len(tokens)}"
        )
    stride = (len(tokens) - length) // (count - 1) if count > 1 else 0
    for number in range(count):
        yield tokens[number * min(stride, length) :][:length]


def prompts(
    tokenizer: Tokenizer, body: Sequence[int], *, reading: str, document_tokens: int, count: int
) -> list[list[int]]:
    """`count` distinct prompts: `document_tokens` of a document from `body` that names the `reading`, then a question.

    The reading stands at the very start, so prompts of different readings share no block.
    """
    opening = tokenizer.encode(f"Document, {reading}.\n").ids
    asked = [tokenizer.encode(f"\n{QUESTIONS[number % len(QUESTIONS)]}").ids for number in range(count)]
    pieces = documents(body, count, document_tokens - len(opening))
    return [[*opening, *piece, *question] for piece, question in zip(pieces, asked, strict=True)]
