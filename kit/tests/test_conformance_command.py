"""`kvpact conformance`: what it runs, what it prints, and its exit code."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpact.cli.app import app

NAIVE = '''
from kvpact_testkit.engine import ReferenceCache

class Naive(ReferenceCache):
    """Keeps the rest of what was not committed."""

    def __init__(self, place, slots=None):
        super().__init__(place.block_size, slots or place.num_slots, num_ranks=place.num_ranks)

    def commit_external_match(self, request, match, num_tokens, block_ids):
        plan = self.plans.get(request.request_id)
        if plan is not None:
            plan.pieces = [piece for piece in plan.pieces if piece.block * self._block_size < num_tokens]
        return super().commit_external_match(request, match, num_tokens, block_ids)
'''

SUITE = """
from kvpact_testkit.cache.conformance import CacheConformance
from kvpact_testkit.cache.subjects import reference_cache

class MySuite(CacheConformance):
    modes = ("native",)
    plays = 1

    def make_cache(self, place):
        return reference_cache(place)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def kvpact(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["conformance", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def in_words(shown: str) -> str:
    """What was shown, with one space where columns have several."""
    return re.sub(" +", " ", shown)


def test_a_suite_is_run_as_its_author_wrote_it(here: Path) -> None:
    (here / "my_suite.py").write_text(SUITE)
    shown = in_words(kvpact("my_suite:MySuite"))
    assert "my_suite:MySuite on the embedded engine as native" in shown
    assert "P1 kept every plan ends once; at rest nothing is held" in shown
    assert "H01 avoided" in shown
    assert "H52 not observable" in shown
    assert "the cache has no tier whose queue it made" in shown
    assert ", 0 broken, " in shown


@pytest.mark.proof
def test_what_is_broken_is_shown_with_the_shortest_script_and_exit_code_1(here: Path) -> None:
    (here / "naive.py").write_text(NAIVE)
    shown = in_words(kvpact("naive:Naive", exit_code=1))
    assert "P4 broken a commit may shrink, to nothing if need be" in shown
    assert "H04 happens" in shown
    assert "the rest of its room is held for nobody" in shown
    assert "16 of them are committed" in shown

    document = json.loads(kvpact("naive:Naive", "--json", exit_code=1))
    assert document["properties"]["P4"]["verdict"] == "broken"
    assert document["properties"]["P6"]["verdict"] == "kept"
    assert document["properties"]["P4"]["script"]
    assert len(document["checks"]) > 40


def test_only_the_named_checks_are_run(here: Path) -> None:
    (here / "my_suite.py").write_text(SUITE)
    document = json.loads(kvpact("my_suite:MySuite", "--json", "--only", "cancelled"))
    names = [check["name"] for check in document["checks"]]
    assert 0 < len(names) < 10
    assert all("cancelled" in name for name in names)
    assert "matches the name of no check" in kvpact("my_suite:MySuite", "--only", "^h99", exit_code=2)


def test_only_the_named_scenarios_and_checks_of_peers_are_run() -> None:
    pytest.importorskip("vllm")
    connector = ["kvpact.vllm:PactConnector", "--settings", '{"memory": "64MiB"}']
    document = json.loads(kvpact(*connector, "--json", "--only", "^h24_tenants_share_nothing$"))
    assert [check["name"] for check in document["checks"]] == ["h24_tenants_share_nothing"]
    [peer] = json.loads(kvpact("--peers", "kvpact-disk", "--json", "--only", "hole"))
    assert 0 < len(peer["report"]["checks"]) < 5
    assert all("hole" in check["name"] for check in peer["report"]["checks"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["my_suite:MySuite", "--only", "["], "is not a regular expression"),
        (["nothing"], 'write "module:Class", such as'),
        (["no_such_module:Cache"], "No module named 'no_such_module'"),
        (["kvpact.cache.cache:NoSuchCache"], "module kvpact.cache.cache has no NoSuchCache"),
        (["kvpact.cache.cache:PactCache", "--settings", "{"], "--settings are not JSON"),
        (["kvpact.cache.cache:PactCache", "--settings", "[1]"], "must be a JSON object"),
        (["kvpact_testkit.cache.soak:CALLS"], "neither a class nor a function"),
        (["my_suite:MySuite", "--settings", '{"a": 1}'], "takes no --settings"),
        (["kvpact.cache.cache:PactCache", "--engine", "vllm"], "is not a connector of vLLM's"),
    ],
)
def test_a_mistake_is_one_line(here: Path, arguments: list[str], words: str) -> None:
    (here / "my_suite.py").write_text(textwrap.dedent(SUITE))
    if "vllm" in arguments:
        pytest.importorskip("vllm")
    shown = kvpact(*arguments, exit_code=2)
    assert words in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_connector_of_vllm_is_not_run_on_the_embedded_engine() -> None:
    pytest.importorskip("vllm")
    shown = kvpact("kvpact.vllm:PactConnector", "--engine", "embedded", exit_code=2)
    assert "use --engine vllm" in shown


@pytest.mark.engine
@pytest.mark.proof
def test_a_connector_of_vllm_is_run_under_vllm(here: Path) -> None:
    pytest.importorskip("vllm")
    shown = kvpact("kvpact.vllm:PactConnector", "--settings", '{"memory": "64MiB"}')
    assert "kvpact.vllm:PactConnector on vLLM" in shown
    assert ", 0 broken, " in shown
