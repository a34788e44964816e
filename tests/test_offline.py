"""H82: nothing is sent to anybody. kvpact imports no client of any network and opens no socket of one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from documents import PACKAGES
from kvpact_testkit.demo.engine import session_members

TESTS = Path(__file__).parent
CRASHING = TESTS / "cache"
"""Where `crash_child` is."""
NETWORK = {
    "aiohttp",
    "asyncio",
    "ftplib",
    "grpc",
    "http",
    "httpx",
    "imaplib",
    "opentelemetry",
    "poplib",
    "posthog",
    "requests",
    "sentry_sdk",
    "smtplib",
    "socket",
    "socketserver",
    "ssl",
    "telnetlib",
    "urllib3",
    "websockets",
    "xmlrpc",
    "zmq",
}
SENDING_CALLS = {"start_http_server", "start_wsgi_server", "push_to_gateway", "urlopen", "create_connection"}
STORES = {"tiers/mooncake/store.py"}
"""Tiers that talk to a store that the user named without a client of its own; nothing else may."""
ASKED = {"cache/status_socket.py", "cli/status.py", "pool/meeting.py"}
"""What a user and other engines ask: the engine's unix socket; and the page whose address the user gave."""
OWN_SERVERS = {"compare/server.py"}
"""What asks servers that it has started, on this machine's loopback."""
OTHERS_LOOPS = {"peers/lmcache_fs.py"}
"""Modules that wait on the event loop of another project's tier, which reads and writes files."""


def modules() -> list[Path]:
    """Those of both distributions."""
    return [
        path
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if str(path.relative_to(package)) not in STORES | OTHERS_LOOPS | OWN_SERVERS | ASKED
    ]


def network_use(source: str) -> list[str]:
    """Imports and calls in `source` that could send something somewhere."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            found += [f"line {node.lineno}: {name}()"] if name in SENDING_CALLS else []
        found += [
            f"line {node.lineno}: import {name}"
            for name in names
            if name.split(".")[0] in NETWORK or name.startswith("urllib.request")
        ]
    return found


def test_h82_no_module_can_send_anything() -> None:
    assert len(modules()) > 40
    findings = {str(path): network_use(path.read_text()) for path in modules()}
    assert {path: found for path, found in findings.items() if found} == {}


def test_an_engine_answers_on_a_socket_that_no_other_machine_can_reach() -> None:
    parts = ("cache/status_socket.py", "pool/meeting.py")
    sources = [ast.parse((PACKAGES[0] / part).read_text()) for part in parts]
    used = {node.attr for source in sources for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith(("AF_", "create_"))} == {"AF_UNIX"}


def test_a_comparison_asks_no_other_machine() -> None:
    source = (PACKAGES[1] / "compare/server.py").read_text()
    asked = re.findall(r"(?:HTTPConnection|create_connection)\(\(?([^,)]*)", source)
    assert len(asked) >= 2
    assert set(asked) == {'"127.0.0.1"'}


def test_network_use_is_recognised() -> None:
    source = "import socket\nfrom urllib import request\nfrom urllib.parse import quote\nurlopen('http://example.org')"
    assert len(network_use(source)) == 3


def run_without_network(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import socket_watch\nsocket_watch.forbid()\n{code}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )


def test_h82_a_cache_works_where_every_socket_is_forbidden(tmp_path: Path) -> None:
    code = f"import sys, pathlib; sys.path.insert(0, {str(CRASHING)!r}); import crash_child\n"
    code += "crash_child.main(pathlib.Path(sys.argv[1]), 80, 1)"
    child = run_without_network(code, str(tmp_path))
    try:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(50)]
    finally:
        for pid in session_members(child.pid):
            os.kill(pid, 9)
        child.communicate()
    assert lines[0].startswith("ready")
    assert all(line.startswith("reused") for line in lines[1:])


def test_a_forbidden_socket_is_noticed() -> None:
    child = run_without_network("import socket; socket.create_connection(('127.0.0.1', 9))")
    output, _ = child.communicate(timeout=30)
    assert "PermissionError: the network is not to be used" in output


def test_a_socket_of_the_package_is_recorded(tmp_path: Path) -> None:
    code = f"""
import socket_watch, socket
from pathlib import Path
socket_watch.watch(Path({str(tmp_path / "record")!r}))
compiled = compile("import socket; socket.socket(socket.AF_INET).connect_ex(('127.0.0.1', 9))",
                   socket_watch.PACKAGE + "/telemetry.py", "exec")
exec(compiled)
socket.socket(socket.AF_INET).close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(TESTS)})
    record = (tmp_path / "record").read_text()
    assert "socket.connect" in record
    assert record.count("\n  File") >= 2
