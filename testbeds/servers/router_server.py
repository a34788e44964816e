"""Routers that read the KV events of engines, as a user starts them, and a tap on what an engine publishes.

Owns their processes and what they are asked over HTTP. `python` is the interpreter of an environment with
`REQUIREMENTS`, in which no vLLM is; none of this is a dependency of kvpact.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import Request, urlopen

from msgspec import msgpack
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from zmq.constants import SocketType
from zmq.sugar.context import Context

from servers.redis_server import free_ports

REQUIREMENTS = ("ai-dynamo-runtime==1.6.1", "vllm-router==0.1.17")

START_SECONDS = 60.0
STOP_SECONDS = 10.0
MODEL = "tiny"
"""The name under which engines are registered, which is that of their servers."""

TIERS = {"device": "GPU", "host_pinned": "CPU", "disk": "STORAGE"}
"""Dynamo's words for the media."""


class Publisher(NamedTuple):
    """Where an engine publishes its events."""

    port: int
    replay_port: int | None = None
    """None: nobody can ask for what was missed."""

    @classmethod
    def at_free_ports(cls) -> Publisher:
        return cls(*free_ports(2))

    def option(self) -> str:
        """Value of the option `--kv-events-config`."""
        places = {"endpoint": f"tcp://*:{self.port}", "replay_endpoint": f"tcp://*:{self.replay_port}"}
        return json.dumps({"enable_kv_cache_events": True, **places})

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        """Empty if there is none."""
        return f"tcp://127.0.0.1:{self.replay_port}" if self.replay_port else ""


class Overlap(NamedTuple):
    """Tokens of a prompt that an engine has by the indexer: in the GPU's blocks, with memory's, and with the disk's."""

    gpu: int
    cpu: int
    disk: int


class Indexer:
    """`python -m dynamo.indexer`: it subscribes to engines, and says of a prompt how much each has."""

    def __init__(self, python: Path, log: Path) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._stack = ExitStack()
        command = [str(python), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        self._stack.enter_context(_running(command, log, f"{self._url}/health"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def register(self, instance: int, publisher: Publisher, block_size: int) -> None:
        """Subscribe to the events of an engine."""
        places = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        self._post("register", instance_id=instance, model_name=MODEL, block_size=block_size, **places)

    def unregister(self, instance: int) -> None:
        """Forget an engine and all that it holds."""
        self._post("unregister", instance_id=instance, model_name=MODEL)

    def query(self, instance: int, tokens: list[int]) -> Overlap:
        """Tokens of a prompt that this engine has, by its events."""
        found = self._post("query", token_ids=tokens, model_name=MODEL)["instances"].get(str(instance), {})
        return Overlap(*(found.get(tier, 0) for tier in Overlap._fields))

    def blocks(self, instance: int) -> dict[str, set[int]]:
        """The hashes of all blocks of an engine, by medium."""
        found = defaultdict[str, set[int]](set)
        for entry in _asked(f"{self._url}/dump").get(f"{MODEL}:default", {}).get("events", ()):
            if entry["worker_id"] == instance:
                blocks = entry["event"]["data"]["stored"]["blocks"]
                found[TIERS[entry["storage_tier"]]] |= {block["block_hash"] for block in blocks}
        return found

    def _post(self, path: str, **body: object) -> Any:
        return _asked(f"{self._url}/{path}", body)


@contextmanager
def vllm_router(
    python: Path, log: Path, policy: str, engines: Mapping[int, Publisher], block_size: int, *options: str
) -> Iterator[str]:
    """`vllm-router` in front of engines, by their servers' ports; its URL.

    It waits for a request's answer of every engine before it begins.
    """
    port, metrics_port = free_ports(2)
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    command = [str(python.with_name("vllm-router")), "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", policy, "--worker-urls", *urls, "--health-check-interval-secs", "1", *options]
    if policy == "kv_aware":
        for url, publisher in zip(urls, engines.values(), strict=True):
            command += ["--kv-event-source", f"{url}={publisher.endpoint}"]
            if publisher.replay_endpoint:
                command += ["--kv-event-replay-source", f"{url}={publisher.replay_endpoint}"]
        command += ["--kv-event-block-size", str(block_size), "--kv-event-model", MODEL]
    with _running(command, log, f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


class Tap:
    """Subscribes to an engine's events as vLLM's own example does, keeps them, and passes on those of some media.

    Who subscribes to `passed_on` sees the engine as if it sent nothing of other media.
    """

    def __init__(self, publisher: Publisher, media: Collection[str] = ()) -> None:
        self.passed_on = Publisher(free_ports(1)[0])
        self.events: list[BlockStored | BlockRemoved | Any] = []
        self._publisher = publisher
        self._media = media
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failed: Exception | None = None
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        assert self._failed is None, self._failed

    def of_block(self, tokens: list[int], block_size: int) -> list[str]:
        """The events, in words, that name the block whose last tokens are these."""
        hashes = set()
        for event in self.events:
            if isinstance(event, BlockStored):
                for number, block_hash in enumerate(event.block_hashes):
                    if event.token_ids[number * block_size : (number + 1) * block_size] == tokens:
                        hashes.add(block_hash)
        return [
            f"{number}: {type(event).__name__} {event.medium}"
            for number, event in enumerate(self.events)
            if hashes & set(getattr(event, "block_hashes", ()))
        ]

    def _run(self) -> None:
        decoder = msgpack.Decoder(KVEventBatch)
        encoder = msgpack.Encoder()
        with Context() as context, context.socket(SocketType.SUB) as source, context.socket(SocketType.PUB) as target:
            for socket in (source, target):
                socket.linger = 0
            source.connect(self._publisher.endpoint)
            source.subscribe(b"")
            target.bind(f"tcp://*:{self.passed_on.port}")
            while not self._closed.is_set():
                if not source.poll(50):
                    continue
                topic, number, payload = source.recv_multipart()
                try:
                    batch = decoder.decode(payload)
                except Exception as error:
                    self._failed = error
                    return
                self.events += batch.events
                if self._media:
                    batch.events = [each for each in batch.events if getattr(each, "medium", "GPU") in self._media]
                    target.send_multipart((topic, number, encoder.encode(batch)))


def settled(read: Callable[[], Any], still_s: float = 0.06, most_s: float = 10.0) -> Any:
    """Read until it has not changed for a while; the last reading."""
    deadline = time.monotonic() + most_s
    found, since = read(), time.monotonic()
    while time.monotonic() - since < still_s:
        time.sleep(0.01)
        if (again := read()) != found:
            assert time.monotonic() < deadline, f"{found} has become {again}, and never rests"
            found, since = again, time.monotonic()
    return found


@contextmanager
def _running(command: list[str], log: Path, health: str) -> Iterator[None]:
    """A process that is well at this address, and is ended at last."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                with urlopen(health, timeout=5):
                    break
            except OSError:
                assert process.poll() is None, f"{command} left with {process.returncode}:\n{log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, f"{command}: no answer\n{log.read_text()[-2000:]}"
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _asked(url: str, body: Mapping[str, object] | None = None) -> Any:
    sent = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, sent, {"Content-Type": "application/json"}), timeout=20) as answer:
        return json.loads(answer.read())
