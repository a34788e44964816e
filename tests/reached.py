"""Which tests need a real engine or server: it follows from their fixtures, and from what tests and fixtures call.

A test's function, its fixtures and the functions of tests and testbeds that they name are walked. Nobody marks a test.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

ENGINE_FIXTURES = {"tiny_model", "engine_pool", "start_engine"}
"""Of `engines.py`."""

WALKED = tuple(f"{ROOT / folder}/" for folder in ("tests", "testbeds", "kit/tests", "benchmarks"))
"""Folders whose functions are walked; what the product and the kit call is theirs."""

IMPORTED_FROM = ("src", "kit/src", "testbeds", "tests", ".")
"""Folders whose files others import, with the one in which a test stands."""


@cache
def loads_engine(path: Path) -> bool:
    """Whether loading this test file loads vLLM, or torch without asking for it, or skips it where there is no vLLM."""
    seen: set[Path] = set()
    left = [path]
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _loaded_by(file):
            if name.partition(".")[0] in ("torch", "vllm"):
                return True
            left += _files_of(name, path.parent)
    return False


@cache
def _loaded_by(file: Path) -> list[str]:
    """The modules that a file loads, with names in them that may be modules; none that it loads only with torch."""
    named: list[str] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            named += [package, *(f"{package}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            match node.value:
                case ast.Call(ast.Attribute(attr="importorskip"), [ast.Constant("vllm"), *_]):
                    named.append("vllm")
                case ast.Call(ast.Attribute(attr="importorskip"), [ast.Constant("torch"), *_]):
                    break
    return named


@cache
def _files_of(module: str, beside: Path) -> list[Path]:
    """The files of this repository that are loaded for a module, which a test in the folder `beside` loads."""
    parts = module.split(".")
    for folder in (beside, *(ROOT / name for name in IMPORTED_FROM)):
        places = [folder.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
        files = [
            file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()
        ]
        if files:
            return files
    return []


def needs_engine_or_server(item: pytest.Item) -> bool:
    """Whether the test starts, or its file loads, an engine, or it starts a server."""
    fixtures = getattr(item, "fixturenames", ())
    if loads_engine(item.path) or not ENGINE_FIXTURES.isdisjoint(fixtures):
        return True
    owner, module = getattr(item, "cls", None), getattr(item, "module", None)
    asked = [getattr(place, name, None) for name in fixtures for place in (owner, module)]
    return _reach((owner, each) for each in (getattr(item, "function", None), *asked))


def starts_engine_or_server(function: object) -> bool:
    """Whether a fixture's function calls what starts one."""
    return _reach([(None, function)])


def _reach(these: Iterable[tuple[type | None, Any]]) -> bool:
    """Whether any of these functions, each with the class that it is of, calls what starts an engine or a server."""
    seen: set[int] = set()
    left = list(these)
    while left:
        owner, thing = left.pop()
        thing = inspect.unwrap(thing) if callable(thing) else thing
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if _starts(thing):
            return True
        if isinstance(thing, type) and _is_walked(thing):
            left += [(thing, each) for each in vars(thing).values()]
        elif isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(WALKED):
            codes = [*_codes(thing.__code__)]
            names = {name for code in codes for name in code.co_names}
            if any(_is_of_engine(name) for name in names if "." in name or name == "vllm"):
                return True
            if "importorskip" in names and any("vllm" in code.co_consts for code in codes):
                return True
            left += [(None, thing.__globals__[name]) for name in names if name in thing.__globals__]
            left += [(owner, getattr(owner, name)) for name in names if owner is not None and hasattr(owner, name)]
        elif isinstance(thing, classmethod | staticmethod | property):
            left.append((owner, thing.fget if isinstance(thing, property) else thing.__func__))
    return False


def _is_of_engine(module: str) -> bool:
    """Whether a module that a function imports is vLLM's, or loads vLLM."""
    return module.partition(".")[0] == "vllm" or any(map(loads_engine, _files_of(module, ROOT)))


def _starts(thing: Any) -> bool:
    """Whether calling it starts an engine or a server; a server is a context manager, or a class with `start`."""
    if getattr(thing, "__name__", "") in ("SceneHost", "EngineProcess", "ForkedEngine"):
        return True
    if not str(getattr(thing, "__module__", "")).startswith("servers."):
        return False
    return inspect.isgeneratorfunction(thing) or (isinstance(thing, type) and hasattr(thing, "start"))


def _is_walked(thing: type) -> bool:
    module = inspect.getmodule(thing)
    return str(getattr(module, "__file__", "")).startswith(WALKED)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, with those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
