"""`kvpact status` and `kvpact why`, of a server's page and of engines that answer on their sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpact.cache.status import CHANGES, EngineStatus, add_neighbours, status_of
from kvpact.cache.status_socket import StatusSocket, answers
from kvpact.hints.schema import parse_hints
from kvpact.memory.arena import Standing
from kvpact.metrics import MissReason, UnmadeCheck
from kvpact_command import kvpact, own_sockets, refusal
from neighbour_scenes import neighbour_scenes
from polling import until
from scenes import BLOCK_SIZE, Scene, SceneRequest, open_disk, tokens

PAGE = """\
vllm:prompt_tokens_total{engine="0",model_name="m"} 600.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 400.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 100.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="external_kv_transfer"} 300.0
vllm:kvpact_used_tokens_from_total{engine="1",model_name="m",tier="memory"} 200.0
vllm:kvpact_used_tokens_from_total{engine="1",model_name="m",tier="store"} 100.0
vllm:kvpact_lookups_total{engine="0",model_name="m"} 10.0
vllm:kvpact_misses_total{engine="0",model_name="m",reason="no_room"} 4.0
vllm:kvpact_saved_blocks_total{engine="0",model_name="m"} 9.0
vllm:kvpact_spared_prefill_seconds_total{engine="0",model_name="m"} 12.5
vllm:kvpact_held_blocks{engine="0",model_name="m",tier="memory"} 30.0
vllm:kvpact_capacity_blocks{engine="0",model_name="m",tier="memory"} 40.0
vllm:kvpact_dropped_writes_total{engine="0",model_name="m",tier="store"} 140.0
vllm:kvpact_written_blocks_total{engine="0",model_name="m",tier="store"} 900.0
vllm:kvpact_tier_up{engine="0",model_name="m",tier="store"} 1.0
vllm:kvpact_tier_up{engine="1",model_name="m",tier="store"} 1.0
"""
OLD = "vllm:prefix_cache_hits_total 7\nvllm:external_prefix_cache_hits_total 8\n"


def typed(page: str) -> str:
    """The page with the types that a parser wants to know."""
    lines: list[str] = []
    for line in page.splitlines():
        name, kind = line.split("{")[0].split(" ")[0], "counter" if "_total" in line else "gauge"
        lines += [f"# TYPE {name} {kind}"] if f"# TYPE {name} {kind}" not in lines else []
        lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """Serves a page at /metrics; returns the server's address."""
    servers: list[HTTPServer] = []

    def start(page: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None: ...

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sockets of this test's engines are, and no others'."""
    return own_sockets(tmp_path, monkeypatch)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Scene]:
    """One that has answered two requests and is about to load for a third."""
    scene = Scene(tiers=[open_disk(tmp_path / "slabs")])
    for name in ("cmpl-aa-0-1", "cmpl-ab-0-2"):
        request = SceneRequest(name, tokens(17))
        match = scene.prepare(request)
        if match.num_tokens:
            scene.load(request, match)
        scene.run_cold(request)
    scene.prepare(SceneRequest("cmpl-b", tokens(17)))
    cache = scene.cache
    answering = StatusSocket(lambda: status_of(cache, cache.metrics, "a/model", BLOCK_SIZE).encoded())
    until(lambda: bool(answers()))
    yield scene
    answering.close()


@pytest.mark.usefixtures("engine")
def test_tiers_asks_running_engines_where_nothing_is_configured() -> None:
    (row,) = json.loads(kvpact("tiers", "--json").stdout)["engine"]
    assert row["tier"] == "disk"
    assert row["engine"].startswith("a/model, process ")
    shown = kvpact("tiers")
    assert shown.exit_code == 0
    first, _, line = shown.stdout.splitlines()
    assert first.startswith("counted by the engine of a/model, process ")
    assert line.startswith("disk ")


def test_an_engine_that_nobody_has_asked_is_starting_or_idle() -> None:
    scene = Scene()
    answering = StatusSocket(lambda: status_of(scene.cache, scene.cache.metrics, "a/model", BLOCK_SIZE).encoded())
    until(lambda: bool(answers()))
    shown = " ".join(kvpact("status").stdout.split())
    answering.close()
    assert "lookups no lookups yet: the engine is starting, or has had no prompt" in shown
    assert "--kv-transfer-config" not in shown


def test_a_page_says_in_ten_lines_whether_it_helps(serve: Callable[[str], str]) -> None:
    result = kvpact("status", serve(typed(PAGE)))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 11
    assert max(map(len, lines)) <= 80
    assert lines[1] == "served from cache   40.0% 400 of 1,000 prompt tokens"
    assert lines[2] == " from engine        10.0%"
    assert lines[3] == " from memory        20.0%, 75% of 40 blocks full"
    assert lines[4] == " from store         10.0%, 140 writes dropped"
    assert lines[5] == "prefill time saved 12.5 s"
    assert lines[6].startswith("lookups            6 of 10 lookups hit; most misses (4 no_room) because")
    assert lines[-1] == "to change          raise `memory`: it has no room for blocks from the tiers"


@pytest.mark.usefixtures("engine")
def test_the_json_lists_leases_on_demand_and_no_request() -> None:
    (short,) = json.loads(kvpact("status", "--json").stdout)["engines"]
    (full,) = json.loads(kvpact("status", "--json", "--leases").stdout)["engines"]
    assert full.keys() - short.keys() == {"leases", "blocks_leased_from", "blocks_leased_to_others"}
    assert "records" not in full


def test_the_removed_forms_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "No such option: --stats" in kvpact("tiers", "--stats", tmp_path / "stats.json").stderr
    assert "no kvpact engine found" in refusal("why", tmp_path / "stats.json")


def test_the_json_has_base_units(serve: Callable[[str], str]) -> None:
    (engine,) = json.loads(kvpact("status", serve(typed(PAGE)) + "/metrics/", "--json").stdout)["engines"]
    assert engine["prompts"] == {"requests": 2, "tokens": 1000, "engine_tokens": 100, "used_tokens": 300}
    assert engine["tokens_by_source"] == {"engine": 100, "memory": 200, "store": 100}
    assert engine["metrics"]["spared_prefill_seconds"] == 12.5
    [used] = [one for one in engine["metrics"]["used_tokens_from"] if one["tier"] == "store"]
    assert used == {"tier": "store", "value": 100.0}
    assert engine["tiers"] == [{"name": "store", "trouble": "", "complaint": "", "doubted_for": 0.0}]


def test_what_neighbours_gave_is_a_source_of_its_own(serve: Callable[[str], str]) -> None:
    line = 'vllm:kvpact_used_tokens_from_total{engine="1",model_name="m",tier="store"} 100.0'
    page = PAGE.replace(line, line.replace("store", "neighbours"))
    (engine,) = json.loads(kvpact("status", serve(typed(page)), "--json").stdout)["engines"]
    assert engine["tokens_by_source"] == {"engine": 100, "memory": 200, "neighbours": 100, "store": 0}


def test_a_tier_that_one_engine_does_without_is_down(serve: Callable[[str], str]) -> None:
    page = typed(
        PAGE.replace('tier_up{engine="1",model_name="m",tier="store"} 1', 'tier_up{engine="1",tier="store"} 0')
    )
    result = kvpact("status", serve(page))
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(" from store")]
    assert line.endswith("DOWN")
    assert "to change          store is down: " in result.stdout


def test_h128_a_tier_that_no_engine_has_asked_yet_is_not_down(serve: Callable[[str], str]) -> None:
    """A server's page before its first request: the tiers' counters are there, and nothing of their health."""
    idle = [line for line in PAGE.splitlines() if "tier_up" not in line and 'engine="0"' in line]
    page = "\n".join([*idle, 'vllm:kvpact_capacity_blocks{engine="0",model_name="m",tier="store"} 0.0'])
    result = kvpact("status", serve(typed(page)))
    assert result.exit_code == 0, result.output
    assert "DOWN" not in result.stdout
    assert " from store          0.0%, 140 writes dropped, not asked yet\n" in result.stdout
    asked = f'{page}\nvllm:kvpact_tier_up{{engine="1",model_name="m",tier="store"}} 1.0'
    result = kvpact("status", serve(typed(asked)))
    assert result.exit_code == 0, "one of two engines has asked it"
    assert "not asked yet" not in result.stdout


def test_counts_of_other_releases_are_0_where_they_are_missing(serve: Callable[[str], str]) -> None:
    url = serve(typed(OLD + 'vllm:kvpact_lookups_total{engine="0"} 0.0\n'))
    (engine,) = json.loads(kvpact("status", url, "--json").stdout)["engines"]
    assert (engine["prompts"]["engine_tokens"], engine["prompts"]["used_tokens"]) == (7, 8)
    assert engine["to_change"] == "nothing yet: no prompt has been looked up"
    assert kvpact("status", url).exit_code == 0


def test_what_cannot_be_read_says_what_would_be_right(serve: Callable[[str], str], runtime: Path) -> None:
    assert "is not an http URL; give the URL of a running server" in refusal("status", "localhost:8000")
    assert "cannot be read: " in refusal("status", "http://127.0.0.1:9")
    assert "leave the URL out" in refusal("status", "http://127.0.0.1:9", "--leases")
    assert "has no metrics of kvpact; start the server with `kvpact serve`" in refusal("status", serve(OLD))
    without_statistics = serve("# TYPE python_info gauge\npython_info 1.0\n")
    assert "the server runs with --disable-log-stats; leave that option out" in refusal("status", without_statistics)
    assert f"no kvpact engine found for this user ({runtime}/kvpact or {runtime}/kvpact-" in refusal("status")
    assert "no kvpact engine found" in refusal("why", "cmpl-1")


def test_engines_of_this_user_are_found_by_their_sockets(engine: Scene) -> None:
    result = kvpact("status", "--leases")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a/model, process ")
    assert "served from cache   47.1% 16 of 34 prompt tokens" in result.stdout
    assert "cmpl-b: PLANNED, 16 tokens for 0 s" in result.stdout
    (told,) = json.loads(kvpact("status", "--json", "--leases").stdout)["engines"]
    assert [lease["request_id"] for lease in told["leases"]] == ["cmpl-b"]
    assert [tier["trouble"] for tier in told["tiers"]] == [""]
    assert told["metrics"]["used_tokens"] == 16
    engine.cache.abort_external_match("cmpl-b", None, "cancelled")
    assert kvpact("status", "--leases").stdout.splitlines()[-1] == "no leases"
    assert "no leases" not in kvpact("status").stdout


@pytest.fixture
def ask_about() -> Iterator[Callable[[Scene], dict[str, str]]]:
    """Asks how an engine does, by `kvpact status`; the lines by their first words."""
    sockets: list[StatusSocket] = []

    def ask(scene: Scene) -> dict[str, str]:
        for answering in sockets:
            answering.close()
        sockets[:] = [StatusSocket(lambda: status_of(scene.cache, scene.cache.metrics, "m", BLOCK_SIZE).encoded())]
        scene.cache.observe()
        until(lambda: bool(answers()))
        text = kvpact("status").stdout.replace("\n" + 19 * " ", " ")
        return {line[:19].strip(): line[19:] for line in text.splitlines()[1:]}

    yield ask
    for answering in sockets:
        answering.close()


def test_what_a_disk_holds_is_not_lost_although_memory_has_evicted_it(
    tmp_path: Path, ask_about: Callable[[Scene], dict[str, str]]
) -> None:
    """Twelve prompts of 16 blocks: memory holds the last, the disk all of them, or the last four."""
    for slots, lost, advice in ((400, False, "nothing"), (64, True, "raise `memory`, or add a larger tier")):
        (tmp_path / f"{slots}").mkdir()
        scene = Scene(tiers=[open_disk(tmp_path / f"{slots}", slots)])
        for seed in range(12):
            request = SceneRequest(f"{seed}", tokens(16 * BLOCK_SIZE + 1, seed))
            scene.prepare(request)
            scene.run_cold(request)
            scene.settle_tiers()
        said = ask_about(scene)
        assert said["to change"].startswith(advice)
        assert ("of 192 saved blocks are stored nowhere now" in said["lookups"]) == lost
        scene.close()


def test_spared_seconds_are_unknown_until_the_engine_has_computed_a_prompt(
    tmp_path: Path, ask_about: Callable[[Scene], dict[str, str]]
) -> None:
    writer = Scene(tiers=[open_disk(tmp_path)])
    writer.run_cold(SceneRequest("cold", tokens(33)))
    writer.close()
    scene = Scene(tiers=[open_disk(tmp_path)])
    assert ask_about(scene)["prefill time saved"] == "0.0 s"
    warm = SceneRequest("warm", tokens(33))
    scene.load(warm, scene.prepare(warm))
    assert ask_about(scene)["prefill time saved"] == "unknown until the engine computes a prompt"
    scene.step_computing(SceneRequest("another", tokens(33, seed=1)))
    scene.now += 3.3
    scene.cache.end_step()
    assert ask_about(scene)["prefill time saved"] == "3.2 s", "32 tokens, at 33 in 3.3 seconds"


def test_h126_what_was_never_looked_up_is_not_told_as_looked_up(
    ask_about: Callable[[Scene], dict[str, str]],
) -> None:
    scene = Scene()
    scene.prepare(SceneRequest("unknown", tokens(17), None))
    scene.prepare(SceneRequest("all but the last block", tokens(16)), computed=12)
    scene.cache.on_new_request(SceneRequest("in the queue", tokens(17)))
    assert ask_about(scene)["to change"].startswith("see docs/request-identity.md")
    told = kvpact("why", "unknown").stdout
    assert "looked up          no" in told
    assert "why not            unknown_identity" in told
    outcomes = {row[:14].strip(): row[14:] for row in kvpact("why").stdout.splitlines()[1:]}
    assert "not asked" in outcomes["in the queue"]
    told = kvpact("why", "all but the last block").stdout
    assert "no need: the engine itself had every block" in told, "its last token is computed in any case"


def test_h126_there_is_advice_for_each_reason_of_a_miss() -> None:
    assert {*CHANGES} == {*MissReason}


def test_h117_while_copies_are_checked_status_says_that_tiers_get_nothing_and_why(
    engine: Scene, serve: Callable[[str], str]
) -> None:
    assert "copies " not in kvpact("status").stdout
    (segment,) = engine.segments
    segment.standing = Standing.OPEN
    told = "copies             each is still checked, so no tier gets blocks yet"
    assert f"{told}\n" in kvpact("status").stdout
    for reason in (UnmadeCheck.GIVEN_UP, UnmadeCheck.GIVEN_UP, UnmadeCheck.FAILED):
        segment.count_unmade(reason)
    why = "2 checks skipped, because resets cancelled the saves; 1 checks failed (see the engine's log)"
    assert f"so no tier gets blocks yet; {why}" in " ".join(kvpact("status").stdout.split())
    counts = engine.cache.observe()
    page = "".join(
        f'vllm:kvpact_{name}{{engine="0",{label}}} {counts[key]}\n'
        for name, label, key in (
            ("unproven_copies", 'model_name="m"', "unproven_copies"),
            ("unmade_checks_total", 'reason="given_up"', 'unmade_checks{reason="given_up"}'),
            ("unmade_checks_total", 'reason="failed"', 'unmade_checks{reason="failed"}'),
        )
    )
    assert why in " ".join(kvpact("status", serve(typed(PAGE + page))).stdout.split())
    segment.standing = Standing.PROVEN
    assert "copies " not in kvpact("status").stdout, "it is over"


def test_status_says_whether_routers_are_told_and_of_how_many_blocks(
    engine: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "events " not in kvpact("status").stdout
    monkeypatch.setattr(engine.cache, "announcements", SimpleNamespace(count=12_345, withdraw=lambda: None))
    assert "events             on, 12,345 blocks announced\n" in kvpact("status").stdout


def test_the_last_requests_are_listed(engine: Scene) -> None:
    head, *rows = kvpact("why").stdout.splitlines()
    assert head.split() == ["request", "outcome", "age", "prompt", "engine", "promised", "used"]
    assert [row.split()[:2] for row in rows] == [
        ["cmpl-aa-0-1", "not_stored"],
        ["cmpl-ab-0-2", "loaded"],
        ["cmpl-b", "waiting"],
    ]


def test_an_answers_id_leads_to_the_request_and_what_became_of_it(engine: Scene) -> None:
    told = kvpact("why", "cmpl-aa").stdout
    assert told.splitlines()[0] == "cmpl-aa-0-1"
    assert "looked up          blocks 0-3" in told
    assert "found              no block" in told
    assert "why not            not_stored: the prompt's first block is not stored" in told
    assert "saved              4 blocks" in told
    told = kvpact("why", "cmpl-ab").stdout
    assert "found              blocks 0-3 in memory" in told
    assert "tokens             16 promised, 16 committed, 16 loaded, 16 used" in told
    assert "ended              loaded: its only plan, for blocks 0-3" in told
    assert "now                PLANNED, 16 tokens in blocks 0-3" in kvpact("why", "cmpl-b-0-longer").stdout
    assert "among the last 3; give the id of a response" in refusal("why", "cmpl-c")
    found = json.loads(kvpact("why", "cmpl-a", "--json").stdout)["requests"]
    assert [(one["request_id"], one["used_tokens"], one["miss"]) for one in found] == [
        ("cmpl-aa-0-1", 0, "not_stored"),
        ("cmpl-ab-0-2", 16, None),
    ]


def told(scene: Scene) -> EngineStatus:
    """Status as people who ask get it."""
    found = status_of(scene.cache, scene.cache.metrics, "a/model", BLOCK_SIZE)
    add_neighbours(found, scene.cache)
    return found


def test_leases_of_neighbours_are_counted_at_both_ends_and_why_names_the_engine() -> None:
    owner, engine = neighbour_scenes(2)
    owner.run_cold(SceneRequest("cold", tokens(17)))
    request = SceneRequest("cmpl-n", tokens(17))
    match = engine.prepare(request)
    for scene, there, here in ((engine, {"other": 4}, 0), (owner, {"other": 0}, 4)):
        status = told(scene)
        assert (status.blocks_leased_from, status.blocks_leased_to_others) == (there, here)
    answering = StatusSocket(lambda: told(engine).encoded())
    until(lambda: bool(answers()))
    assert "neighbour other: 4 blocks leased there\nneighbours: 0 blocks leased here\n" in (
        kvpact("status", "--leases").stdout
    )
    assert "neighbour" not in kvpact("status").stdout
    assert "loaded from" not in kvpact("why", "cmpl-n").stdout
    engine.load(request, match)
    assert "loaded from        memory of other\n" in kvpact("why", "cmpl-n").stdout
    answering.close()
    assert told(owner).blocks_leased_to_others == 0


def test_why_has_the_outcome_of_each_hint() -> None:
    scene = Scene()
    request = SceneRequest("cmpl-hinted", tokens(17))
    hints = parse_hints({"kvpact": {"store": "none", "colour\x1b": 1}})
    assert hints is not None
    scene.cache.note_hints(request, hints)
    scene.run_cold(request)
    answering = StatusSocket(lambda: status_of(scene.cache, scene.cache.metrics, "a/model", BLOCK_SIZE).encoded())
    until(lambda: bool(answers()))
    told = kvpact("why", "cmpl-hinted").stdout
    assert "saved              0 blocks" in told
    assert "hint               store: accepted\n" in told
    assert "hint               colour\\x1b: rejected: this release knows store, retain,\n" in told
    assert "                   session, expect_in, release\n" in told
    answering.close()
