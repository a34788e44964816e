"""Messages between the scheduler's process and the workers: what was said is heard, and only by the same install."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any, get_args, get_type_hints

import pytest

from kvpact import __version__, wire
from kvpact.contract import (
    JobOutcome,
    JobQuery,
    LoadJob,
    SaveJob,
    StepLookup,
    StepWork,
    StoreRead,
    WorkerReport,
)
from kvpact.errors import ConfigError, DataError
from kvpact.identity.keys import BlockKey
from kvpact.memory.arena import SegmentAddress
from kvpact.ranges import BlockRange, RangeSet
from kvpact.wire import AdapterUsed, SharedTierConfig, StepMessage, UnorderedLoad, WorkerHandshake

WORK = StepWork(
    loads=(LoadJob(1, "r", 0, (3, 4), (7, 8), synchronous=False),),
    saves=(SaveJob(2, "r", 2, (5,), (9,)),),
    inquiries=(JobQuery(1, BlockRange(0, 2)),),
    recalls=(1,),
    overdue=(1,),
    lookups=(StepLookup(2, "r", 32, 16, (BlockKey(b"key"),)),),
    max_copies=1083,
    max_load_bytes=1 << 28,
)
STEP = StepMessage(
    WORK,
    broken=(UnorderedLoad("r", (1,), True),),
    store=SharedTierConfig("namespace", 16, (4096,), ((0, 1),)),
    adapters=(AdapterUsed(1, b"stamp", (7,)),),
    changes=(0,),
)
HANDSHAKE = WorkerHandshake(
    0, SegmentAddress(1, 2, 3, 4096, 5, 6, "boot", "pid"), facts={"dtype": "bfloat16"}, group_bytes=(4096, 0)
)
REPORT = WorkerReport({0: {1: JobOutcome(RangeSet.of(BlockRange(0, 2)))}}, (StoreRead(2, 0, BlockRange(2, 1)),))

MESSAGES = [
    (StepMessage, STEP),
    (StepMessage, StepMessage()),
    (WorkerHandshake, HANDSHAKE),
    (WorkerReport, REPORT),
    (WorkerReport, WorkerReport({0: {}})),
]
SCHEMAS = {
    1: "788f2a4cd9556002",
    2: "2f42290a7d9d4071",
    3: "6794babd79d13237",
    4: "a32e33424380144b",
    5: "374179eaf51dc03b",
    6: "d1d4fd01a38f89ab",
}
"""Version of the messages -> digest of their fields."""


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
def test_what_was_said_is_heard(kind: type[Any], message: Any) -> None:
    assert wire.decode(wire.encode(message), kind) == message


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
@pytest.mark.parametrize(
    ("header", "sender"),
    [
        (f"kvpact {__version__}, messages {wire.VERSION + 1}\n", f"kvpact {__version__}, messages {wire.VERSION + 1};"),
        ("kvpact 9.9.9, messages 1\n", "kvpact 9.9.9, messages 1;"),
        ("", "another kvpact;"),
    ],
    ids=["other messages", "other release", "no version"],
)
def test_a_message_of_another_install_is_refused_with_both_named(
    kind: type[Any], message: Any, header: str, sender: str
) -> None:
    said = header.encode() + wire.encode(message).partition(b"\n")[2]
    with pytest.raises(ConfigError) as refused:
        wire.decode(said, kind)
    assert f"comes from {sender} this process has kvpact {__version__}, messages {wire.VERSION}, from " in str(
        refused.value
    )
    assert "install the same release of kvpact for all of the engine's processes" in str(refused.value)


def test_what_is_cut_off_is_no_message() -> None:
    with pytest.raises(DataError):
        wire.decode(wire.encode(REPORT)[:-1], WorkerReport)


def test_messages_with_other_fields_have_another_version() -> None:
    """If this fails, raise `wire.VERSION` and put the new digest beside it."""
    meetings = {wire.MeetingQuestion, wire.MeetingOffer}
    kinds: set[type] = {StepMessage, WorkerHandshake, WorkerReport, wire.LentSegment, *meetings}
    text = "\n".join(sorted(described(kinds)))
    assert SCHEMAS[wire.VERSION] == blake2b(text.encode(), digest_size=8).hexdigest()


def described(kinds: set[type], seen: frozenset[type] = frozenset()) -> set[str]:
    """A line for each field of these message types and of all within them, as the source has it."""
    lines, inner = set[str](), set[type]()
    for kind in kinds:
        lines |= {f"{kind.__name__}.{field.name}: {field.type}" for field in fields(kind)}
        waiting = list(get_type_hints(kind).values())
        while waiting:
            hint = waiting.pop()
            waiting += get_args(hint)
            if isinstance(hint, type) and is_dataclass(hint):
                inner.add(hint)
    new = inner - seen - kinds
    return lines | (described(new, seen | kinds) if new else set())
