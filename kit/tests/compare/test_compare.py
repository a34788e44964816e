"""What `kvpact compare` says of servers with planted faults, each in its row. No engine runs here."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from math import inf
from pathlib import Path

import pytest
import typer
from rich.console import Console

from kvpact.errors import ConfigError
from kvpact_testkit.cli.compare import chosen_subjects, size_of
from kvpact_testkit.compare.comparison import Comparison
from kvpact_testkit.compare.estimate import estimated, over_sizes, prompt_of, read_prompts
from kvpact_testkit.compare.judge import Reference, Row, Spread, Wrong, percentile, ranked, row
from kvpact_testkit.compare.load import documents, traced
from kvpact_testkit.compare.report import cells, chart, notes
from kvpact_testkit.compare.run import Bar, option
from kvpact_testkit.compare.server import Answer, Server, ServerError, end_session, last_sentence
from kvpact_testkit.compare.sizes import SPARE, Sizes, Speed, fit, seconds_of
from kvpact_testkit.compare.stores import disk_bytes, flip_in_blocks
from kvpact_testkit.compare.subjects import NONE, SUBJECTS, Launch, Room, Subject
from kvpact_testkit.compare.visit import Step, Visit, served

PLANTED = [sys.executable, str(Path(__file__).with_name("planted_server.py"))]
SMALL = Sizes(prompts=4, tokens=120, turns=2, clients=2, answer_tokens=6)

FILES = 4 + 8 + 1
"""Files of a planted store: of the prompts asked alone, the load's requests, and one to warm up."""


def planted(key: str, *options: str, bound: int | None = None) -> Subject:
    """A subject whose server has these faults; with a bound it has a store."""

    def configure(room: Room, stack: ExitStack) -> Launch:
        if bound is None:
            return Launch([*PLANTED, *options])
        store = room.folder / key
        store.mkdir()
        return Launch([*PLANTED, "--store", str(store), *options], store=store, bound=bound)

    return Subject(key, f"planted, {key}", configure)


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Row]]:
    """Compares these subjects with a sound server that has no cache; rows by key."""
    monkeypatch.setattr("kvpact_testkit.compare.visit.QUIET_SECONDS", 0.0)

    def compare(*subjects: Subject, sound: tuple[str, ...] = (), rounds: int = 1, until: float = inf) -> dict[str, Row]:
        none = planted("none", *sound)
        monkeypatch.setattr("kvpact_testkit.compare.comparison.NONE", none)
        monkeypatch.setattr("kvpact_testkit.compare.visit.NONE", none)
        (tmp_path / "stores").mkdir(exist_ok=True)
        comparison = Comparison(
            subjects=[none, *subjects],
            rounds=rounds,
            room=Room("model", (), tmp_path / "stores", 1 << 20, 0, 0),
            sized=True,
            choose=lambda server, speed: SMALL.load(),
            on_load=lambda *_: None,
            on_step=lambda *_: None,
            environment={},
            logs=tmp_path,
            until=until,
        )
        comparison.run()
        return {one.key: one for one in comparison.rows}

    return compare


def test_a_sound_server_and_its_store_have_no_wrong_answer(compared: Callable[..., dict[str, Row]]) -> None:
    rows = compared(planted("store", bound=1 << 20), rounds=2)
    assert rows["none"].alone == Wrong(16, 0)
    assert rows["none"].differ == Wrong(16, 0)
    found = rows["store"]
    assert (found.rounds, found.requests, found.failure, found.wrong) == (2, 16, "", 0)
    assert found.restart_wrong == Wrong(8, 0)
    assert found.restart_served is not None
    assert found.restart_served > 0.99
    assert (found.flips, found.damaged_wrong, found.damaged_served) == (2 * FILES, Wrong(8, 0), 0.0)
    assert found.disk_bytes == FILES << 16
    assert not found.above_bound
    assert found.gaps > 0
    assert set(found.sources) == set()  # the load asked about each prompt once more, nothing twice


def test_an_engine_that_answers_wrongly_is_told_in_its_row(compared: Callable[..., dict[str, Row]]) -> None:
    found = compared(planted("wrong", "--wrong-from", "1"))["wrong"]
    assert (found.alone, found.differ) == (Wrong(8, 8), Wrong(8, 8))
    assert "planted, wrong: 8 answers with other tokens than the engine without a cache" in notes([found], 4, 0)


def test_an_engine_that_dies_in_the_middle_is_told_in_its_row(compared: Callable[..., dict[str, Row]]) -> None:
    rows = compared(planted("dies", "--dies-at", "6"), planted("other"), rounds=2)
    found = rows["dies"]
    assert found.failure == "died: RuntimeError: planted in the middle"
    # What it had answered until then is in the row, and it is not asked again.
    assert (found.rounds, found.requests) == (1, 0)
    assert found.alone is not None
    assert found.alone.judged < 4
    assert any(line.startswith("planted, dies: died: RuntimeError: planted") for line in notes([found], 4, 0))
    assert rows["other"].failure == ""


