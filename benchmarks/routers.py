"""Hits of two engines behind vLLM's router, which reads their KV events: whole conversations of a trace, scaled 1/16.

The 300 requests of the longest whole conversations in Mooncake's chat trace whose prompts have at most 64 blocks of
512 tokens, one after another; a block of the trace is one of the engines, 32 tokens. Both engines together have memory
for a third of all blocks, and GPU memory for the longest prompt each. `hits` is cached tokens over prompt tokens. All
rows but the last begin with empty engines and an empty router:

- "round robin": the router looks at nothing;
- "GPU's events": it reads what vLLM sends of its own blocks, and nothing of kvpact's;
- "all events": kvpact's too;
- "one pool, simulated": the least recently used blocks of one memory of the same size, and of two under round robin;
- "killed": all events, and disks for everything; an engine is killed with -9 after half of the requests and started
  again on its disk. `hits` are those of the last quarter; "not killed" has those of the same requests without it.

`over_round_robin` is over the row "round robin". `share` is that of the first engine in the requests. The router's
temperature is 64 tokens: without one it sends all requests of a client that waits for each answer to one engine, as
soon as that has the first block, which all these conversations share.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from benchmarks.e2e import say
from benchmarks.needs import find_testbeds, require_vllm
from benchmarks.serving_engines import python_with
from kvpact_testkit.demo.model import ModelShape, ensure_model

if TYPE_CHECKING:
    from servers.http_server import Server
    from servers.router_server import Publisher

TRACE = Path(__file__).parents[1] / "tests/data/long_conversations_300.jsonl"
TRACE_BLOCK = 512
BLOCK = 32
"""Tokens of a block of the engines, which is one of the trace."""

SHAPE = ModelShape(layers=2, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=256, vocabulary=512)
BLOCK_BYTES = BLOCK * SHAPE.token_bytes("float32")
TEMPERATURE = 64
ENOUGH_SHARE = 4
"""A disk for everything has room for all blocks so many times."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the trace: its full blocks by number, and its tokens, which end in a block that is not full."""

    blocks: tuple[int, ...]
    tokens: list[int]

    @property
    def loadable(self) -> int:
        """Tokens of its full blocks: vLLM computes at least the last token."""
        return (len(self.tokens) - 1) // BLOCK * BLOCK


