"""Plays the three runs of docs/first-hour.md on real engines, and writes what was typed and answered into the page.

    python scripts/play_first_hour.py [--keep FOLDER]

Takes some minutes: an engine on a tiny model is started three times. Each block of the page that follows a comment
`<!-- played: NAME -->` is replaced; the words between them are written by hand. Commands run in a folder of their own,
as they are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kit/src", "testbeds", "tests")]

from documents import document_blocks  # noqa: E402
from kvpact_testkit.demo.model import TINY_SHAPE, ensure_model  # noqa: E402
from servers.redis_server import redis_server  # noqa: E402
from tiny_engine import TOKENIZER_TEXT  # noqa: E402

PORT = 8000
ASK = f"curl -s localhost:{PORT}/v1/completions -H 'Content-Type: application/json' -d @{{}}.json"
"""A question, the one in prompt.json or another one."""

START_SECONDS = 300.0
SEEN_SECONDS = 4.0
"""Until what a step has counted stands on the page of metrics and in the tiers."""

SMALL = "--enable-prompt-tokens-details --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 67108864"
"""vLLM's options: to say in each answer how many tokens were cached, and for a tiny model on a small machine."""

SHOWN = re.compile(r'"id":"[^"]*"|"prompt_tokens":\d+|"cached_tokens":\d+')
"""What is shown of an answer."""


