"""The product and the patches for vLLM have one vocabulary: a connector written for one runs on the other.

The definitions are read from the patches' text; vLLM is not needed. What differs beside is in upstream/README.md.
"""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from itertools import chain

import pytest

from documents import ROOT
from kvpact import contract
from kvpact.contract import ExternalKVMatch, ExternalMatchExit, KVCacheBlockView, SchedulerContext
from kvpact.matches.forms import ConfirmsExternalMatch, PostponesExternalMatch, SupportsExternalMatch


def interfaces() -> list[str]:
    """The lines of each patch in vLLM's interface of connectors, but those taken away; the last patch first."""
    texts = []
    for patch in sorted((ROOT / "upstream" / "series").glob("*.patch"), reverse=True):
        parts = patch.read_text(encoding="utf-8").split("diff --git ")
        parts = [part for part in parts if part.startswith("a/vllm/distributed/kv_transfer/kv_connector/v1/")]
        texts.append("\n".join(line[1:] for part in parts for line in part.splitlines() if re.match(LINE, line)))
    return texts


LINE = r"\+(?!\+\+)| "
"""The beginning of a line of a patch that is there after it."""
TEXT = "\n".join(interfaces())


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
    ours = [(one.name, one.value) for one in ExternalMatchExit]
    found = [re.findall(r'^    ([A-Z_]+) = "(\w+)"', text, re.MULTILINE) for text in interfaces()]
    assert {*chain(*found)} == {*ours}
    for theirs in found:
        assert theirs == sorted(theirs, key=ours.index)
    assert f"POSTPONED_STEPS = {contract.POSTPONED_STEPS}" in TEXT


@pytest.mark.parametrize(
    ("text", "ours", "theirs_alone"), [(TEXT, ExternalKVMatch, set()), (TEXT, KVCacheBlockView, {"free_seq"})]
)
def test_a_match_and_a_view_of_a_block_have_the_same_fields(text: str, ours: type, theirs_alone: set[str]) -> None:
    """`free_seq` is the patch's own: with it a view is a cursor."""
    theirs = re.findall(r"^    (\w+): ", class_of(text, ours.__name__), re.MULTILINE)
    assert [name for name in theirs if name not in theirs_alone] == [one.name for one in fields(ours)]


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        (TEXT, SupportsExternalMatch),
        (TEXT, PostponesExternalMatch),
        (TEXT, ConfirmsExternalMatch),
        (class_of(TEXT, "KVConnectorSchedulerContext"), SchedulerContext),
    ],
)
def test_calls_have_the_same_parameters(text: str, protocol: type) -> None:
    names = [name for name in dir(protocol) if not name.startswith("_")]
    assert names
    for name in names:
        ours = [each for each in signature(getattr(protocol, name)).parameters if each != "self"]
        assert parameters(text, name) == ours, name
