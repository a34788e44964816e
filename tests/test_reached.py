"""What `make check` leaves out follows from what tests ask for: an engine, a server, a file that loads vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import ROOT
from engines import EnginePool
from forked_engine import ForkedEngine
from reached import loads_engine, starts_engine_or_server
from servers.redis_server import RedisServer, free_ports, redis_server


def begins(place: Path) -> None:
    with redis_server(place):
        pass


class Bed:
    def __init__(self, place: Path) -> None:
        begins(place)


def test_what_begins_a_server_or_an_engine_is_found_through_functions_and_classes() -> None:
    @pytest.fixture
    def bed(tmp_path: Path) -> Bed:
        return Bed(tmp_path)

    assert all(map(starts_engine_or_server, (redis_server, begins, Bed, bed, RedisServer, ForkedEngine)))
    assert starts_engine_or_server(EnginePool.get)


def test_what_begins_none_is_left_alone() -> None:
    def annotated(server: RedisServer) -> list[int]:
        return free_ports(server.port)

    assert not any(map(starts_engine_or_server, (annotated, free_ports, loads_engine, len, None)))


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ("import vllm.config", True),
        ("from vllm import LLM", True),
        ('pytest.importorskip("vllm", reason="none")', True),
        ("import torch", True),
        ('torch = pytest.importorskip("torch")\nimport device_beds\nimport torch', False),
        ("from kvpact.vllm.context import VllmContext", True),
        ("from kvpact.vllm import context", True),
        ("def test():\n    import vllm", False),
        ("if TYPE_CHECKING:\n    import vllm", False),
        ("import kvpact.cache.cache", False),
    ],
)
def test_a_file_that_loads_vllm_is_known_before_it_is_loaded(tmp_path: Path, text: str, loads: bool) -> None:
    (tmp_path / "test_it.py").write_text(text)
    assert loads_engine(tmp_path / "test_it.py") == loads


def test_what_runs_without_engines_and_servers_is_most_of_what_there_is() -> None:
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "kit" / "tests").rglob("test_*.py")]
    assert sum(not loads_engine(file) for file in files) > 200
