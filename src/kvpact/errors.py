"""The exceptions that kvpact raises.

Every message says what was wrong, the value seen, and what would be right.
"""


class KvpactError(Exception):
    """Base of every error that kvpact raises on purpose."""


class ConfigError(KvpactError, ValueError):
    """The user's configuration is wrong; the engine refuses to start with it."""


class TierError(KvpactError):
    """A tier cannot be used (missing directory, full disk, foreign data); the engine serves on without it."""


class NoSuchTier(TierError):
    """There is no tier at this URL before the URL or this machine's packages are corrected: it is not tried again."""


class WeightsVersionRefused(KvpactError, ValueError):
    """A word for the weights that is refused; the engine keeps its current epoch."""


class PactViolation(KvpactError, AssertionError):
    """A side broke the contract or a structure lost an invariant: a defect, never a user's mistake."""
