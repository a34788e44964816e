"""Hits of conversations of 10 to 40 turns on models with states: kvpact's cache, vLLM's own, fixed shares for states.

No engine: vLLM's steps and offers of states are played over `PactCache` (testbeds/state_engine.py), its engine's own
cache always empty. "enough": with memory for everything; `own` is vLLM's prefix cache so, `below_units` how many units
of alignment a turn kvpact is below it. Interval "0": vLLM's default of `--prefix-cache-retention-interval`, which keeps
no states of answers; all other rows keep each ("unit"). "quarter": memory for a quarter of what all conversations need,
one state each, with kvpact's rule and with a fixed share of the memory for states. "disk": the same on a disk, by the
states that are written (`DiskContent`). `lost_in_last_step`: boundaries
within a request's last 4 tokens, whose states vLLM does not offer when it drafts 3. Traces: the two of `data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.needs import find_testbeds, require_known

if TYPE_CHECKING:
    from state_turns import Turn

find_testbeds()

MODELS = ("qwen3-next", "qwen3.5-27b", "nemotron-3-nano", "kimi-linear", "jamba")
TRACES = ("mooncake", "coding")
DATA = Path(__file__).parents[2] / "shared" / "data"
STEP_WITH_DRAFTS = 4


def turns_of(trace: str, data: Path, conversations: int) -> list[Turn]:
    """The conversations of a trace."""
    from state_turns import coding_turns, mooncake_turns

    if not data.is_dir():
        raise SystemExit(f"--data: {data} is no folder; it is the one with the two traces")
    if trace == "mooncake":
        return mooncake_turns(data / "mooncake_conversation.jsonl", conversations)
    return coding_turns(data / "coding_sessions_delta.jsonl.gz", conversations)


def hits(name: str, turns: Sequence[Turn], memory: int, share: int | None = None, keeps_all: bool = True) -> int:
    """Tokens that kvpact has of all prompts."""
    from hybrid_models import read_model
    from state_engine import StateEngine

    engine = StateEngine(read_model(name), memory, share, keeps_all)
    found = sum(map(engine.serve, turns))
    engine.cache.check()
    return found


def rows(
    models: tuple[str, ...] = MODELS,
    traces: tuple[str, ...] = TRACES,
    shares: Sequence[int] = (5, 10, 15, 20, 30, 40, 60, 80),
    conversations: int = 20,
    data: Path = DATA,
) -> Iterator[dict[str, Any]]:
    """One row of each model, trace, memory, and share."""
    from hybrid_models import read_model, rounded
    from state_engine import DiskContent, OwnCache, bytes_needed
    from state_turns import pieces

    require_known("--models", models, MODELS)
    require_known("--traces", traces, TRACES)
    for trace in traces:
        turns = turns_of(trace, data, conversations)
        tokens = sum(turn.prompt for turn in turns)
        for name in models:
            model = read_model(name)
            own = OwnCache(model.groups[0].group.block_size)
            most = sum(own.serve(turn, names) for turn, names in pieces(turns, own.unit))
            needed = bytes_needed(model, len(own.blocks), len({turn.conversation for turn in turns}))
            ends = [turn.prompt + turn.answer - 1 for turn in turns]
            lost = sum(end // own.unit > max(0, end - STEP_WITH_DRAFTS) // own.unit for end in ends)
            row: dict[str, Any] = {"trace": trace, "model": name, "unit": own.unit, "turns": len(turns)}
            enough = bytes_needed(model, len(own.blocks), len(own.states)) * 5 // 4
            default = OwnCache(own.unit, keeps_all=False)
            fewer = sum(default.serve(turn, names) for turn, names in pieces(turns, own.unit))
            for interval, its, keeps_all in (("unit", most, True), ("0", fewer, False)):
                found = hits(name, turns, enough, keeps_all=keeps_all)
                yield row | {
                    "memory": "enough",
                    "interval": interval,
                    "gib": round(enough / 2**30, 1),
                    "own_percent": round(100 * its / tokens, 2),
                    "hit_percent": round(100 * found / tokens, 2),
                    "below_units": round((its - found) / own.unit / len(turns), 4),
                    "lost_in_last_step": lost,
                }
            slots = needed // 4 // max(rounded(one.payload_bytes) for one in model.groups)
            for writes in ("all", "last", "default"):
                disk = DiskContent(model, slots, writes)
                found = sum(disk.serve(turn, names) for turn, names in pieces(turns, own.unit))
                hit = round(100 * found / tokens, 2)
                yield row | {
                    "memory": "disk",
                    "gib": round(needed / 4 / 2**30, 1),
                    "states": writes,
                    "hit_percent": hit,
                }
            for share in (None, *shares):
                found = hits(name, turns, needed // 4, share)
                yield row | {
                    "memory": "quarter",
                    "gib": round(needed / 4 / 2**30, 1),
                    "states": "kvpact's rule" if share is None else f"{share} %",
                    "hit_percent": round(100 * found / tokens, 2),
                }