def test_an_engine_that_does_not_start_is_a_row_with_its_last_sentence(compared: Callable[..., dict[str, Row]]) -> None:
    found = compared(planted("refuses", "--refuses"))["refuses"]
    assert found.failure == "RuntimeError: only supported on planted GPUs"
    assert found.new_ms is None


def test_a_store_above_its_bound_is_told_in_its_row(compared: Callable[..., dict[str, Row]]) -> None:
    found = compared(planted("above", bound=100_000))["above"]
    assert found.above_bound
    assert found.disk_bytes == FILES << 16
    assert [*cells(found)][-1] == "1 / 0 ABOVE IT"
    assert any("the store took" in line for line in notes([found], 4, 0))


def test_a_store_that_serves_damaged_blocks_is_told_in_its_row(compared: Callable[..., dict[str, Row]]) -> None:
    found = compared(planted("believes", "--believes", bound=1 << 20))["believes"]
    # The metrics page says blocks of 16 tokens, and files of whole prompts are fewer.
    assert (found.flips, found.flips_asked, found.damaged_wrong) == (FILES, FILES, Wrong(4, 4))
    assert found.damaged_served is not None
    assert found.damaged_served > 0.99
    assert f"4 of 4 (of {found.flips_asked} blocks only), 99.2% served" in cells(found)


def test_no_bits_are_flipped_where_time_has_run_out(compared: Callable[..., dict[str, Row]]) -> None:
    found = compared(planted("store", bound=1 << 20), until=time.monotonic())["store"]
    assert (found.failure, found.flips, found.damaged_wrong) == ("", 0, None)
    assert found.restart_wrong == Wrong(4, 0)
    assert "planted, store: no time was left to flip bits in its store" in notes([found], 4, 0)


def test_prompts_with_unstable_answers_are_left_out_and_counted() -> None:
    def answered(*tokens: int) -> Answer:
        return Answer(tokens, (0.1,) * len(tokens), 10, 0)

    none = Visit(before=[answered(1, 2), answered(3, 4)], after=[answered(1, 2), answered(3, 5)], load=[answered(6)])
    reference = Reference.of(none)
    assert reference.unstable == 1
    assert reference.judge([answered(1, 2), answered(9, 9)]) == Wrong(1, 0)
    assert reference.judge([answered(1, 9), answered(3, 4)]) == Wrong(1, 1)
    assert row("none", "", [none], reference, judges=True).alone == Wrong(2, 0)
    died = Reference.of(Visit(before=[answered(1)]))
    assert died.judge([answered(1)]) is None


def test_without_an_engine_without_a_cache_nothing_is_compared(compared: Callable[..., dict[str, Row]]) -> None:
    rows = compared(planted("other"), sound=("--refuses",))
    assert set(rows) == {"none"}
    assert rows["none"].failure.startswith("RuntimeError")


