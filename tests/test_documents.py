"""The code blocks of README.md and docs/*.md do what they say: each is run, here or elsewhere, or a reason is given.

A block is known by its document and a piece of its text. The list of all is printed at the end of the test run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpact
from documents import CODE, NOT_CODE, ROOT, Block, block_with, document_blocks, documents, filled_in
from kvpact.config import load_config
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import chained
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact.vllm.offload.settings import COUNTED, Beside
from kvpact_testkit.sample_blocks import document, filled_buffers
from servers.redis_server import redis_server

Test = Callable[..., None]
RUN_HERE: dict[tuple[str, str], str] = {}
"""(document, piece of text) -> the test below that runs the block."""

CACHES, TIERS = "docs/write-a-connector.md", "docs/write-a-tier.md"
CONNECTORS = "docs/write-a-vllm-connector.md"
PEERS = "docs/peers.md"

RUN_ELSEWHERE = {
    ("README.md", "kvpact serve MODEL"): "tests/under_vllm/test_http_life.py",
    ("README.md", "vllm serve MODEL"): "tests/under_vllm/test_http_life.py",
    ("docs/configuration.md", "llm = LLM("): "tests/under_vllm/test_engine_documents.py",
    ("docs/weights.md", "take_in_weights"): "tests/under_vllm/test_engine_weights.py",
    ("docs/worker-hook.md", "examples/step_hook_connector.py"): "tests/under_vllm/test_engine_documents.py",
    (CACHES, "class FirstCache"): "kit/tests/test_write_a_connector.py",
    (CACHES, "kvpact conformance first_cache:FirstCache"): "kit/tests/test_write_a_connector.py",
    (CACHES, "class MinimalCache"): "kit/tests/test_write_a_connector.py",
    (CACHES, "class TestMinimalCache"): "kit/tests/test_write_a_connector.py",
    (CACHES, "run_conformance"): "kit/tests/test_write_a_connector.py",
    (CACHES, "PactMachine"): "kit/tests/test_write_a_connector.py",
    (CONNECTORS, "class PlannedConnector"): "tests/under_vllm/test_write_a_vllm_connector.py",
    (CONNECTORS, "class HandedBackConnector"): "tests/under_vllm/test_write_a_vllm_connector.py",
    (CONNECTORS, "class ToldConnector"): "tests/under_vllm/test_write_a_vllm_connector.py",
    (CONNECTORS, "class DocumentedConnector"): "tests/under_vllm/test_write_a_vllm_connector.py",
    (CONNECTORS, "class Leases"): "tests/under_vllm/test_write_a_vllm_connector.py",
    (PEERS, "FileSystemTierManager(N(config"): "kit/tests/test_peers.py",
    (PEERS, "tier.submit_store(job(1, 0))"): "kit/tests/test_peers.py",
    (PEERS, "target=tier.shutdown"): "kit/tests/test_peers.py",
    (PEERS, "tier.file_mapper.get_run_config()"): "kit/tests/test_peers.py",
    (PEERS, "OffloadingConnectorWorker(N("): "kit/tests/test_peers.py",
    (TIERS, "class FirstTier"): "kit/tests/test_write_a_tier.py",
    (TIERS, "class FileTier"): "kit/tests/test_write_a_tier.py",
    (TIERS, "class TestFileTier"): "kit/tests/test_write_a_tier.py",
}
"""Where other tests run a block: they look it up in its document."""

_INSTALLS = (
    "installs from a package index; test_install.py runs the commands with what kvpact asks for, and nothing else"
)
_ON_A_GPU = "needs a GPU or a registry; test_gpu_command.py and test_pack.py run the scripts with stand-ins"
_OF_A_PEER = (
    "needs LMCache, SGLang or nixl, which kvpact asks for nowhere; run by hand on the page's date, with its releases"
)
NOT_RUN = {
    (PEERS, "kvpact conformance --peers"): "judges all peers, for minutes; test_peers.py runs the command on stand-ins",
    (PEERS, "server = ThreadedMotoServer("): _OF_A_PEER,
    (PEERS, "memory[0] = 8"): _OF_A_PEER,
    (PEERS, 'os.environ.pop("NIXL_TELEMETRY_ENABLE")'): _OF_A_PEER,
    (PEERS, "FSL2Adapter(FSL2AdapterConfig"): _OF_A_PEER,
    (PEERS, "adapter.submit_load_task(keys, loaded"): _OF_A_PEER,
    (PEERS, "adapter.query_lookup_and_lock_result"): _OF_A_PEER,
    (PEERS, "@0x00000000@0@"): _OF_A_PEER,
    (PEERS, "HiCacheFile(HiCacheStorageConfig("): _OF_A_PEER,
    (PEERS, 'print("wrong bytes:", int((one'): _OF_A_PEER,
    (PEERS, "file.truncate(8191)\nfor _ in range(2):\n    try"): _OF_A_PEER,
    (PEERS, "other.clear()"): _OF_A_PEER,
    (PEERS, "storage(max_size="): _OF_A_PEER,
    ("README.md", "make demo"): "`make test` is this suite; a small form of the demonstration is in test_demo.py",
    ("README.md", "kvpact why ID"): "asks a running server; docs/first-hour.md has a run",
    ("README.md", "pip install dist/"): "builds wheels; test_install.py runs the commands without extras",
    ("docs/configuration.md", "vllm serve MODEL --max-model-len"): (
        "the README's two commands, which test_http_life.py starts, with one more option of vLLM's; what stands in "
        "$(...) is run by test_the_page_on_configuration_sets_what_it_says"
    ),
    ("docs/gpu.md", "scripts/pack_vllm.py"): _ON_A_GPU,
    ("docs/gpu.md", "nvidia-smi; nproc"): _ON_A_GPU,
    ("docs/gpu.md", "--only graphs"): _ON_A_GPU,
    ("docs/gpu.md", "--only answers"): _ON_A_GPU,
    ("docs/vllm-driver.md", "run_on_release"): (
        "fetches a release of vLLM, 2 GB; kit/tests/test_vllm_releases.py calls the same function on releases at hand"
    ),
    ("docs/offloading.md", "kvpact serve MODEL --through"): (
        "vLLM's offloading starts on a GPU only; tests/cli/test_through_offloading.py runs the command with a stand-in"
    ),
    ("docs/weights.md", "curl --fail"): (
        "needs a server in vLLM's development mode; test_engine_weights.py makes the same calls through `vllm.LLM`, "
        "with the sleep's reset for the pause's"
    ),
    ("docs/worker-hook.md", "vllm serve MODEL --worker-cls"): (
        "'{...}' stands for any connector; test_engine_step_hook.py starts engines with this worker class"
    ),
    (CONNECTORS, "vllm serve MODEL --scheduler-cls"): (
        "'{...}' stands for any connector; test_engine_scheduler_class.py starts engines with this scheduler class"
    ),
    (CACHES, "pip install"): _INSTALLS,
    (TIERS, "pip install"): _INSTALLS,
}
"""Why nobody runs a block as it stands."""


def runs(path: str, text: str) -> Callable[[Test], Test]:
    """Marks a test as the one that runs the block of `path` that holds `text`."""

    def note(test: Test) -> Test:
        RUN_HERE[path, text] = test.__name__
        return test

    return note


def code_blocks() -> list[Block]:
    return [block for path in documents() for block in document_blocks(path) if block.is_code]


def where_it_is_run(block: Block) -> list[str]:
    """What the three tables say of a block, each with its first word."""
    tables = (("run by", RUN_HERE), ("run by", RUN_ELSEWHERE), ("not run:", NOT_RUN))
    return [
        f"{word} {said}"
        for word, table in tables
        for (path, text), said in table.items()
        if path == block.path and text in block.text
    ]


def test_every_block_is_run_or_has_a_reason(record_property: Callable[[str, object], None]) -> None:
    blocks = {block.name: where_it_is_run(block) for block in code_blocks()}
    lines = [f"{name}: {'; '.join(said) or 'NOBODY RUNS IT'}" for name, said in blocks.items()]
    record_property("documents", "\n".join(lines))
    assert [name for name, said in blocks.items() if len(said) != 1] == [], "each needs one line in one table"


def test_every_line_of_the_tables_names_one_block() -> None:
    for path, text in [*RUN_HERE, *RUN_ELSEWHERE, *NOT_RUN]:
        assert block_with(path, text), (path, text)
    for (path, _), test in RUN_ELSEWHERE.items():
        source = (ROOT / test).read_text()
        assert Path(path).name in source, f"{test} does not read {path}"


def test_every_fence_has_a_language_that_says_whether_it_is_code() -> None:
    blocks = [block for path in documents() for block in document_blocks(path)]
    assert [block.name for block in blocks if block.language not in (*CODE, *NOT_CODE)] == []
    assert len(blocks) > 40


def test_placeholders_are_replaced_as_whole_words_and_none_is_forgotten() -> None:
    text = "run MODEL --tier 'disk:///var/cache/kvpact?capacity=200GiB' /var/cache/kvpact MODELS"
    values = {"MODEL": "m", "disk:///var/cache/kvpact?capacity=200GiB": "disk:///d", "/var/cache/kvpact": "/e"}
    assert filled_in(text, values) == "run m --tier 'disk:///d' /e MODELS"
    with pytest.raises(KeyError, match="MODEL"):
        filled_in(text, {})


# How blocks are run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader works: commands of the environment come first on the path, and no setting is there."""
    (tmp_path / "bin").mkdir()
    for name, arguments in (("kvpact", "-c 'from kvpact.cli.app import main; main()'"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        command.chmod(0o755)
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command there, to its end."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPACT_")}
    source = str(Path(kvpact.__file__).parents[1])
    paths = {"PATH": f"{folder / 'bin'}:{kept['PATH']}", "PYTHONPATH": f"{folder}:{source}", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        command, cwd=folder, env={**kept, **paths, **environment}, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def run_python(folder: Path, program: str) -> str:
    """What a program says."""
    (folder / "program.py").write_text(program)
    return run(folder, sys.executable, "program.py").stdout


def run_shell(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a block's commands, each of which must succeed."""
    return run(folder, "sh", "-eu", "-c", text, **environment)


def write_files(folder: Path, path: str) -> None:
    """The files that a guide has its readers write."""
    for block in document_blocks(path):
        if block.file:
            (folder / block.file).write_text(block.text)


# The blocks


@runs("docs/configuration.md", "export KVPACT_TIERS")
def test_h85_the_page_on_configuration_sets_what_it_says(folder: Path) -> None:
    said = run_shell(folder, filled_in(block_with("docs/configuration.md", "export KVPACT_TIERS").text, {
        "redis://user:password@cache:6379/0": "redis://user:hunter2@127.0.0.1:1/0", "8GiB": "8GiB",
    }))  # fmt: skip
    assert '"kv_connector_extra_config": {"memory": "8GiB"}' in said.stdout
    assert "hunter2" not in said.stdout + said.stderr
    assert "start vLLM with KVPACT_TIERS" in said.stderr


def test_the_page_on_configuration_sets_what_it_says(folder: Path) -> None:
    [config] = re.findall(r"\$\((kvpact config .*?)\)\"", block_with("docs/configuration.md", "vllm serve MODEL").text)
    assert '"tiers": ["disk:///var/cache/kvpact?capacity=200GiB"]' in run_shell(folder, config).stdout


@runs("docs/offloading.md", "kvpact config --through")
def test_the_page_on_offloading_shows_what_is_printed(folder: Path) -> None:
    said = run_shell(folder, block_with("docs/offloading.md", "kvpact config --through").text).stdout
    shown, _ = (block.text for block in document_blocks("docs/offloading.md") if block.language == "json")
    assert json.loads(said) == json.loads(shown)


def test_the_page_on_offloading_has_every_setting_of_a_tier_with_its_default() -> None:
    page = (ROOT / "docs/offloading.md").read_text()
    table = page[page.index("## Settings of a PactTier") :]
    shown = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)?", table, re.MULTILINE))
    assert {*shown} == {*COUNTED, "url", "number", *Beside._fields[:2], "enable_kv_events"}
    given = {name: json.loads(value) for name, value in shown.items() if value and name in COUNTED}
    plain, told = load_config({}, {}), load_config(given, {})
    assert {name: getattr(told, name) for name in given} == {name: getattr(plain, name) for name in given}
    assert len(given) == 6


def test_the_page_on_offloading_names_every_metric_of_a_tier() -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    from kvpact.vllm.offload.counts import metric_definitions

    page = (ROOT / "docs/offloading.md").read_text()
    assert {*re.findall(r"`(vllm:kvpact_\w+)`", page)} == {*metric_definitions()}


@runs("docs/engine.md", "reference_engine")
def test_the_page_on_the_engine_runs(folder: Path) -> None:
    run_python(folder, block_with("docs/engine.md", "reference_engine").text)


@runs("docs/shared-tiers.md", "kvpact gc URL")
def test_looking_after_a_store_as_the_page_says(folder: Path) -> None:
    """On a Redis server with blocks of two models, of which one is removed."""
    models = [Namespace({"model": name, "block_size": "16"}) for name in ("llama", "qwen")]
    with redis_server(folder / "redis") as server:
        url = f"redis://{server.address}/0?timeout=20s"
        for model in models:
            tier = open_tier(parse_tier_url(url), TierContext(model, 8192))
            keys = document("operators", 6).keys
            assert all(tier.put(chained(keys, filled_buffers(keys, 8192, 2))))
            tier.close()
        values = {"URL": url, "NAME": models[0].name}
        text = filled_in(block_with("docs/shared-tiers.md", "kvpact gc URL").text, values)
        said = run_shell(folder, text, KVPACT_TIERS=url).stdout
        assert said.count("works") == 1
        assert "removed 7 records" in said  # six blocks, and what says whose they are
        left = run_shell(folder, f"kvpact inspect '{url}'").stdout
        assert (models[0].name in left, models[1].name in left) == (False, True)


@runs(TIERS, "run_suite")
def test_the_guide_for_tiers_runs_its_suite_without_pytest(folder: Path) -> None:
    write_files(folder, TIERS)
    said = run_python(folder, "from test_file_tier import TestFileTier\n" + block_with(TIERS, "run_suite").text)
    assert re.search("^kept", said, re.MULTILINE)
    assert not re.search("^broken", said, re.MULTILINE)


@runs(TIERS, "FaultyTier(")
def test_the_guide_for_tiers_makes_any_tier_ill(folder: Path) -> None:
    write_files(folder, TIERS)
    before = """
from pathlib import Path
from kvpact.identity.keys import Namespace
from file_tier import FileTier
tier = FileTier(Path("."), Namespace({"model": "a"}), 4096)
"""
    after = """
import threading
from kvpact.tiers.base import chained
from kvpact_testkit.sample_blocks import document, filled_buffers
keys = document("a", 1).keys
writes = threading.Thread(target=tier.put, args=[chained(keys, filled_buffers(keys, 4096, 1))])
writes.start()
writes.join(0.3)
print("hangs:", writes.is_alive())
faults.release()
writes.join(20)
print("hangs:", writes.is_alive(), "injected:", len(faults.history))
"""
    said = run_python(folder, before + block_with(TIERS, "FaultyTier(").text + after)
    assert said == "hangs: True\nhangs: False injected: 1\n"


@runs(TIERS, "SharedTier(MyStore")
@runs(TIERS, 'entry-points."kvpact.tiers"')
def test_the_guide_for_tiers_lets_others_use_one(folder: Path) -> None:
    """A package with the guide's function and its entry point, installed as a folder on the path."""
    (folder / "my_package.py").write_text(
        "from kvpact_testkit.tier.dictionary_store import DictionaryStore\n\n"
        "def MyStore(host):\n    assert host == 'host'\n    return DictionaryStore()\n\n"
        + block_with(TIERS, "SharedTier(MyStore").text
    )
    entries = block_with(TIERS, 'entry-points."kvpact.tiers"').text
    installed = folder / "my_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        entries.replace('[project.entry-points."kvpact.tiers"]', "[kvpact.tiers]").replace('"', "")
    )
    [url] = re.findall(r'`"tiers": \["(mystore:.*?)"\]`', (ROOT / TIERS).read_text())
    program = f"""
from kvpact.identity.keys import Namespace
from kvpact.config import load_config
from kvpact_testkit.sample_blocks import document, filled_buffers
from kvpact.tiers.base import chained
from kvpact.tiers.registry import TierContext, open_tier
[url] = load_config({{"tiers": ["{url}"]}}, {{}}).tiers
tier = open_tier(url, TierContext(Namespace({{"model": "a"}}), 4096))
keys = document("a", 3).keys
print(sum(tier.put(chained(keys, filled_buffers(keys, 4096, 1)))), sum(tier.lookup(keys)))
"""
    assert run_python(folder, program) == "3 3\n"


