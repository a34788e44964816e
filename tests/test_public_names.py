"""What a user may import: the names of `kvpact` itself, and those that modules had before they moved."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import kvpact
from documents import ROOT, document_blocks, documents
from kvpact._moved import MOVED

PAGE = ROOT / "docs" / "public-names.md"
WITH_MODULE: list[str] = re.findall(
    r"^\| `(kvpact\.[\w.]+)` \| (?:stable|not yet) \| \S", PAGE.read_text(), re.MULTILINE
)
"""The names of the second table."""


def imported_names(program: str) -> Iterator[str]:
    """What a program imports of kvpact, each name with its module."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in found if name.split(".")[0] == "kvpact")


def typed_names() -> Iterator[tuple[str, str]]:
    """(where, name) for each name that a tutorial or an example has its readers type."""
    for page in documents():
        for block in document_blocks(page):
            names = imported_names(block.text) if block.language == "python" else ()
            options = re.findall(r"-cls (kvpact\.[\w.]+)", block.text) if block.language == "sh" else ()
            yield from ((block.name, name) for name in (*names, *options))
    for path in (ROOT / "examples").rglob("*.py"):
        yield from ((path.name, name) for name in imported_names(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", kvpact.__all__)
def test_every_public_name_can_be_imported_and_stands_in_the_table(name: str) -> None:
    assert getattr(kvpact, name) is not None
    assert re.search(rf"^\| `{name}` \| (stable|not yet) \| ", PAGE.read_text(), re.MULTILINE)


def test_the_table_names_nothing_else() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == sorted(kvpact.__all__)


def test_every_name_that_a_tutorial_or_an_example_types_stands_in_a_table() -> None:
    """18 did not: an author who built on them was promised nothing."""
    listed = {*WITH_MODULE, *(f"kvpact.{name}" for name in kvpact.__all__)}
    typed = [*typed_names()]
    assert len({name for _, name in typed}) > 50
    assert [(where, name) for where, name in typed if name not in listed] == []


@pytest.mark.parametrize("name", WITH_MODULE)
def test_every_name_with_its_module_can_be_imported(name: str) -> None:
    if ".vllm." in name:
        pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    module, _, last = name.rpartition(".")
    assert getattr(import_module(module), last) is not None


def test_the_interfaces_of_the_pact_are_promised() -> None:
    promised = re.findall(r"^\| `([\w.]+)` \| stable \|", PAGE.read_text(), re.MULTILINE)
    assert {
        "SupportsExternalMatch",
        "PostponesExternalMatch",
        "ConfirmsExternalMatch",
        "ExternalMatchExit",
        "kvpact.vllm.scheduler_context",
        "kvpact.vllm.scheduler.pact_scheduler",
        "kvpact.vllm.worker.KvpactWorker",
        "kvpact.vllm.step_hook.StepHookConnector",
    } <= {*promised}


def test_there_is_nothing_else_in_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'kvpact' has no attribute 'telemetry'"):
        kvpact.telemetry  # noqa: B018


@pytest.mark.parametrize("old", [name for name in MOVED if ".testkit.vllm" not in name and "transfer" not in name])
def test_a_module_under_its_old_name_is_the_new_one_and_a_warning(old: str) -> None:
    """In a process of its own: a module is imported once."""
    program = f"import {old} as old, {MOVED[old]} as new; assert old is new"
    ran = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"DeprecationWarning: {old} is {MOVED[old]} now" in ran.stderr


@pytest.mark.parametrize("new", sorted(set(MOVED.values())))
def test_what_a_module_is_called_now_exists(new: str) -> None:
    path = Path(kvpact.__file__).parents[1] / (new.replace(".", "/") + ".py")
    assert path.is_file()


@pytest.mark.parametrize(
    ("package", "name", "home"),
    [
        ("kvpact.cache", "PactCache", "kvpact.cache.cache"),
        ("kvpact.identity.keys", "RangeSet", "kvpact.ranges"),
        ("kvpact.tiers.shared", "SharedTier", "kvpact.tiers.shared.tier"),
        ("kvpact.testkit.tier", "TierConformance", "kvpact.testkit.tier.conformance"),
    ],
)
def test_a_name_of_a_module_that_became_a_folder_is_still_there(package: str, name: str, home: str) -> None:
    with pytest.deprecated_call(match=re.escape(f"{package}.{name} is {home}.{name} now")):
        assert getattr(import_module(package), name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        import_module(package).Nothing  # noqa: B018


def test_names_of_a_module_that_moved_and_was_split_are_still_there() -> None:
    program = (
        "from kvpact.blocks import BlockKeys, BlockRange, RangeSet; import kvpact; assert RangeSet is kvpact.RangeSet"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("kvpact.tiers.base", "RecordSeal", "RecordMac"),
        ("kvpact.tiers.registry", "TierPlace", "TierContext"),
        ("kvpact.contract", "Inquiry", "JobQuery"),
        ("kvpact.contract", "StepRead", "StoreRead"),
        ("kvpact.contract", "blocks_touched", "num_blocks_for"),
        ("kvpact.testkit.cache.conformance", "CachePlace", "CacheContext"),
        ("kvpact.testkit.cache.subjects", "CachePlace", "CacheContext"),
        ("kvpact.testkit.tier.conformance", "Place", "StoreContext"),
        ("kvpact.testkit.tier.conformance", "TierScene", "TierHarness"),
        ("kvpact.engine", "JobConduct", "JobBehavior"),
        ("kvpact.engine", "LegacyConnectorCache", "V1ConnectorCache"),
    ],
)
def test_a_name_that_changed_is_still_there(module: str, old: str, new: str) -> None:
    with pytest.deprecated_call(match=f"{re.escape(module)}.{old} is {new} now"):
        assert getattr(import_module(module), old) is getattr(import_module(module), new)