def read_prompts(count: int) -> list[Prompt]:
    """The first so many requests of the trace."""
    found = []
    for line in TRACE.read_text().splitlines()[:count]:
        asked = json.loads(line)
        tokens = [token for number in asked["hash_ids"] for token in block_tokens(number)]
        length = -(-asked["input_length"] * BLOCK // TRACE_BLOCK)
        prompt = tokens[:length]
        found.append(Prompt(tuple(asked["hash_ids"][: (len(prompt) - 1) // BLOCK]), prompt))
    return found


def block_tokens(number: int) -> list[int]:
    """The tokens of a block of the trace."""
    source = random.Random(number)
    return [source.randrange(1, SHAPE.vocabulary) for _ in range(BLOCK)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of a run's prompts, from which its engines' sizes follow."""

    distinct: int
    longest: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Sizes:
        return cls(len({block for prompt in prompts for block in prompt.blocks}), max(len(p.blocks) for p in prompts))

    def memory(self, share: float) -> int:
        """Blocks of a memory with room for this share of all, and for the longest prompt."""
        return max(int(self.distinct * share), self.longest + 1)


@dataclass(frozen=True)
class Place:
    """Where engines of one model are started, with what they keep."""

    folder: Path
    sizes: Sizes
    model: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path, sizes: Sizes, text: str, **environment: str) -> Place:
        return cls(folder, sizes, ensure_model(folder / "model", SHAPE, text), environment)

    def engine(
        self, name: str, publisher: Publisher, memory: int, disk: int = 0, port: int | None = None, *options: str
    ) -> Server:
        """`kvpact serve` with events, memory and a disk of so many blocks; one of this name finds its disk again."""
        from servers.http_server import Server, users_environment

        (folder := self.folder / name).mkdir(exist_ok=True)
        longest = (self.sizes.longest + 2) * BLOCK
        command = [
            str(Path(sys.executable).with_name("kvpact")), "serve", str(self.model), "--served-model-name=tiny",
            "--dtype=float32", "--enforce-eager", f"--max-model-len={longest}", f"--block-size={BLOCK}",
            f"--kv-cache-memory-bytes={(self.sizes.longest + 4) * BLOCK_BYTES}", "--enable-prompt-tokens-details",
            "--memory", f"{memory * BLOCK_BYTES}B", "--kv-events-config", publisher.option(), *options,
        ]  # fmt: skip
        environment = users_environment() | {
            "KVPACT_RECOMPUTE_IF_FASTER": "false",
            "VLLM_SERVER_DEV_MODE": "1",
            "XDG_RUNTIME_DIR": str(folder),
        }
        if disk:
            environment["KVPACT_TIERS"] = f"disk://{folder / 'disk'}?capacity={disk * BLOCK_BYTES + (1 << 20)}B"
        number = len([*folder.glob("log-*")])
        return Server(command, folder / f"log-{number}", environment | dict(self.environment), port=port)


def simulated(prompts: Sequence[Prompt], pools: int, blocks: int) -> float:
    """Hits of so many equal pools under round robin, with this many blocks together, least recently used."""
    kept = [OrderedDict[int, None]() for _ in range(pools)]
    hits = 0
    for number, prompt in enumerate(prompts):
        pool = kept[number % pools]
        hits += next((at for at, block in enumerate(prompt.blocks) if block not in pool), len(prompt.blocks))
        for block in reversed(prompt.blocks):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > blocks // pools:
            pool.popitem(last=False)
    return hits * BLOCK / sum(len(prompt.tokens) for prompt in prompts)


@dataclass(frozen=True, slots=True)
class Engine:
    """A server behind a router."""

    server: Server
    publisher: Publisher

    @property
    def prompt_tokens(self) -> float:
        return self.server.metrics()["vllm:prompt_tokens_total"]

    def empty(self) -> None:
        """Nothing that was stored before is served from now on, from the GPU, memory or the disk."""
        self.server.post("reset_prefix_cache?reset_external=true")


@dataclass(frozen=True, slots=True)
class Played:
    """Prompts that a router was asked, one after another, and the cached tokens of each answer."""

    prompts: Sequence[Prompt]
    cached: Sequence[int]
    share: float
    """Of the prompt tokens, those that went to the first engine."""

    def hits(self, first: int = 0) -> float:
        """Cached tokens over prompt tokens, from this request on."""
        return sum(self.cached[first:]) / sum(len(prompt.tokens) for prompt in self.prompts[first:])


def ask(url: str, tokens: Sequence[int]) -> int:
    """Ask the server or router at this URL for one token more; the tokens that were cached."""
    body = {"model": "tiny", "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        details = json.loads(answer.read())["usage"]["prompt_tokens_details"]
    return int((details or {}).get("cached_tokens") or 0)


def play(url: str, engines: Sequence[Engine], prompts: Sequence[Prompt]) -> Played:
    """Ask all prompts, each when the one before is answered."""
    before = [engine.prompt_tokens for engine in engines]
    cached = [ask(url, prompt.tokens) for prompt in prompts]
    added = [engine.prompt_tokens - had for engine, had in zip(engines, before, strict=True)]
    return Played(prompts, cached, added[0] / sum(added))


def started(place: Place, stack: ExitStack, name: str, memory: int, disk: int = 0) -> list[Engine]:
    """Two servers that are ready."""
    from servers.router_server import Publisher

    publishers = [Publisher.at_free_ports() for _ in range(2)]
    engines = [
        Engine(stack.enter_context(place.engine(f"{name}-{number}", publisher, memory, disk)), publisher)
        for number, publisher in enumerate(publishers)
    ]
    for engine in engines:
        engine.server.wait_ready()
        engine.server.ask([1, 2, 3], max_tokens=1)
    return engines


def routed(
    python: Path, folder: Path, stack: ExitStack, engines: Sequence[Engine], policy: str, *, own_events: bool = False
) -> str:
    """The URL of a router in front of these engines, with nothing in its tables; `own_events`: those of vLLM alone."""
    from servers.router_server import Tap, vllm_router

    publishers = {engine.server.port: engine.publisher for engine in engines}
    if own_events:
        taps = {port: stack.enter_context(Tap(publisher, ["GPU"])) for port, publisher in publishers.items()}
        publishers = {port: tap.passed_on for port, tap in taps.items()}
    log = folder / f"router-{len([*folder.glob('router-*')])}.log"
    options = ["--router-temperature", str(TEMPERATURE)] if policy == "kv_aware" else []
    return stack.enter_context(vllm_router(python, log, policy, publishers, BLOCK, *options))


WAYS = (("round robin", "round_robin", False), ("GPU's events", "kv_aware", True), ("all events", "kv_aware", False))
"""Rows over the same engines: name, policy, and whether the router reads vLLM's own events alone."""


def compared(place: Place, python: Path, prompts: Sequence[Prompt]) -> Iterator[tuple[str, Played]]:
    """The ways to route all prompts over engines with memory for a third."""
    with ExitStack() as stack:
        engines = started(place, stack, "small", place.sizes.memory(1 / 6))
        for what, policy, own_events in WAYS:
            for engine in engines:
                engine.empty()
            with ExitStack() as router:
                url = routed(python, place.folder, router, engines, policy, own_events=own_events)
                yield what, play(url, engines, prompts)


def killed(place: Place, python: Path, prompts: Sequence[Prompt], *, is_killed: bool) -> Played:
    """All events, and disks for everything; an engine is killed after half of the prompts, and started again."""
    with ExitStack() as stack:
        name = "killed" if is_killed else "alive"
        memory = place.sizes.memory(1 / 6)
        disk = ENOUGH_SHARE * place.sizes.distinct
        engines = started(place, stack, name, memory, disk)
        url = routed(python, place.folder, stack, engines, "kv_aware")
        half = len(prompts) // 2
        first = play(url, engines, prompts[:half])
        if is_killed:
            victim = engines[1]
            victim.server.kill()
            again = place.engine(f"{name}-1", victim.publisher, memory, disk, victim.server.port)
            engines[1] = Engine(stack.enter_context(again), victim.publisher)
            again.wait_ready()
            again.ask([1, 2, 3], max_tokens=1)
        second = play(url, engines, prompts[half:])
        return Played(prompts, [*first.cached, *second.cached], second.share)


def rows(requests: int = 300) -> Iterator[dict[str, Any]]:
    """One row for each way."""
    require_vllm()
    find_testbeds()
    from servers.router_server import REQUIREMENTS
    from tiny_engine import TOKENIZER_TEXT

    python = python_with(REQUIREMENTS)
    prompts = read_prompts(requests)
    sizes = Sizes.of(prompts)
    pool = sizes.memory(1 / 6) * 2
    say(f"{requests} requests, {sizes.distinct} blocks, {pool} in the memory of both engines")
    with tempfile.TemporaryDirectory(prefix="kvpact-routers-") as folder:
        place = Place.made(Path(folder), sizes, TOKENIZER_TEXT)
        base = 0.0
        for what, played in compared(place, python, prompts):
            base = base or played.hits()
            yield _row(what, requests, played.hits(), base, played.share)
        alone, apart = simulated(prompts, 1, pool), simulated(prompts, 2, pool)
        yield _row("one pool, simulated", requests, alone, apart)
        late = requests * 3 // 4
        before = killed(place, python, prompts, is_killed=False)
        yield _row("not killed", requests - late, before.hits(late), None, before.share)
        after = killed(place, python, prompts, is_killed=True)
        yield _row("killed", requests - late, after.hits(late), None, after.share)


def _row(
    what: str, requests: int, hits: float, round_robin: float | None, share: float | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {"what": what, "requests": requests, "hits": round(hits, 3)}
    if round_robin:
        found["over_round_robin"] = round(hits / round_robin, 2)
    return found if share is None else {**found, "share": round(share, 2)}
