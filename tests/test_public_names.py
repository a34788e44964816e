"""What a user may import: the names of `kvpact` itself, and those that modules had before they moved."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

import kvpact
from documents import ROOT, document_blocks, documents

PAGE = ROOT / "docs" / "public-names.md"
WITH_MODULE: list[str] = re.findall(
    r"^\| `((?:kvpact|kvpact_testkit)\.[\w.]+)` \| (?:stable|not yet) \| \S", PAGE.read_text(), re.MULTILINE
)
"""The names of the second table."""


def imported_names(program: str) -> Iterator[str]:
    """What a program imports of kvpact, each name with its module."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in found if name.split(".")[0] in ("kvpact", "kvpact_testkit"))


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