class Player:
    """A user's shell in a folder, and what is typed and answered there, by the name of its block in the page."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.blocks = folder, dict[str, list[str]]()
        self.server: subprocess.Popen[bytes] | None = None
        (folder / "bin").mkdir()
        command = folder / "bin" / "kvpact"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvpact "$@"\n')
        command.chmod(0o755)
        paths = [folder, *(ROOT / part for part in ("src", "kit/src"))]
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith("KVPACT_")} | {
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XDG_RUNTIME_DIR": str(folder),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "KVPACT_RECOMPUTE_IF_FASTER": "false",  # a tiny model computes faster than a busy disk reads
            "COLUMNS": "100",
        }

    def type(self, block: str, command: str, shown: str = "", *, only: re.Pattern[str] | None = None) -> str:
        """Run a command and note it, or `shown` in its place, with its answer; `only` of it. Returns the answer."""
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        said = done.stdout + done.stderr
        answer = " ".join(only.findall(said)) if only else said.rstrip().replace(str(self.folder), "/home/you")
        code = [f"(exit code {done.returncode})"] if done.returncode else []
        lines = [f"$ {shown or command}", *answer.splitlines(), *code]
        self.blocks.setdefault(block, []).extend(line.rstrip() for line in lines)
        return said

    def serve(self, block: str, command: str) -> None:
        """Start a server, and wait until it is well."""
        self.blocks.setdefault(block, []).append(f"$ {command} &")
        log = (self.folder / "server.log").open("wb")
        self.server = subprocess.Popen(
            f"exec {command}", shell=True, cwd=self.folder, env=self.environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urlopen(f"http://localhost:{PORT}/health", timeout=5):
                    return
            except OSError:
                if self.server.poll() is not None or time.monotonic() > deadline:
                    sys.exit((self.folder / "server.log").read_text()[-3000:])
                time.sleep(0.5)

    def ask(self, block: str) -> str:
        """Ask the question of prompt.json; returns the answer's id."""
        said = self.type(block, ASK.format("prompt"), only=SHOWN)
        time.sleep(SEEN_SECONDS)
        return str(json.loads(said)["id"])

    def stop(self, block: str = "") -> None:
        """End the server as a service manager does."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(120)
            if block:
                self.blocks.setdefault(block, []).append("$ kill %1 && wait")
            self.server = None


def first_run(user: Player) -> None:
    """Serve, see that it helps, restart, see that it helps."""
    command = f"kvpact serve ./model --memory 64MiB --tier 'disk://{user.folder}/cache?capacity=1GiB' {SMALL}"
    user.serve("serve", command)
    user.ask("serve")
    user.ask("serve")
    user.type("serve", "kvpact status")
    user.stop("restart")
    user.serve("restart", command)
    answered = user.ask("restart")
    user.type("restart", ASK.format("another"), only=SHOWN)
    time.sleep(SEEN_SECONDS)
    user.type("restart", "kvpact status")
    user.type("restart", f"kvpact why {answered}")


def second_run(user: Player) -> None:
    """A store dies behind the engine."""
    user.stop()
    with redis_server(user.folder / "redis") as server:
        url = f"redis://localhost:{server.port}/0"
        user.serve("dies", f"kvpact serve ./model --memory 64MiB --tier '{url}' {SMALL}")
        user.ask("dies")
        user.type("dies", "kvpact status")
        server.process.kill()
        server.process.wait()
        user.blocks["dies"].append("$ kill -9 $(pidof redis-server)")
        for number in range(5):
            user.type("", ask_another(number))
            time.sleep(1)
        user.ask("dies")
        user.type("dies", "kvpact status")
        user.type("dies", f"kvpact tiers '{url}'")
        user.type("dies", "grep -ao 'kvpact: the .* tier is left alone.*' server.log")
        user.type("dies", f"curl -s -o /dev/null -w '%{{http_code}}\\n' localhost:{PORT}/health")


def ask_another(number: int) -> str:
    body = json.dumps({"model": "./model", "prompt": f"{number} {TOKENIZER_TEXT}"[:4000], "max_tokens": 1})
    return f"curl -s localhost:{PORT}/v1/completions -H 'Content-Type: application/json' -d '{body}'"


def third_run(user: Player) -> None:
    """The tier of docs/write-a-tier.md, as a distribution of its own."""
    user.stop()
    for block in document_blocks("docs/write-a-tier.md"):
        if block.file:
            (user.folder / block.file).write_text(block.text)
    (user.folder / "my_tier.py").write_text(
        "from pathlib import Path\n\nfrom file_tier import FileTier\n\n\n"
        "def open_tier(url, place):\n    return FileTier(Path(url.path), place.namespace, place.slot_bytes)\n"
    )
    metadata = user.folder / "my_tier-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-tier\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvpact.tiers]\nmystore = my_tier:open_tier\n")
    (user.folder / "blocks").mkdir()
    user.type("own", "cat my_tier.py")
    tier = f"mystore://{user.folder}/blocks"
    user.serve("own", f"kvpact serve ./model --memory 64MiB --tier '{tier}' {SMALL}")
    user.ask("own")
    user.type("own", "kvpact status")
    user.type("own", f"kvpact tiers '{tier}'")


def with_blocks(page: str, blocks: dict[str, list[str]], folder: Path) -> str:
    """The page with what was typed and answered in its blocks."""
    for name, lines in blocks.items():
        text = "\n".join(lines).replace(str(folder), "/home/you")
        block = re.compile(rf"(<!-- played: {name} -->\n```text\n).*?(```)", re.DOTALL)
        if name and not block.search(page):
            sys.exit(f"{PAGE} has no block <!-- played: {name} -->")
        page = block.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="play there, and leave what was made")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    shutil.copytree(ensure_model(folder, TINY_SHAPE, TOKENIZER_TEXT), folder / "model")
    body = {"model": "./model", "prompt": TOKENIZER_TEXT[:4200], "max_tokens": 1}
    (folder / "prompt.json").write_text(json.dumps(body))
    another = {**body, "prompt": f"Another question. {TOKENIZER_TEXT}"[:4000], "max_tokens": 8}
    (folder / "another.json").write_text(json.dumps(another))
    user = Player(folder)
    try:
        first_run(user)
        second_run(user)
        third_run(user)
    finally:
        user.stop()
        if given.keep is None:
            shutil.rmtree(folder)
    PAGE.write_text(with_blocks(PAGE.read_text(), user.blocks, folder))


if __name__ == "__main__":
    main()
