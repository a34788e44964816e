"""Texts in another encoding than UTF-8: what is read is read as it was written, what is printed is never refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.identity.keys import Namespace
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from servers.redis_server import redis_server

MODEL = "modèle/日本"
NOT_UTF_8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale in which Python reads files as ASCII unless it is told otherwise."""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    found = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, env=found, check=False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["verify"]])
def test_a_terminal_without_the_letters_of_a_name_gets_them_escaped(
    tmp_path: Path, encoding: str, command: list[str]
) -> None:
    namespace = Namespace({"model": MODEL, "block_size": "16"})
    place = tmp_path / "日本"
    open_tier(parse_tier_url(f"disk://{place}?capacity=1MiB"), TierContext(namespace, 4096)).close()
    program = "from kvpact.cli.app import main\nmain()"
    done = run(program, *command, str(place), PYTHONIOENCODING=encoding, PYTHONUTF8="1")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    empty = run(program, "verify", str(tmp_path / "日本" / "nothing"), PYTHONIOENCODING=encoding, PYTHONUTF8="1")
    assert empty.returncode == 2
    assert b"Traceback" not in empty.stderr
    shown = "日本".encode("utf-8" if encoding == "ascii" else "latin-1", "backslashreplace")
    assert shown in empty.stderr, "errors too; click takes ASCII for a mistake"


def test_a_password_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """Python reads files by the locale unless it is told otherwise."""
    secret = tmp_path / "password"
    secret.write_bytes("pässwörd".encode())
    program = """
import sys
from kvpact.tiers.registry import open_store
from kvpact.tiers.urls import parse_tier_url
print(open_store(parse_tier_url(sys.argv[1])).exists(["0" * 16 + "/" + "0" * 64]))
"""
    with redis_server(tmp_path / "redis", password="pässwörd") as server:
        done = run(program, f"redis://{server.address}?password_file={secret}&timeout=10", **NOT_UTF_8)
    assert done.stdout == b"[False]\n", done.stderr


def test_vllms_own_sources_are_read_as_utf_8_whatever_the_locale() -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    program = "from kvpact.cli.vllm_options import vllm_options\nprint('max-model-len' in vllm_options())"
    done = run(program, **NOT_UTF_8)
    assert done.stdout == b"True\n", done.stderr


def test_a_process_may_have_a_name_that_is_no_text() -> None:
    """Every process may call itself as it likes, and those of other engines are looked at before memory is taken."""
    program = """
import os
from pathlib import Path
from kvpact.identity.base_weights import process_start_ns
from kvpact.memory import limits
Path("/proc/self/comm").write_bytes(b"r\\xe9gl\\xe9")
print(process_start_ns() > 0, limits.promised_elsewhere("none", os.stat("/"), by_siblings=False))
"""
    done = run(program)
    assert done.stdout == b"True (0, 0)\n", done.stderr
