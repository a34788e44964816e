"""The product and the patches for vLLM have one vocabulary: a connector written for one runs on the other.

The definitions are read from the patches' text; vLLM is not needed. What differs stands in `upstream/*/README.md`.
"""

from __future__ import annotations

import ast
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, signature
from itertools import groupby
from textwrap import dedent
from typing import Any

import pytest

from documents import ROOT
from kvpact import contract
from kvpact.contract import ExternalKVMatch, ExternalMatchExit, KVCacheBlockView, SchedulerContext
from kvpact.matches.forms import ConfirmsExternalMatch, PostponesExternalMatch, SupportsExternalMatch
from kvpact.vllm.context import VllmContext

NEEDED = {
    "ABC": ABC,
    "Any": Any,
    "Iterator": Iterator,
    "Sequence": Sequence,
    "abstractmethod": abstractmethod,
    "dataclass": dataclass,
    "enum": enum,
}
"""What the patches' definitions import."""


def defined_in(proposal: str) -> dict[str, Any]:
    """The functions, classes and numbers that a patch adds to vLLM's package, each by its name."""
    found: dict[str, Any] = dict(NEEDED)
    (patch,) = (ROOT / "upstream").glob(f"{proposal}-*/change.patch")
    for part in patch.read_text(encoding="utf-8").split("diff --git ")[1:]:
        if not part.startswith("a/vllm/distributed/kv_transfer/kv_connector/v1/"):
            continue
        if part.startswith("a/vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py"):
            continue
        for added, lines in groupby(part.splitlines(), lambda line: line.startswith("+") and line[:3] != "+++"):
            if added:
                _define(dedent("\n".join(line[1:] for line in lines)), found)
    return found


def _define(text: str, found: dict[str, Any]) -> None:
    """Carry out the definitions of a piece of a file, unless it is a piece of something larger."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return
    wanted = [part for part in body if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.Assign)]
    annotations = ast.parse("from __future__ import annotations").body
    module = ast.Module([*annotations, *(part for part in wanted if not _is_of_the_engine(part))], [])
    exec(compile(module, "change.patch", "exec"), found)


def _is_of_the_engine(part: ast.stmt) -> bool:
    return isinstance(part, ast.ClassDef) and part.name.startswith("Open")


PLAN, CONTEXT = defined_in("1"), defined_in("3")


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names, and how they are passed."""
    return [(one.name, one.kind) for one in signature(function).parameters.values() if one.name != "self"]


def fields_of(cls: Any) -> list[tuple[str, object]]:
    """Names and defaults."""
    return [(one.name, None if one.default is MISSING else one.default) for one in fields(cls)]


def methods_of(cls: type) -> dict[str, Any]:
    """The public methods and properties, also inherited ones."""
    names = [name for name in dir(cls) if not name.startswith("_")]
    return {name: getattr(cls, name) for name in names if callable(getattr(cls, name)) or is_property(cls, name)}


def is_property(cls: type, name: str) -> bool:
    """Whether it is asked without a call."""
    return isinstance(getattr(cls, name), property)


def test_the_reasons_are_the_same_in_the_same_order() -> None:
    theirs = PLAN["ExternalMatchExit"]
    assert [(one.name, one.value, one.is_dropped) for one in theirs] == [
        (one.name, one.value, one.is_dropped) for one in ExternalMatchExit
    ]
    assert all(one == one.value for one in theirs), "a connector may compare with the word"
    assert PLAN["POSTPONED_STEPS"] == contract.POSTPONED_STEPS


def test_a_match_has_the_same_fields() -> None:
    assert fields_of(PLAN["ExternalKVMatch"]) == fields_of(ExternalKVMatch)


@pytest.mark.parametrize("protocol", [SupportsExternalMatch, PostponesExternalMatch, ConfirmsExternalMatch])
def test_a_match_lives_by_the_same_calls(protocol: type) -> None:
    ours = methods_of(protocol)
    assert ours
    for name, method in ours.items():
        assert parameters(PLAN[name]) == parameters(method), name


def test_the_patch_calls_nothing_else() -> None:
    """Every call of the patch's is one of the three protocols'."""
    ours = methods_of(SupportsExternalMatch) | methods_of(PostponesExternalMatch) | methods_of(ConfirmsExternalMatch)
    assert {name for name in PLAN if name.endswith("_external_match")} == ours.keys()


def test_a_view_of_a_block_has_the_same_fields() -> None:
    """`free_seq` is the patch's own: with it a view is a cursor."""
    theirs = fields_of(CONTEXT["KVCacheBlockView"])
    assert theirs.pop() == ("free_seq", None)
    assert theirs == fields_of(KVCacheBlockView)
    kinds = CONTEXT["KVCacheBlockView"].__annotations__, KVCacheBlockView.__annotations__
    assert {name: kinds[0][name] for name in kinds[1]} == kinds[1]


def test_the_scheduler_context_has_the_same_calls() -> None:
    """`for_sub_connector` is MultiConnector's; kvpact's class has the number of touched blocks too."""
    theirs = methods_of(CONTEXT["KVConnectorSchedulerContext"])
    assert theirs.pop("for_sub_connector")
    assert isinstance(theirs.pop("touched_blocks"), property)
    assert is_property(VllmContext, "touched_blocks")
    assert {name: parameters(method) for name, method in theirs.items()} == {
        name: parameters(method) for name, method in methods_of(SchedulerContext).items()
    }
    assert ("evict_first", Parameter.KEYWORD_ONLY) in parameters(theirs["free_blocks"])
