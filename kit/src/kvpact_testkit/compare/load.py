"""Requests of a comparison: documents that come back in turns, or those of a recorded trace, as token ids.

Owns the formats of traces. The same numbers always give the same tokens; nothing here asks a server.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvpact.errors import ConfigError

MOONCAKE_BLOCK = 512
"""Tokens behind each number in a trace of Mooncake's format."""

QUESTION_TOKENS = 32
"""Tokens of a turn's question."""

LOWEST, HIGHEST = 10, 250
"""Token ids that are drawn: ordinary ones in every vocabulary, none of which ends an answer."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, the client that asks it after its former one was answered, and tokens of the answer."""

    client: int
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """`alone`: prompts that are asked one after the other; `requests`: those of all clients, each's in their order.

    `damages`: whether stores on this disk are asked over flipped bits too.
    """

    alone: Sequence[Sequence[int]]
    requests: Sequence[Request]
    answer_tokens: int
    damages: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        asked = [len(one.prompt) + one.max_tokens for one in self.requests]
        return max([*asked, *(len(prompt) + self.answer_tokens for prompt in self.alone)])

    @property
    def distinct_tokens(self) -> int:
        """Tokens whose keys and values differ, counted in pieces of `QUESTION_TOKENS`, and those of all answers."""
        pieces: set[int] = set()
        for prompt in (*self.alone, *(one.prompt for one in self.requests)):
            before = 0
            for at in range(0, len(prompt), QUESTION_TOKENS):
                before = hash((before, *prompt[at : at + QUESTION_TOKENS]))
                pieces.add(before)
        return len(pieces) * QUESTION_TOKENS + self.answer_tokens * (len(self.alone) + len(self.requests))

    def sums(self) -> dict[str, int]:
        """Figures of the load, for a document."""
        return {
            "prompts": len(self.alone),
            "prompt_tokens": sum(map(len, self.alone)),
            "requests": len(self.requests),
            "request_tokens": sum(len(one.prompt) for one in self.requests),
            "clients": len({one.client for one in self.requests}),
            "answer_tokens": self.answer_tokens,
            "distinct_tokens": self.distinct_tokens,
        }

    def described(self) -> str:
        """One sentence."""
        found = self.sums()
        return (
            f"{found['prompts']} prompts of {found['prompt_tokens']:,} tokens are asked alone, {found['requests']} "
            f"requests of {found['request_tokens']:,} tokens by {found['clients']} clients"
        )


def drawn(name: str, count: int) -> list[int]:
    """So many token ids, always the same for this name."""
    source = random.Random(name)
    return [source.randrange(LOWEST, HIGHEST) for _ in range(count)]


def documents(prompts: int, tokens: int, turns: int, clients: int, answer_tokens: int) -> Load:
    """`prompts` documents of `tokens` tokens, each asked alone; then each in `turns` turns by one of `clients` clients.

    A turn's prompt is the one before with an answer and a question more. A client asks all of its documents before the
    next turn of the first. Answers in prompts are the same for all engines, whatever they answered.
    """
    alone = [drawn(f"document {number}", tokens) for number in range(prompts)]
    requests = []
    for turn in range(turns):
        for number, document in enumerate(alone):
            said = drawn(f"turns of {number}", (turn + 1) * (QUESTION_TOKENS + answer_tokens) - answer_tokens)
            requests.append(Request(number % clients, [*document, *said], answer_tokens))
    return Load(alone, requests, answer_tokens)


def traced(
    path: Path, prompts: int, clients: int, answer_tokens: int, scale: int, chat: Callable[[Line], list[int]]
) -> Load:
    """The first `prompts` requests of a trace, all lengths divided by `scale`, asked by `clients` clients in its order.

    Requests of one session are asked by one client. Prompts that are asked alone have the lengths of the first eight,
    and other tokens. `chat` gives the tokens of a line with messages.

    Raises:
        ConfigError: the file cannot be read, or is of no known format.
    """
    requests: list[Request] = []
    for session, blocks, length, answer in islice(requests_of(path, scale), prompts):
        prompt = blocks if isinstance(blocks, list) else chat(blocks)
        client = session % clients
        requests.append(Request(client, prompt[: length or None], max(1, min(answer or answer_tokens, answer_tokens))))
    if not requests:
        raise ConfigError(f"{path} has no request")
    alone = [drawn(f"alone {number}", len(one.prompt)) for number, one in enumerate(requests[:8])]
    return Load(alone, requests, answer_tokens)


def requests_of(path: Path, scale: int) -> Iterator[tuple[int, list[int] | Line, int, int]]:
    """Yield of each request: session, tokens (or a line with messages), length to cut them to, tokens of its answer.

    Formats: Mooncake's (`hash_ids`), coding sessions (`runs`), chat requests (`messages`); a name that ends in .gz is
    unpacked. Raises ConfigError.
    """
    sessions: dict[object, int] = {}
    for session, blocks, block, line in blocks_of(path):
        number = sessions.setdefault(session, len(sessions))
        if block:
            size = max(1, block // scale)
            length = max(1, int(line.get("input_length") or line["in"]) // scale)
            answered = int(line.get("output_length") or line.get("out") or 0)
            answer = max(1, answered // scale) if answered else 0
            yield number, [token for name in blocks for token in drawn(f"block {name}", size)], length, answer
        else:
            yield number, line, 0, int(line.get("max_tokens") or 0)


def blocks_of(path: Path) -> Iterator[tuple[object, Sequence[object], int, Line]]:
    """Yield of each request: session, names of its prompt's blocks, tokens of a block (0: messages), the line."""
    kept: dict[object, list[int]] = {}
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        for number, line in enumerate(json.loads(words) for words in text.splitlines() if words.strip()):
            if "hash_ids" in line:
                yield tuple(line["hash_ids"][:2]), line["hash_ids"], MOONCAKE_BLOCK, line
            elif "runs" in line:
                session = line["trace"]
                added = [first + at for first, count in line["runs"] for at in range(count)]
                kept[session] = [*kept.get(session, [])[: line["keep"]], *added]
                yield session, [f"{session}/{block}" for block in kept[session]], int(line["bs"]), line
            elif "messages" in line:
                yield number, (), 0, line
            else:
                raise ConfigError(f"{path}: line {number + 1} has neither hash_ids nor runs nor messages")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is no trace: {type(error).__name__}: {error}") from None
