"""A plugin of pytest for a run that has to end: no test begins after the moment that KVPACT_TESTS_UNTIL says.

Such a test is skipped, and its reason is `NOT_RUN`. The files come in an order that each run draws anew, so that what
one run leaves out another one has.
"""

from __future__ import annotations

import os
import random
import time

import pytest

UNTIL = "KVPACT_TESTS_UNTIL"
"""Seconds since 1970."""

NOT_RUN = "NOT RUN for want of time"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker of a run draws the same order, as the moment is the same."""
    files = sorted({item.path for item in items})
    random.Random(os.environ[UNTIL]).shuffle(files)
    items.sort(key=lambda item: files.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Mark it before pytest looks for such marks, and before its fixtures are set up."""
    if time.time() > float(os.environ[UNTIL]):
        item.add_marker(pytest.mark.skip(reason=NOT_RUN))
