"""Fixtures that all tests share, and which of them one worker runs where there are several."""

from __future__ import annotations

import pytest
from hypothesis import settings

# An example's time says more about a busy machine than about the code; pytest-timeout ends what hangs.
settings.register_profile("kvpact", deadline=None)
settings.load_profile("kvpact")

pytest_plugins = ["engines"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Real engines run in one worker, one after another: they share fixtures, and they are all bound to one core.

    Meanwhile other workers run the other tests, each file in one of them. Engines take longest and begin first.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        group = "engines" if _needs_engine(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _needs_engine(item))


def _needs_engine(item: pytest.Item) -> bool:
    return item.get_closest_marker("engine") is not None or "tiny_model" in getattr(item, "fixturenames", ())