# The blocks that need vLLM, but no engine's start


@pytest.fixture
def driver_folder(folder: Path) -> Path:
    """With the package that the page on the driver speaks of: a connector that holds pins and has a store."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "connector.py").write_text(
        "from types import SimpleNamespace\n\n"
        "from kvpact_testkit.vllm.simple_connector import SimpleConnector\n\n\n"
        "class MyConnector(SimpleConnector):\n"
        "    def __init__(self, vllm_config, role, kv_cache_config):\n"
        "        super().__init__(vllm_config, role, kv_cache_config)\n"
        "        self.pins, self.store = set(), SimpleNamespace(fail=False)\n"
    )
    return folder


DRIVER, CONTEXT = "docs/vllm-driver.md", "docs/scheduler-context.md"


@runs(DRIVER, "print(as_text(driver.run()))")
@runs(DRIVER, "class MyAdapter")
@runs(DRIVER, "def cancelled_after_two_steps")
@runs(CONTEXT, "def bind_kv_cache_manager")
def test_the_pages_on_the_driver_and_on_the_scheduler_context_run(driver_folder: Path) -> None:
    """One after the other, as a reader would. Of the scenarios three are run; test_vllm_driver.py runs them all. The
    class of the second page is on vLLM's real scheduler, above a connector that does nothing else."""
    write_context_connector(driver_folder)
    first = block_with(DRIVER, "print(as_text(driver.run()))").text.replace(
        "driver.run()",
        'driver.run(["h07_cancelled_while_its_load_runs", "h24_tenants_share_nothing", "preempted_after_a_load"])',
    )
    adapter = block_with(DRIVER, "class MyAdapter").text.replace("VllmDriver(", "driver = VllmDriver(")
    asks = 'print("adapted:", driver.run(["h24_tenants_share_nothing"]).checks[0].verdict.value)\n'
    adapted = "from kvpact_testkit.vllm.driver import VllmDriver\n" + adapter + asks
    said = run_python(
        driver_folder,
        first
        + block_with(DRIVER, "def cancelled_after_two_steps").text
        + "print(check.verdict.value)\n"
        + adapted
        + SHOWS_A_CONTEXT,
    )
    assert "h24_tenants_share_nothing" in said
    assert "broken  " not in said
    assert "\nkept\n" in said, said
    assert "\nadapted: kept\n" in said, said
    assert "4 ()\n" in said


