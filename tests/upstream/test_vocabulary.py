"""The product and the patches for vLLM have one vocabulary: a connector written for one runs on the other.

The definitions are read from the patches' text; vLLM is not needed. What differs stands in `upstream/*/README.md`.
"""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature

import pytest

from documents import ROOT
from kvpact import contract
from kvpact.contract import ExternalKVMatch, ExternalMatchExit, KVCacheBlockView, SchedulerContext
from kvpact.matches.forms import ConfirmsExternalMatch, PostponesExternalMatch, SupportsExternalMatch


def added_by(proposal: str) -> str:
    """The lines that a patch adds to vLLM's interface of connectors."""
    (patch,) = (ROOT / "upstream").glob(f"{proposal}-*/change.patch")
    parts = patch.read_text(encoding="utf-8").split("diff --git ")
    parts = [part for part in parts if part.startswith("a/vllm/distributed/kv_transfer/kv_connector/v1/")]
    return "\n".join(line[1:] for part in parts for line in part.splitlines() if re.match(r"\+(?!\+\+)", line))


PLAN, CONTEXT = added_by("1"), added_by("3")


def class_of(text: str, name: str) -> str:
    """The body of a class."""
    return text[text.index(f"class {name}") :].partition("\nclass ")[0]


def parameters(text: str, method: str) -> list[str]:
    """The names of a method's parameters, without `self`."""
    found = re.search(rf"def {method}\(\s*(.*?),?\s*\)(?: ->|:)", text, re.DOTALL)
    assert found is not None, method
    names = [part.partition(":")[0].partition("=")[0].strip() for part in re.split(r",(?![^\[]*\])", found[1])]
    return [name for name in names if name not in ("self", "*")]


def test_the_reasons_are_the_same_in_the_same_order() -> None:
    theirs = re.findall(r'^    (\w+) = "(\w+)"', class_of(PLAN, "ExternalMatchExit"), re.MULTILINE)
    assert theirs == [(one.name, one.value) for one in ExternalMatchExit]
    assert f"POSTPONED_STEPS = {contract.POSTPONED_STEPS}" in PLAN


@pytest.mark.parametrize(
    ("text", "ours", "theirs_alone"), [(PLAN, ExternalKVMatch, set()), (CONTEXT, KVCacheBlockView, {"free_seq"})]
)
def test_a_match_and_a_view_of_a_block_have_the_same_fields(text: str, ours: type, theirs_alone: set[str]) -> None:
    """`free_seq` is the patch's own: with it a view is a cursor."""
    theirs = re.findall(r"^    (\w+): ", class_of(text, ours.__name__), re.MULTILINE)
    assert [name for name in theirs if name not in theirs_alone] == [one.name for one in fields(ours)]


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        (PLAN, SupportsExternalMatch),
        (PLAN, PostponesExternalMatch),
        (PLAN, ConfirmsExternalMatch),
        (class_of(CONTEXT, "KVConnectorSchedulerContext"), SchedulerContext),
    ],
)
def test_calls_have_the_same_parameters(text: str, protocol: type) -> None:
    names = [name for name in dir(protocol) if not name.startswith("_")]
    assert names
    for name in names:
        ours = [each for each in signature(getattr(protocol, name)).parameters if each != "self"]
        assert parameters(text, name) == ours, name
