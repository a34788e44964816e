"""The code blocks of README.md and docs: each is run by a test, written to a file by one, or named in `NOT_RUN`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from documents import ROOT, Reader, block_with, document_blocks, documents, filled_in
from kvpact.config import load_config
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import chained
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact.vllm.offload.settings import COUNTED, Beside
from kvpact_testkit.sample_blocks import document, filled_buffers
from servers.redis_server import redis_server

TIERS = "docs/write-a-tier.md"
CONTEXT = "docs/scheduler-context.md"
PEERS = "docs/peers.md"
DRIVER = "docs/internals/vllm-driver.md"

NOT_RUN = {
    "README.md": ("make demo", "kvpact why ID", "pip install dist/"),  # this suite's, a server's, test_install.py's
    "docs/compare.md": ("kvpact compare --quick",),  # ten minutes: test_engine_compare.py compares fewer prompts
    "docs/configuration.md": ("vllm serve MODEL --max-model-len",),  # the README's command with one more option
    "docs/first-hour.md": ("make -C kvpact setup",),  # what CI does before this suite
    "docs/gpu.md": ("scripts/pack_vllm.py", "nvidia-smi; nproc", "--only graphs", "--only answers"),
    DRIVER: ("run_on_release",),  # fetches a release of vLLM, 2 GB
    "docs/hints.md": ("curl localhost", "additional_kwargs"),  # a server's, and three clients'
    "docs/offloading.md": ("kvpact serve MODEL --through",),  # vLLM's offloading starts on a GPU only
    "docs/weights.md": ("curl --fail",),  # a server in vLLM's development mode
    "docs/internals/worker-hook.md": ("vllm serve MODEL --worker-cls",),  # any connector
    "docs/write-a-vllm-connector.md": ("vllm serve MODEL --scheduler-cls",),  # any connector
    "docs/write-a-connector.md": ("pip install",),  # asks a package index
    TIERS: ("pip install",),
    PEERS: (
        # test_peers.py runs all of vLLM's, one after the other
        "FileSystemTierManager(N(config",
        "tier.submit_store(job(1, 0))",
        "target=tier.shutdown",
        "tier.file_mapper.get_run_config()",
        "OffloadingConnectorWorker(N(",
        "kvpact conformance --peers",  # judges all peers, for minutes
    ),
}
"""Blocks that need what no test has: a GPU, a package index, a peer, a server of the reader's."""


