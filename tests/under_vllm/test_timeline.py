"""The setting `timeline`: a line for each call that loads blocks for a request, and not one call more without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.vllm.scheduler import KvpactScheduler
from vllm_played_engine import PlayedEngine, make_prompt

BLOCKS = 4
PROMPT = make_prompt(11, BLOCKS, 3)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """In the order of their ends."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: float(line["ended"]))


@pytest.mark.parametrize("scheduler_class", [Scheduler, KvpactScheduler])
@pytest.mark.parametrize("synchronous", [True, False], ids=["sync", "async"])
def test_a_hit_is_looked_up_admitted_ordered_begun_and_seen_in_this_order(
    tmp_path: Path, synchronous: bool, scheduler_class: type[Scheduler]
) -> None:
    budget = "64MiB" if synchronous else 0
    engine = PlayedEngine(
        tmp_path,
        scheduler_class=scheduler_class,
        timeline=str(tmp_path / "lines"),
        sync_load_budget=budget,
        recompute_if_faster=False,
    )
    engine.generate(PROMPT)
    engine.forget()
    known = len(lines_in(tmp_path / "lines"))
    hit = engine.generate(PROMPT)
    name = hit.request.request_id
    lines = lines_in(tmp_path / "lines")[known:]
    assert all(line["began"] <= line["ended"] for line in lines)
    first: dict[str, int] = {}
    for number, line in enumerate(lines):
        first.setdefault(line["span"], number)
    spans = ["look-up", "admission", "order", "begin", "before"]
    assert spans == sorted(spans, key=first.__getitem__)
    assert lines[first["look-up"]]["request"] == lines[first["admission"]]["request"] == name
    assert lines[first["admission"]]["tokens"] == hit.cached_tokens > 0
    assert lines[first["order"]]["loads"] == [[name, BLOCKS, synchronous]]
    ((job, request, blocks, waits),) = lines[first["begin"]]["loads"]
    assert (request, blocks, waits) == (name, BLOCKS, synchronous)
    (seen,) = (number for number, line in enumerate(lines) if line["span"] == "seen" and job in line["jobs"])
    (admitted,) = (number for number, line in enumerate(lines) if name in line.get("admits", ()))
    assert first["begin"] < seen
    assert (seen < admitted) != synchronous, "a step waits for the load, or a later one computes what is left"
    engine.close()


def calls(step: Callable[[], object]) -> int:
    """Python functions that are called."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found)


def test_no_call_is_made_for_a_timeline_that_is_not_asked_for(tmp_path: Path) -> None:
    """Neither half has a method of its own in the place of its class's."""
    engines = []
    for number, timeline in enumerate((None, str(tmp_path / "lines"))):
        (tmp_path / str(number)).mkdir()
        engines.append(PlayedEngine(tmp_path / str(number), timeline=timeline))
    followed = {"prepare_external_match", "commit_external_match", "build_connector_meta"}
    assert [followed & set(vars(engine.connector)) for engine in engines] == [set(), followed]
    counts = []
    for engine in engines:
        engine.generate(PROMPT, max_tokens=8)
        engine.add(PROMPT, max_tokens=8)
        for _ in range(3):
            engine.step()
        counts.append(calls(engine.step))
        engine.run()
        engine.close()
    assert counts[0] < counts[1]
