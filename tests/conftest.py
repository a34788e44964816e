"""Fixtures that all tests share."""

from hypothesis import settings

# An example's time says more about a busy machine than about the code; pytest-timeout ends what hangs.
settings.register_profile("kvpact", deadline=None)
settings.load_profile("kvpact")

pytest_plugins = ["engines"]