def looked_up() -> Iterator[str]:
    """Pieces of blocks that tests look up, as `block_with(page, piece)`."""
    for folder in ("tests", "kit/tests"):
        for path in (ROOT / folder).rglob("test_*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(func=ast.Name("block_with"), args=[_, ast.Constant(str(piece))]):
                        yield piece


def test_every_block_is_run_or_named() -> None:
    pieces = {*looked_up(), "kvpact serve MODEL", "vllm serve MODEL"}  # the README's two, of test_http_life.py
    for where, reasons in NOT_RUN.items():
        assert all(block_with(where, piece) for piece in reasons)
        pieces.update(reasons)
    blocks = [block for path in documents() for block in document_blocks(path) if block.is_code and not block.file]
    assert [block.name for block in blocks if not any(piece in block.text for piece in pieces)] == []
    assert len(blocks) > 40


def test_placeholders_are_replaced_as_whole_words_and_none_is_forgotten() -> None:
    text = "run MODEL --tier 'disk:///var/cache/kvpact?capacity=200GiB' /var/cache/kvpact MODELS"
    values = {"MODEL": "m", "disk:///var/cache/kvpact?capacity=200GiB": "disk:///d", "/var/cache/kvpact": "/e"}
    assert filled_in(text, values) == "run m --tier 'disk:///d' /e MODELS"
    with pytest.raises(KeyError, match="MODEL"):
        filled_in(text, {})


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def test_h85_the_page_on_configuration_sets_what_it_says(reader: Reader) -> None:
    values = {"redis://user:password@cache:6379/0": "redis://user:hunter2@127.0.0.1:1/0", "8GiB": "8GiB"}
    said = reader.shell(filled_in(block_with("docs/configuration.md", "export KVPACT_TIERS").text, values))
    assert '"kv_connector_extra_config": {"memory": "8GiB"}' in said.stdout
    assert "hunter2" not in said.stdout + said.stderr
    assert "start vLLM with KVPACT_TIERS" in said.stderr
    [config] = re.findall(r"\$\((kvpact config .*?)\)\"", block_with("docs/configuration.md", "vllm serve MODEL").text)
    assert '"tiers": ["disk:///var/cache/kvpact?capacity=200GiB"]' in reader.shell(config).stdout


def test_the_page_on_offloading_shows_what_is_printed(reader: Reader) -> None:
    said = reader.shell(block_with("docs/offloading.md", "kvpact config --through").text).stdout
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
    assert len(given) == 7


def test_the_page_on_offloading_names_every_metric_of_a_tier() -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    from kvpact.vllm.offload.counts import metric_definitions

    page = (ROOT / "docs/offloading.md").read_text()
    assert {*re.findall(r"`(vllm:kvpact_\w+)`", page)} == {*metric_definitions()}


def test_the_page_on_the_engine_runs(reader: Reader) -> None:
    reader.python(block_with("docs/internals/engine.md", "reference_engine").text)


def test_looking_after_a_store_as_the_page_says(reader: Reader) -> None:
    """On a Redis server with blocks of two models, of which one is removed."""
    models = [Namespace({"model": name, "block_size": "16"}) for name in ("llama", "qwen")]
    with redis_server(reader.folder / "redis") as server:
        url = f"redis://{server.address}/0?timeout=20s"
        for model in models:
            tier = open_tier(parse_tier_url(url), TierContext(model, 8192))
            keys = document("operators", 6).keys
            assert all(tier.put(chained(keys, filled_buffers(keys, 8192, 2))))
            tier.close()
        text = filled_in(block_with("docs/shared-tiers.md", "kvpact gc URL").text, {"URL": url, "NAME": models[0].name})
        said = reader.shell(text, KVPACT_TIERS=url).stdout
        assert said.count("works") == 1
        assert "removed 7 records" in said  # six blocks, and what says whose they are
        left = reader.shell(f"kvpact inspect '{url}'").stdout
        assert (models[0].name in left, models[1].name in left) == (False, True)


def test_the_guide_for_tiers_runs_its_suite_without_pytest(reader: Reader) -> None:
    reader.write_files(TIERS)
    said = reader.python("from test_file_tier import TestFileTier\n" + block_with(TIERS, "run_suite").text)
    assert re.search("^kept", said, re.MULTILINE)
    assert not re.search("^broken", said, re.MULTILINE)


def test_the_guide_for_tiers_makes_any_tier_ill(reader: Reader) -> None:
    reader.write_files(TIERS)
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
    said = reader.python(before + block_with(TIERS, "FaultyTier(").text + after)
    assert said == "hangs: True\nhangs: False injected: 1\n"


def test_the_guide_for_tiers_lets_others_use_one(reader: Reader) -> None:
    """A package with the guide's function and its entry point, installed as a folder on the path."""
    (reader.folder / "my_package.py").write_text(
        "from kvpact_testkit.tier.dictionary_store import DictionaryStore\n\n"
        "def MyStore(host):\n    assert host == 'host'\n    return DictionaryStore()\n\n"
        + block_with(TIERS, "SharedTier(MyStore").text
    )
    entries = block_with(TIERS, 'entry-points."kvpact.tiers"').text
    installed = reader.folder / "my_package-1.0.dist-info"
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
    assert reader.python(program) == "3 3\n"


MY_CONNECTOR = """
from types import SimpleNamespace

from kvpact_testkit.vllm.simple_connector import SimpleConnector


class MyConnector(SimpleConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.pins, self.store = set(), SimpleNamespace(fail=False)
"""
"""The connector of the page on the driver: it holds pins and has a store."""

CONTEXT_CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.v1 import base


class KVConnectorBase_V1(base.KVConnectorBase_V1):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False
    def start_load_kv(self, forward_context, **arguments): ...
    def update_state_after_alloc(self, *arguments): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, *arguments, **more): ...
    def wait_for_save(self): ...


CLASS


class Whole(MyConnector):
    def build_connector_meta(self, scheduler_output):
        super().build_connector_meta(scheduler_output)
        return base.KVConnectorMetadata()
"""
"""The class of the page on the scheduler context, and what vLLM asks of a connector besides."""

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


@pytest.mark.proof
def test_the_pages_on_the_driver_and_on_the_scheduler_context_run(reader: Reader) -> None:
    """One after the other, as a reader would; three of the scenarios; the second page's class on a real scheduler."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    (reader.folder / "my_package").mkdir()
    (reader.folder / "my_package" / "connector.py").write_text(MY_CONNECTOR)
    context = block_with(CONTEXT, "def bind_kv_cache_manager").text
    (reader.folder / "context_connector.py").write_text(CONTEXT_CONNECTOR.replace("CLASS", context))
    scenarios = '["h07_cancelled_while_its_load_runs", "h24_tenants_share_nothing", "preempted_after_a_load"]'
    adapter = block_with(DRIVER, "class MyAdapter").text.replace("VllmDriver(", "driver = VllmDriver(")
    asks = 'print("adapted:", driver.run(["h24_tenants_share_nothing"]).checks[0].verdict.value)\n'
    said = reader.python(
        block_with(DRIVER, "print(as_text(driver.run()))").text.replace("driver.run()", f"driver.run({scenarios})")
        + block_with(DRIVER, "def cancelled_after_two_steps").text
        + "print(check.verdict.value)\nfrom kvpact_testkit.vllm.driver import VllmDriver\n"
        + adapter
        + asks
        + SHOWS_A_CONTEXT
    )
    assert "h24_tenants_share_nothing" in said
    assert "broken  " not in said
    for line in ("kept", "adapted: kept", "4 ()"):
        assert f"\n{line}\n" in said, said
