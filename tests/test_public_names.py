"""What a user may import: the names of `kvpact` itself, and those that one types with their module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

import kvpact
from documents import ROOT, document_blocks, documents

TABLES = (ROOT / "docs" / "public-names.md").read_text(encoding="utf-8")
NAMES: list[str] = re.findall(r"^\| `(\w+)` \| (?:stable|not yet) \| \S", TABLES, re.MULTILINE)
WITH_MODULE: list[str] = re.findall(
    r"^\| `((?:kvpact|kvpact_testkit)\.[\w.]+)` \| (?:stable|not yet) \| \S", TABLES, re.MULTILINE
)


def typed_names() -> Iterator[str]:
    """Names of kvpact that a tutorial or an example has its readers type, each with its module."""
    blocks = [block for page in documents() for block in document_blocks(page)]
    programs = [block.text for block in blocks if block.language == "python"]
    programs += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    for program in programs:
        for node in ast.walk(ast.parse(program)):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in (
                    "kvpact",
                    "kvpact_testkit",
                ):
                    yield from (f"{module}.{alias.name}" for alias in names)
    for block in blocks:
        yield from re.findall(r"-cls (kvpact\.[\w.]+)", block.text) if block.language == "sh" else ()


def test_the_first_table_has_the_packages_names_and_each_can_be_imported() -> None:
    assert sorted(NAMES) == sorted(kvpact.__all__)
    assert all(getattr(kvpact, name) is not None for name in NAMES)
    assert {*kvpact.__all__} <= {*dir(kvpact)}
    with pytest.raises(AttributeError, match="module 'kvpact' has no attribute 'telemetry'"):
        kvpact.telemetry  # noqa: B018


def test_every_name_with_its_module_can_be_imported() -> None:
    there = [name for name in WITH_MODULE if ".vllm." not in name or find_spec("vllm") is not None]
    assert len(WITH_MODULE) > 20
    for module, _, name in (each.rpartition(".") for each in there):
        assert getattr(import_module(module), name) is not None


def test_every_name_that_a_tutorial_or_an_example_types_stands_in_a_table() -> None:
    """18 did not: an author who built on them was promised nothing."""
    typed = {*typed_names()}
    assert len(typed) > 50
    assert typed - {*WITH_MODULE, *(f"kvpact.{name}" for name in kvpact.__all__)} == set()
