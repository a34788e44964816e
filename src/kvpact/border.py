"""JSON from others, as files, stores and peers send it.

Owns the one way in which it becomes an object or a DataError. Believes nothing that it says.
"""

from __future__ import annotations

import json
from contextlib import suppress

from kvpact.errors import DataError


def json_object(raw: bytes | str) -> dict[str, object]:
    """The JSON object in `raw`, text or UTF-8. Raises DataError for anything else, such as one nested too deeply."""
    with suppress(ValueError, RecursionError):
        found = json.loads(raw if isinstance(raw, str) else raw.decode())
        if isinstance(found, dict):
            return found
    raise DataError(f"a JSON object is needed, not {raw[:80]!r}")
