"""Engines of other releases, each in an environment of its own with a wheel of kvpact: the demonstration, end to end.

Making one takes minutes, and 4 GB. With KVPACT_ENGINES, a folder, they are made there, and stay.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpact_testkit.vllm.releases import RELEASES

ROOT = Path(__file__).parents[2]
ENGINES = ("0.30.0", "0.32.0")
"""Releases with a CPU build for the same torch. That of 0.32 is in every run of the tests, from a checkout."""

BY_NAME = """
from vllm.config import KVTransferConfig
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
found = KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector="PactConnector", kv_role="kv_both"))
import vllm
print(vllm.__version__.partition("+")[0], found.__module__)
"""

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", str(folder)]
    subprocess.run([*pip, str(ROOT), str(ROOT / "kit")], check=True)
    return folder


@pytest.fixture(params=ENGINES)
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def python(release: str, wheels: Path, tmp_path: Path) -> Iterator[Path]:
    """The interpreter of an environment with this release and the wheels."""
    kept = os.environ.get("KVPACT_ENGINES")
    place = Path(kept, f"venv-{release}") if kept else tmp_path / "venv"
    settings = {"KVPACT_VENV": str(place), "KVPACT_VLLM": release, "KVPACT_WHEELS": str(wheels)}
    subprocess.run(["./scripts/setup_venv.sh", "engine=cpu"], cwd=ROOT, env={**os.environ, **settings}, check=True)
    yield place / "bin" / "python"
    if not kept:
        shutil.rmtree(place)


def test_the_demonstration_passes_on_an_engine_of(release: str, python: Path, tmp_path: Path) -> None:
    """Alone in its environment: neither this checkout nor this interpreter's packages are on its path."""
    assert release in RELEASES
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVPACT_"))}
    run: dict[str, Any] = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    found = subprocess.run([python, "-c", BY_NAME], timeout=300, **run)
    assert found.stdout.splitlines()[-1:] == [f"{release} kvpact.vllm.connector"], found.stderr[-2000:]
    figures = tmp_path / "figures.json"
    done = subprocess.run([python, "-m", "kvpact", "demo", "--output", figures], timeout=1800, **run)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
    assert json.loads(figures.read_text())
