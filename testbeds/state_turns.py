"""Conversations of 10 to 40 turns out of recorded traces: prompts, answers, and the tokens that they share.

A trace says which blocks of prompts are equal, and how long answers are. A prompt *goes on* from an earlier one if it
begins with all whole blocks of that one; then its tokens after those are the rest of the earlier prompt and its answer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST, MOST = 10, 40
"""Turns of a conversation; longer ones are cut."""

Tokens = NDArray[np.int64]

_ALONE = 1 << 30
"""Tokens from here on stand in one turn alone."""


@dataclass(eq=False, slots=True)
class Turn:
    """A prompt and its answer; `blocks` names each piece of `block_size` tokens of the prompt, the last one partial."""

    number: int
    conversation: int
    at: float
    block_size: int
    blocks: Sequence[int]
    prompt: int
    """Tokens."""
    answer: int
    """Tokens."""
    next: Turn | None = None
    """The turn that goes on from it."""

    @property
    def whole(self) -> int:
        """Tokens of the prompt's whole blocks."""
        return self.prompt // self.block_size * self.block_size

    def tokens(self, start: int, end: int) -> Tokens:
        """Tokens [start, end) of the prompt and its answer."""
        whole = self.whole
        size = self.block_size
        if start >= whole:
            if self.next is not None and start < self.next.prompt + self.next.answer:
                return self.next.tokens(start, end)
            return np.full(end - start, _ALONE + self.number)
        first, last = start // size, -(-min(end, whole) // size)
        named = np.repeat(np.array(self.blocks[first:last]), size)[
            start - first * size : min(end, whole) - first * size
        ]
        return named if end <= whole else np.concatenate([named, self.tokens(whole, end)])


def goes_on(turn: Turn, earlier: Turn) -> bool:
    """True if a prompt begins with all whole blocks of an earlier one, of which there are some."""
    whole = earlier.prompt // earlier.block_size
    return whole > 0 and len(turn.blocks) > whole and turn.blocks[:whole] == earlier.blocks[:whole]


def linked(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Turns of one conversation, in order, each with the first one that goes on from it."""
    for place, turn in enumerate(turns):
        turn.next = next((later for later in turns[place + 1 :] if goes_on(later, turn)), None)
    return turns


def in_order(conversations: Iterable[Sequence[Turn]]) -> list[Turn]:
    """The turns of all conversations by time, numbered anew."""
    turns = sorted((turn for turns in conversations for turn in linked(turns)), key=lambda turn: turn.at)
    for number, turn in enumerate(turns):
        turn.number = number
    return turns


def mooncake_turns(path: Path, conversations: int, block_size: int = 512) -> list[Turn]:
    """The first conversations of Mooncake's trace that have so many turns: prompts that go on from one another."""
    last_with: dict[int, Turn] = {}
    found: dict[int, list[Turn]] = {}
    for number, line in enumerate(map(json.loads, path.read_text().splitlines())):
        blocks = line["hash_ids"]
        turn = Turn(
            number, number, line["timestamp"] / 1e3, block_size, blocks, line["input_length"], line["output_length"]
        )
        before = next((last_with[block] for block in reversed(blocks) if block in last_with), None)
        if before is not None and len(before.blocks) > 2 and goes_on(turn, before):
            turn.conversation = before.conversation
        found.setdefault(turn.conversation, []).append(turn)
        last_with.update(dict.fromkeys(blocks, turn))
    long_enough = [turns[:MOST] for turns in found.values() if len(turns) >= LEAST]
    return in_order(long_enough[:conversations])


def coding_turns(path: Path, conversations: int) -> list[Turn]:
    """Every so many-th coding session that has so many turns. They begin evenly within the time of a median one."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt") as lines:
        for line in map(json.loads, lines):
            sessions.setdefault(line["trace"], []).append(line)
    fit = [asked[:MOST] for asked in sessions.values() if len(asked) >= LEAST]
    some = fit[:: max(1, len(fit) // conversations)][:conversations]
    lasting = sorted(asked[-1]["t"] for asked in some)[len(some) // 2]
    return in_order(_session(place, asked, place * lasting / len(some)) for place, asked in enumerate(some))


def _session(conversation: int, asked: Sequence[dict[str, Any]], begin: float) -> list[Turn]:
    names: list[int] = []
    turns = []
    for one in asked:
        names = names[: one["keep"]] + [first + at for first, count in one["runs"] for at in range(count)]
        blocks = [conversation << 20 | name for name in names]
        turns.append(Turn(0, conversation, begin + one["t"], one["bs"], blocks, one["in"], one["out"]))
    return turns


def pieces(turns: Sequence[Turn], unit: int) -> Iterator[tuple[Turn, list[int]]]:
    """Each turn, with a name for each whole unit of its prompt and answer; equal names stand for equal prefixes."""
    names: dict[tuple[int, bytes], int] = {}
    for turn in turns:
        whole = (turn.prompt + turn.answer) // unit
        tokens = turn.tokens(0, whole * unit)
        chain = []
        name = 0
        for at in range(whole):
            piece = name, tokens[at * unit : (at + 1) * unit].tobytes()
            name = names.setdefault(piece, len(names) + 1)
            chain.append(name)
        yield turn, chain
