"""CPU time of the scheduler's thread for one request in a connector's scheduler half, from arrival to the last report.

vLLM's own scheduler drives kvpact's scheduler half and, in the same run and in turn, those of two connectors of vLLM.
States: "cold", a new prompt that is saved; "hit", the same prompt from a new request, of which the engine itself has
nothing; "restart", the same in an engine that never saw the prompt and reads it from disk; "arrivals", many hits in one
step. `cpu_ms` is that of all hooks together for one request, `cpu_ms_worst_step` the most in one step. `hash_ms` is
what kvpact's own keys take of it; `engine_hash_ms` are vLLM's block hashes, made where a request arrives and not in a
step: the peers' keys. `over_...` is kvpact's time over the peer's, each with its own hashes and without them. With
`--lmcache-port` LMCache's half takes part, whose server is another process: the interpreter must have LMCache.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

from benchmarks.needs import require_at_least, require_known, require_vllm
from benchmarks.table import ratio, spread

SLOT_BYTES = 4096
"""More than a block of these engines takes in any of the caches."""
SYNCHRONOUS_TOKENS = 2048
"""A step waits for loads of so many tokens, as with kvpact's own setting and 128 KiB of KV a token (Llama 3 8B): longer
matches load while the engine goes on. Its peers load all matches so."""
PROBES = 1000
DISK_LIMIT_TOKENS = 131_072
"""Longer prompts are not read back from disk here."""


def transfer(subject: str, blocks: int, block_size: int, folder: Path | None, lmcache_port: int = 0) -> dict[str, Any]:
    """Fields of `KVTransferConfig`: the cache has room for `blocks` blocks. LMCache's is what its server has."""
    fields: dict[str, tuple[str, str, dict[str, Any]]] = {
        "kvpact": (
            "kvpact.vllm",
            "PactConnector",
            {
                "memory": f"{blocks * SLOT_BYTES}B",
                "model_id": "benchmark",
                "sync_load_budget": f"{SYNCHRONOUS_TOKENS // block_size * SLOT_BYTES}B",
            },
        ),
        "offloading": (
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
            "OffloadingConnector",
            {
                "spec_name": "MemcpySpec",
                "spec_module_path": "kvpact_testkit.vllm.offloading",
                "cpu_bytes_to_use": blocks * SLOT_BYTES,
            },
        ),
        "simple": (
            "kvpact_testkit.vllm.simple_offloading",
            "MemcpySimpleCPUOffloadConnector",
            {"cpu_bytes_to_use": blocks * block_size * 8},
        ),
        "lmcache": (
            "lmcache.integration.vllm.lmcache_mp_connector",
            "LMCacheMPConnector",
            {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": lmcache_port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        ),
    }
    module, name, config = fields[subject]
    if folder is not None:
        config["tiers"] = [f"disk://{folder}?capacity={max(2 * blocks * SLOT_BYTES, 1 << 30)}B"]
        config |= {
            "shutdown_timeout": "60s",
            "write_queue": "1GiB",
            "prepare_deadline": "60s",
            "recompute_if_faster": False,
        }
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": config}


SUBJECTS = ("kvpact", "offloading", "simple")
"""kvpact, vLLM's OffloadingConnector (CPU) and vLLM's SimpleCPUOffloadConnector."""
LMCACHE = "lmcache"
"""LMCache's connector, where a server of it listens."""


@contextmanager
def started(
    subjects: Sequence[str], room: int, folder: Path | None = None, lmcache_port: int = 0, **shape: int
) -> Iterator[dict[str, Any]]:
    """The scheduler halves by name, each with a cache for `room` times what the engine's `shape` holds at once."""
    from benchmarks.scheduler_halves import SchedulerHalf

    blocks = room * shape["requests"] * (-(-shape["tokens"] // shape["block_size"]) + 2) + 16
    with ExitStack() as stack:
        halves = {}
        for subject in subjects:
            fields = transfer(subject, blocks, shape["block_size"], folder, lmcache_port)
            halves[subject] = stack.enter_context(closing(SchedulerHalf(fields, **shape)))
        yield halves


def random_prompts(seed: int, tokens: int, requests: int) -> list[list[int]]:
    source = random.Random(seed)
    return [source.choices(range(30_000), k=tokens) for _ in range(requests)]


def hash_ms(prompt: Sequence[int], block_size: int) -> tuple[float, float]:
    """Milliseconds of kvpact's keys of a prompt, alone: of one that nobody had before, and of the same again."""
    from kvpact.identity.keys import BlockKeys, KnownRuns, RequestIdentity

    hashes = [number.to_bytes(32, "little") for number in range(len(prompt) // block_size)]
    identity, spent = RequestIdentity(known=KnownRuns({}, block_size, hashes)), list[float]()
    for _ in range(2):
        began = thread_time()
        BlockKeys(bytes(32), block_size, identity).extend(prompt)
        spent.append((thread_time() - began) * 1e3)
    return spent[0], spent[1]


class _Case:
    """The measured values of one row, by column; those of a peer begin with its name."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, subject: str, spent: Any, requests: int) -> None:
        """One run: the sums are divided by the requests, the dearest step is not."""
        before = "" if subject == "kvpact" else f"{subject}_"
        self._values[f"{before}cpu_ms"].append(spent.total / requests * 1e3)
        self._values[f"{before}cpu_ms_worst_step"].append(spent.worst_step * 1e3)
        if subject == "kvpact":
            for part in ("prepare", "order", "report"):
                self._values[f"{part}_ms"].append(spent.parts[part] / requests * 1e3)
            self._values["steps"].append(spent.steps)
        self._values["engine_hash_ms"].append(spent.engine_hash / requests * 1e3)

    def note(self, column: str, value: float) -> None:
        """One value of a column."""
        self._values[column].append(value)

    def columns(self) -> dict[str, Any]:
        """Medians and quartiles, and ours over each peer's: without any hashing, and with each one's own."""
        found: dict[str, Any] = {}
        for name, values in self._values.items():
            found |= spread(name, values)
        for peer in (*SUBJECTS[1:], LMCACHE):
            if (theirs := found.get(f"{peer}_cpu_ms")) is not None:
                hashes = found["engine_hash_ms"] if peer != LMCACHE else 0.0  # its server makes them
                found[f"over_{peer}"] = ratio(found["cpu_ms"], theirs + hashes)
                found[f"over_{peer}_without_hashes"] = ratio(found["cpu_ms"] - found["hash_ms"], theirs)
        return found


def _require_hit(subject: str, found: int, tokens: int, requests: int, block_size: int) -> None:
    wanted = (tokens - 1) // block_size * block_size * requests
    if found < wanted:
        raise SystemExit(f"{subject} brought {found} tokens of {wanted} that it was given to keep")


def _measure(
    subjects: Sequence[str],
    tokens: int,
    block_size: int,
    chunk: int,
    requests: int,
    rounds: int,
    probes: int,
    lmcache_port: int,
) -> Mapping[str, _Case]:
    """Cold prompts and the same again, in turn for all subjects."""
    cases: defaultdict[str, _Case] = defaultdict(_Case)
    warm = "hit" if requests == 1 else "arrivals"
    shape = {"tokens": tokens, "block_size": block_size, "chunk": chunk, "requests": requests}
    with started(subjects, 2, None, lmcache_port, **shape) as halves:
        for number in range(rounds + 1):  # the first round warms up and is not counted
            prompts = random_prompts(number, tokens, requests)
            order = list(halves.items())
            for subject, half in order if number % 2 else order[::-1]:
                cold = half.serve({f"cold{number}-{at}": prompt for at, prompt in enumerate(prompts)})
                half.forget()
                probe = half.probe_seconds(prompts[0], probes) if requests == 1 else 0.0
                hit, found = half.computed_of_cache({f"hit{number}-{at}": one for at, one in enumerate(prompts)})
                half.forget()
                _require_hit(subject, found, tokens, requests, block_size)
                if number:
                    cases["cold"].add(subject, cold, requests)
                    cases[warm].add(subject, hit, requests)
                    if requests == 1:
                        cases[warm].note("probe_us" if subject == "kvpact" else f"{subject}_probe_us", probe * 1e6)
            if number:
                new, again = hash_ms(prompts[0], block_size)
                for state, case in cases.items():
                    case.note("hash_ms", new if state == "cold" else again)
    if requests > 1:
        del cases["cold"]
    return cases


def _measure_restart(tokens: int, block_size: int, chunk: int, rounds: int) -> _Case:
    """One engine saves, and a new one over the same disk serves."""
    case = _Case()
    shape = {"tokens": tokens, "block_size": block_size, "chunk": chunk, "requests": 1}
    with tempfile.TemporaryDirectory(prefix="kvpact-lifecycle-") as folder:
        for number in range(rounds):
            (prompt,) = random_prompts(1000 + number, tokens, 1)
            with started(("kvpact",), 2, Path(folder), **shape) as halves:
                halves["kvpact"].serve({"cold": prompt})
            with started(("kvpact",), 2, Path(folder), **shape) as halves:
                spent, found = halves["kvpact"].computed_of_cache({"hit": prompt})
                _require_hit("kvpact after a restart", found, tokens, 1, block_size)
            case.add("kvpact", spent, 1)
            case.note("hash_ms", hash_ms(prompt, block_size)[0])
    return case


def rows(
    tokens: Sequence[int] = (1024, 4096, 32_768, 131_072, 1_048_576),
    block_sizes: Sequence[int] = (16, 128),
    chunks: Sequence[int] = (8192, 0),
    waiting: Sequence[int] = (10, 100, 1000),
    waiting_tokens: int = 1024,
    subjects: Sequence[str] = SUBJECTS,
    rounds: int = 5,
    probes: int = PROBES,
    restart: bool = True,
    lmcache_port: int = 0,
) -> list[dict[str, Any]]:
    """One row for each case; `chunks` are the engine's tokens a step, 0: the whole prompt in one step.

    `waiting`: requests of one step, 0: no such case.
    `lmcache_port`: of an `lmcache server` whose `--supported-transfer-mode` is `auto`.
    """
    require_vllm()
    require_known("--subjects", subjects, SUBJECTS)
    for option, least, numbers in (
        ("--tokens", 1, tokens), ("--block-sizes", 1, block_sizes), ("--chunks", 0, chunks), ("--waiting", 0, waiting),
        ("--waiting-tokens", 1, [waiting_tokens]), ("--rounds", 1, [rounds]), ("--probes", 1, [probes]),
    ):  # fmt: skip
        require_at_least(option, least, numbers)
    logging.disable(logging.WARNING)
    subjects = (*subjects, LMCACHE) if lmcache_port else subjects
    found: list[dict[str, Any]] = []

    def add(state: str, case: _Case, length: int, block_size: int, chunk: int, requests: int) -> None:
        where = {"tokens": length, "block_size": block_size, "state": state, "chunk": chunk, "waiting": requests}
        found.append(where | case.columns())

    for block_size in block_sizes:
        for length in tokens:
            for chunk in chunks:
                repeated = rounds if length <= DISK_LIMIT_TOKENS else min(rounds, 2)
                for state, case in _measure(
                    subjects, length, block_size, chunk, 1, repeated, probes, lmcache_port
                ).items():
                    add(state, case, length, block_size, chunk, 1)
            if restart and length <= DISK_LIMIT_TOKENS:
                case = _measure_restart(length, block_size, chunks[0], min(rounds, 3))
                add("restart", case, length, block_size, chunks[0], 1)
        for requests in filter(None, waiting):
            repeated = rounds if requests < 1000 else min(rounds, 2)
            for state, case in _measure(
                subjects, waiting_tokens, block_size, 0, requests, repeated, 0, lmcache_port
            ).items():
                add(state, case, waiting_tokens, block_size, 0, requests)
    return found
