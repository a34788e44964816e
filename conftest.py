"""Fixtures that all tests share, and which tests one worker runs where there are several."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from at_the_end import end_all
from kvpact_testkit.demo.engine import CORES
from long_tests import LONG
from reached import loads_engine, needs_engine_or_server, starts_engine_or_server

# An example's time says more about a busy machine than about the code; pytest-timeout ends what hangs.
settings.register_profile("kvpact", deadline=None)
settings.load_profile("kvpact")

pytest_plugins = ["engines"]

gc.disable()  # until all is collected: vLLM's modules stay, and looking through them takes a fifth of their loading


def core_of_worker(worker: str) -> int:
    """Of "gw0", "gw1", ..., each of which binds its engines to a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[int(worker.removeprefix("gw")) % len(cores)]


if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ[CORES] = str(core_of_worker(os.environ["PYTEST_XDIST_WORKER"]))

ENGINES = (
    "kit/tests/demo/test_demo.py",
    "tests/test_gpu_answers.py",
    "kit/tests/test_conformance_command.py",
    "tests/under_vllm/test_engine_by_name.py",
    "tests/under_vllm/test_engine_company.py",
    "tests/under_vllm/test_engine_compare.py",
    "tests/under_vllm/test_engines_share_memory.py",
    "tests/under_vllm/test_engine_documents.py",
    "tests/under_vllm/test_engine_e2e.py",
    "tests/under_vllm/test_engine_families.py",
    "tests/under_vllm/test_engine_faults.py",
    "tests/under_vllm/test_engine_fleet.py",
    "tests/under_vllm/test_engine_gaps.py",
    "tests/under_vllm/test_engine_identity.py",
    "tests/under_vllm/test_engine_leasing.py",
    "tests/under_vllm/test_engine_limits.py",
    "tests/under_vllm/test_engine_keys.py",
    "tests/under_vllm/test_engine_lives.py",
    "tests/under_vllm/test_engine_metrics.py",
    "tests/under_vllm/test_engine_newest.py",
    "tests/under_vllm/test_engine_offload_tier.py",
    "tests/under_vllm/test_engine_offloading.py",
    "tests/under_vllm/test_engine_other_caches.py",
    "tests/under_vllm/test_engine_played_device.py",
    "tests/under_vllm/test_engine_releases.py",
    "tests/under_vllm/test_engine_scheduler_class.py",
    "tests/under_vllm/test_engine_simple_cpu_offload.py",
    "tests/under_vllm/test_engine_start.py",
    "tests/under_vllm/test_engine_states.py",
    "tests/under_vllm/test_engine_states_and_drafts.py",
    "tests/under_vllm/test_mla.py",
    "tests/under_vllm/test_engine_step_hook.py",
    "tests/under_vllm/test_engine_weight_files.py",
    "tests/under_vllm/test_engine_weights.py",
    "tests/under_vllm/test_flood.py",
    "tests/under_vllm/test_http_first_hour.py",
    "tests/under_vllm/test_http_life.py",
    "tests/under_vllm/test_http_neighbours.py",
    "tests/under_vllm/test_http_routers.py",
    "tests/under_vllm/test_http_slow_store.py",
    "tests/under_vllm/test_http_states.py",
    "tests/under_vllm/test_http_status.py",
    "tests/under_vllm/test_pressure.py",
    "tests/under_vllm/test_store_faults.py",
    "tests/under_vllm/test_tensor_parallel.py",
)
"""Files whose tests start real engines.

One worker runs them, one after another: they share engines, all of which are bound to one core. Meanwhile other workers
run the other files, each in one of them. Of the proofs each worker takes one file after another, with engines or not.
"""

LONGEST = (
    "tests/under_vllm/test_store_faults.py",
    "tests/under_vllm/test_engine_documents.py",
    "kit/tests/test_vllm_releases.py",
    "kit/tests/test_cache_conformance.py",
    "tests/worker/device/test_proof.py",
    "kit/tests/test_vllm_driver.py",
    "kit/tests/test_machine.py",
)
"""They begin first, the dearest at first, or a worker would have nothing to do in the end."""


def only_proofs(config: pytest.Config) -> bool:
    """Whether this is a run of the proofs."""
    return bool(config.getoption("markexpr").startswith("proof"))


HOUSE = ("tests/test_house.py", "tests/test_count_lines.py")
"""`make check` runs the rules of the house first."""


def without_engines_and_servers(config: pytest.Config) -> bool:
    """Whether this is a run of the tests that need neither."""
    return "not real" in config.getoption("markexpr")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where no test may need an engine, no file is loaded that loads vLLM; of the proofs, none that has none."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if only_proofs(config):
        return "mark.proof" not in collection_path.read_text(encoding="utf-8") or None
    return (without_engines_and_servers(config) and loads_engine(collection_path)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Skip a test that asks for a server only now, by `request.getfixturevalue`."""
    if without_engines_and_servers(request.config) and starts_engine_or_server(fixturedef.func):
        fixturedef.func = needs_more  # type: ignore[misc]


def needs_more(*_: object, **__: object) -> None:
    """Take the place of a fixture that would start an engine or a server."""
    pytest.skip("needs a real engine or server")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs an engine or a server `real`, and the longest of the rest `long`.

    The house comes first, then engines, which take longest; of the proofs, of which each file is apart, the longest
    files.
    """
    proofs = only_proofs(config)

    def rank(item: pytest.Item) -> tuple[int, bool, bool, int]:
        long = next((place for place, file in enumerate(LONGEST) if item.nodeid.startswith(file)), len(LONGEST))
        is_house = without_engines_and_servers(config) and item.nodeid.startswith(HOUSE)
        return long if proofs else 0, not is_house, not item.nodeid.startswith(ENGINES), long

    for item in items:
        if item.get_closest_marker("engine") or needs_engine_or_server(item):
            item.add_marker("real")
        if item.nodeid.startswith(LONG):
            item.add_marker("long")
        needs_engine = item.get_closest_marker("engine") or "tiny_model" in getattr(item, "fixturenames", ())
        if needs_engine and not item.nodeid.startswith(ENGINES):
            raise pytest.UsageError(f"{item.nodeid} starts an engine; its file must be among ENGINES in {__file__}")
    items.sort(key=rank)


TESTS_RUN = count()


@pytest.fixture(autouse=True)
def engines_meet_in_a_folder_of_their_test(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines answer, and meet each other, in a folder that no engine of another test, and none of a developer, knows.

    An engine that later tests use too stays in that of the first.
    """
    folders = tmp_path_factory.getbasetemp() / "run"
    folders.mkdir(exist_ok=True)
    (folder := folders / str(next(TESTS_RUN))).mkdir()
    os.environ["XDG_RUNTIME_DIR"] = str(folder)


def pytest_collection_finish() -> None:
    """What is loaded is loaded."""
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    """What the test has opened ends while its fixtures still stand."""
    try:
        end_all()
    finally:
        ended = yield
    return ended


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`: a worker gets a file, or all engines, of the proofs a file only."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    proofs = only_proofs(config)

    class FilesAndEngines(LoadScopeScheduling):
        """See `ENGINES`."""

        def _split_scope(self, nodeid: str) -> str:
            return "engines" if not proofs and nodeid.startswith(ENGINES) else nodeid.split("::", 1)[0]

    return FilesAndEngines(config, log)