def write_context_connector(folder: Path) -> None:
    (folder / "context_connector.py").write_text(
        "from vllm.distributed.kv_transfer.kv_connector.v1 import base\n\n\n"
        "class KVConnectorBase_V1(base.KVConnectorBase_V1):\n"
        "    def get_num_new_matched_tokens(self, request, num_computed_tokens):\n        return 0, False\n"
        "    def start_load_kv(self, forward_context, **arguments): ...\n"
        "    def update_state_after_alloc(self, *arguments): ...\n"
        "    def wait_for_layer_load(self, layer_name): ...\n"
        "    def save_kv_layer(self, *arguments, **more): ...\n"
        "    def wait_for_save(self): ...\n\n\n"
        + block_with(CONTEXT, "def bind_kv_cache_manager").text
        + "\n\nclass Whole(MyConnector):\n"
        "    def build_connector_meta(self, scheduler_output):\n"
        "        super().build_connector_meta(scheduler_output)\n"
        "        return base.KVConnectorMetadata()\n"
    )


SHOWS_A_CONTEXT = """
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from kvpact_testkit.vllm.compat import EngineSettings
transfer = {"kv_connector": "Whole", "kv_connector_module_path": "context_connector"}
engine = VllmEngine(EngineSettings(num_blocks=12, block_size=BLOCK), transfer, lambda line: None)
engine.add("one", prompt(1, 3), max_tokens=8)
engine.step()
context = engine.scheduler.connector.context
print(len(context.get_block_ids("one")[0]), context.waiting_requests())
engine.finish()
engine.close()
"""