def test_a_server_leaves_no_process_and_nothing_in_shared_memory(tmp_path: Path) -> None:
    name = Path(f"/dev/shm/kvpact-play-compare-{os.getpid()}")
    # Its name, and one of its files, are no UTF-8: any process of the machine may be such.
    code = (
        "import mmap, os, time\n"
        "open('/proc/self/comm', 'wb').write(b'\\xff')\n"
        "maps = []\n"
        f"for name in b'/dev/shm/\\xff', {str(name)!r}:\n"
        "    with open(name, 'w+b') as file:\n"
        "        file.truncate(4096)\n"
        "        maps.append(mmap.mmap(file.fileno(), 4096))\n"
        "os.unlink(b'/dev/shm/\\xff')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}print(flush=True)\ntime.sleep(100)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert name.exists()
    end_session(process.pid)
    assert not name.exists()
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()


def test_a_client_hangs_up_and_hears_each_token(tmp_path: Path) -> None:
    with Server(PLANTED, tmp_path / "log", {}) as server:
        server.wait_ready()
        heard: list[float] = []

        def three(now: float) -> bool:
            heard.append(now)
            return len(heard) < 3

        assert len(server.ask([1, 2], 50, on_token=three).tokens) == len(heard) == 3
        whole = server.ask([1, 2], 50)
        assert len(whole.tokens) == len(whole.seconds) == 50
        assert list(whole.seconds) == sorted(whole.seconds)
    with pytest.raises(ServerError, match="died: "):
        server.ask([1, 2], 5)


def test_the_last_sentence_is_the_cause_not_where_to_look_for_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_sentence(log) == "it said nothing"
    log.write_text(
        "INFO starting\n(EngineCore pid=7) ERROR 11-29 02:00:00 [core.py:1]   ValueError: too little room\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\nleaked\n"
    )
    assert last_sentence(log) == "ValueError: too little room"
    log.write_text("kvpact: the disk is full\n\n")
    assert last_sentence(log) == "kvpact: the disk is full"


def test_tokens_served_are_counted_by_kvpacts_own_tiers_where_it_says_them() -> None:
    name, ours = "vllm:prompt_tokens_cached_by_source_total", "vllm:kvpact_used_tokens_from_total"
    before = {f"{name}{{device}}": 10.0}
    after = {f"{name}{{device}}": 30.0, f"{name}{{external_unspecified}}": 40.0}
    assert served(before, after) == {"device": 20.0, "external_unspecified": 40.0}
    with_ours = {**after, f"{ours}{{memory}}": 15.0, f"{ours}{{disk}}": 25.0}
    assert served(before, with_ours) == {"device": 20.0, "memory": 15.0, "disk": 25.0}


def test_one_bit_of_each_file_is_flipped(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(bytes(1000 * (number + 1)))
    assert flip_in_blocks(tmp_path) == 5
    assert [sum(map(int.bit_count, (tmp_path / f"{number}").read_bytes())) for number in range(5)] == [1] * 5
    assert disk_bytes(tmp_path) >= 15_000
    assert flip_in_blocks(tmp_path / "nowhere") == disk_bytes(tmp_path / "nowhere") == 0


@pytest.mark.parametrize("seconds", [200.0, 300.0, 500.0])
def test_quick_sizes_fit_into_the_time_and_use_it(seconds: float) -> None:
    keys, speed = ("none", "prefix", "disk"), Speed(start_s=10.0, tokens_per_s=1500.0, token_s=0.02)
    sizes = fit(seconds, keys, speed, 4096)
    assert sizes.damages
    assert seconds_of(sizes, keys, speed) <= SPARE * seconds
    slower = fit(seconds, keys, replace(speed, tokens_per_s=500.0), 4096)
    assert slower.prompts * slower.tokens < sizes.prompts * sizes.tokens
    assert fit(seconds, keys, speed, 1100).longest <= 1100


def test_damaged_stores_are_left_out_only_where_nothing_fits_with_them() -> None:
    keys, speed = ("none", "disk"), Speed(start_s=60.0, tokens_per_s=1500.0, token_s=0.02)
    assert fit(600.0, keys, speed, 4096).damages
    tight = fit(290.0, keys, speed, 4096)
    assert not tight.damages
    assert "no damaged stores" in str(tight)


def test_rows_whose_quartiles_overlap_are_not_ranked() -> None:
    def timed(key: str, *ms: float) -> Row:
        answers = [Answer((1,), (one / 1e3,), 10, 5) for one in ms]
        return row(key, key, [Visit(load=answers, load_s=1.0)], Reference())

    fast, one, other = timed("fast", 1, 2, 3), timed("one", 10, 20, 30), timed("other", 9, 15, 29)
    nothing = row("nothing", "", [Visit(failure="no")], Reference())
    assert [found.key for found in ranked([one, nothing, other, fast])] == ["fast", "one", "other"]
    assert [found.key for found in ranked([other, one, fast])] == ["fast", "other", "one"]
    drawing = chart([one, nothing, other, fast])
    assert drawing.index("fast, in the load") < drawing.index("one, in the load")
    assert "10 ms" in drawing
    assert chart([nothing]) == ""


def test_spread_and_percentile() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 99) is None


def test_the_users_own_options_win() -> None:
    words = ["--max-model-len", "4096", "--dtype=float32", "--max-model-len=900"]
    assert (option(words, "--max-model-len"), option(words, "--dtype"), option(words, "--other")) == (
        "900",
        "float32",
        None,
    )


def test_subjects_by_name_with_the_one_that_judges() -> None:
    assert [one.key for one in chosen_subjects("disk", quick=False, tier="")] == ["none", "disk"]
    assert [one.key for one in chosen_subjects("", quick=True, tier="")] == ["none", "prefix", "disk"]
    assert [one.key for one in chosen_subjects("", quick=True, tier="redis://there")][-1] == "tier"
    for words in ("nobody", "tier"):
        with pytest.raises(typer.BadParameter):
            chosen_subjects(words, quick=False, tier="")
    assert size_of("--memory", "2MiB") == 2 << 20
    with pytest.raises(typer.BadParameter):
        size_of("--memory", "2G")


def test_all_servers_of_a_run_get_the_same_options(tmp_path: Path) -> None:
    room = Room("model", ("--dtype", "float32"), tmp_path, 1 << 20, 1 << 21, 1 << 22, "redis://there")
    for subject in SUBJECTS:
        if subject.key not in ("lmcache", "mooncake"):
            with ExitStack() as stack:
                command = [*subject.configure(room, stack).command]
            assert command[-2:] == ["--dtype", "float32"]
            assert command[command.index("--kv-cache-memory-bytes") + 1] == str(1 << 20)
            assert ("--no-enable-prefix-caching" in command) == (subject is NONE)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def trace_line(tokens: int, *blocks: int) -> str:
    return json.dumps({"input_length": tokens, "output_length": 2, "hash_ids": [0, *blocks]})


def test_an_estimate_counts_what_memory_and_disk_still_hold(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [trace_line(1100, 1), trace_line(1100, 2), trace_line(1540, 1, 3), trace_line(1100, 2)]
    trace.write_text("\n".join(lines))
    prompts = list(read_prompts(trace))
    assert [len(one.keys) for one in prompts] == [2, 2, 3, 2]
    # All: the second begins as the first did, the third as it with one block more, the fourth is the second.
    everything = estimated(prompts, 4, 0)
    assert (everything.tokens, everything.from_memory, everything.from_disk) == (4840, 512 * (1 + 2 + 2), 0)
    # Two blocks: the last one evicts the one before, and the disk has it.
    small = estimated(prompts, 2, 4)
    assert (small.from_memory, small.from_memory + small.from_disk) == (512 * 3, 512 * 5)
    assert estimated(prompts, 2, 0).from_memory == 512 * 3
    one, other, third = (prompt_of([number] * 5, 4) for number in (1, 2, 3))
    assert estimated([one, other, one, third, one], 2, 0).from_memory == 8  # what was used last is not evicted
    sizes = list(over_sizes(prompts))
    assert max(one.served for one in sizes) == everything.served
    with pytest.raises(ConfigError, match="No such file"):
        list(read_prompts(tmp_path / "nothing.jsonl"))


def test_traces_of_each_format_have_the_tokens_that_they_share(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text("\n".join([trace_line(1100, 1, 2), trace_line(2000, 1, 2, 3)]))
    load = traced(mooncake, 10, 2, 4, 16, lambda line: [])
    first, second = (request.prompt for request in load.requests)
    assert (len(first), len(second), shared(first, second)) == (68, 125, 68)
    assert [request.max_tokens for request in load.requests] == [1, 1]
    assert [len(prompt) for prompt in load.alone] == [68, 125]
    assert not shared(load.alone[1], second)

    mooncake.write_text(json.dumps({"input_length": 600, "hash_ids": [0, 1]}))
    assert [request.max_tokens for request in traced(mooncake, 10, 2, 4, 1, lambda line: []).requests] == [4]

    sessions = tmp_path / "sessions.jsonl.gz"
    common = {"trace": "one", "bs": 64, "out": 5}
    lines = [{**common, "in": 130, "keep": 0, "runs": [[1, 2]]}, {**common, "in": 200, "keep": 1, "runs": [[9, 2]]}]
    sessions.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    first, second = (request.prompt for request in traced(sessions, 10, 2, 4, 1, lambda line: []).requests)
    assert (len(first), len(second), shared(first, second)) == (128, 192, 64)

    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}))
    (only,) = traced(chat, 10, 2, 4, 1, lambda line: [len(line["messages"][0]["content"])]).requests
    assert (only.prompt, only.max_tokens) == ([5], 2)
    for text in ("{}", "no JSON", "[]"):
        chat.write_text(text)
        with pytest.raises(ConfigError, match=r"chat\.jsonl"):
            traced(chat, 10, 2, 4, 1, lambda line: [])


