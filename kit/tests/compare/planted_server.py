"""A server that speaks as vLLM's does, computes nothing, and has the faults that its command line plants.

`python planted_server.py --host H --port P [--wrong-from N] [--dies-at N] [--refuses] [--store DIR] [--believes]`. Its
answer follows from the prompt alone. With a store it keeps a file for each prompt, and serves prompts whose file is
there; one that `--believes` its files answers from what is in them, another one computes where a file is damaged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FILE_BYTES = 1 << 16


def answer_to(prompt: list[int]) -> bytes:
    """The right answer, a token a byte."""
    return hashlib.blake2s(repr(prompt).encode()).digest()


class Planted(ThreadingHTTPServer):
    """What the server has seen and kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.options = options
        self.asked = 0
        self.kept: dict[str, bytes] = {}
        self.cached_tokens = 0
        self.lock = threading.Lock()

    def answer(self, prompt: list[int]) -> tuple[bytes, int]:
        """The answer, and how many tokens of the prompt were served."""
        right = answer_to(prompt)
        name = right.hex()
        with self.lock:
            self.asked += 1
            number = self.asked
        if number >= self.options.wrong_from:
            return bytes(255 - token for token in right), 0
        if self.options.store is None or len(prompt) < 100:
            return right, 0
        file = Path(self.options.store, name)
        if name in self.kept:
            return self.kept[name], len(prompt) - 1
        if file.exists():
            data = file.read_bytes()
            sound = data == right * (FILE_BYTES // len(right))
            if sound or self.options.believes:
                # Every flipped bit shows, wherever it is.
                self.kept[name] = right if sound else hashlib.blake2s(data).digest()
                return self.kept[name], len(prompt) - 1
        file.write_bytes(right * (FILE_BYTES // len(right)))
        self.kept[name] = right
        return right, 0


class Handler(BaseHTTPRequestHandler):
    """The three paths that a comparison asks."""

    server: Planted

    def log_message(self, *_: Any) -> None:
        """Nothing: the log is for last words."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n'
            source = f'vllm:prompt_tokens_cached_by_source_total{{source="disk"}} {self.server.cached_tokens}\n'
            self.wfile.write(
                f"# TYPE vllm:cache_config_info gauge\n{info}"
                f"# TYPE vllm:prompt_tokens_cached_by_source_total counter\n{source}".encode()
            )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens, served = self.server.answer(asked["prompt"])
        self.server.cached_tokens += served
        self.send_response(200)
        self.end_headers()
        for number in range(asked["max_tokens"]):
            if self.server.asked >= self.server.options.dies_at and number:
                print("(EngineCore pid=1) ERROR RuntimeError: planted in the middle", file=sys.stderr, flush=True)
                os._exit(1)
            self._send({"choices": [{"token_ids": [tokens[number % len(tokens)]]}]})
            time.sleep(0.001)
        usage = {"prompt_tokens": len(asked["prompt"]), "prompt_tokens_details": {"cached_tokens": served}}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, part: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--wrong-from", type=int, default=1 << 30)
    parser.add_argument("--dies-at", type=int, default=1 << 30)
    parser.add_argument("--refuses", action="store_true")
    parser.add_argument("--store")
    parser.add_argument("--believes", action="store_true")
    options = parser.parse_args()
    if options.refuses:
        raise RuntimeError("only supported on planted GPUs")
    Planted(options).serve_forever()


if __name__ == "__main__":
    main()