def test_clients_come_back_to_their_documents_after_all_others() -> None:
    load = documents(prompts=3, tokens=100, turns=2, clients=2, answer_tokens=4)
    assert [request.client for request in load.requests] == [0, 1, 0, 0, 1, 0]
    for document, first, second in zip(load.alone, load.requests[:3], load.requests[3:], strict=True):
        assert shared(document, first.prompt) == 100
        assert shared(first.prompt, second.prompt) == len(first.prompt) == 132
        assert len(second.prompt) == 168
    assert load.distinct_tokens >= 3 * 168


def test_the_bar_forgets_the_steps_of_a_server_that_failed() -> None:
    said = io.StringIO()
    known = {one.key: one for one in SUBJECTS}
    bar = Bar(Console(file=said), ["none", "fs", "disk"], 1)
    bar.step(known["none"], Step.START)
    bar.expect(SMALL.load(), Speed(60.0, 1000.0, 0.01), Room("", (), Path(), 0, 0, 0))
    bar.step(known["none"], Step.NEW)
    bar.step(known["fs"], Step.START)
    assert 7 * 60 > bar.left_s > 6 * 60  # three starts of fs and three of disk
    bar.step(known["disk"], Step.START)
    assert 4 * 60 > bar.left_s > 3 * 60
    bar.step(known["disk"], Step.DAMAGED)
    assert bar.left_s < 60
    assert "kvpact, memory and disk: starting, about 3." in said.getvalue()
