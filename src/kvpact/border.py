"""JSON from files, stores and peers.

Owns the one way in which it becomes an object or a DataError. Trusts none of its values.
"""

from __future__ import annotations

import json
from contextlib import suppress

from kvpact.errors import DataError


def json_object(raw: bytes | str) -> dict[str, object]:
    """Decode the JSON object in `raw`, text or UTF-8. Raises DataError for anything else, or one nested too deeply."""
    with suppress(ValueError, RecursionError):
        found = json.loads(raw if isinstance(raw, str) else raw.decode())
        if isinstance(found, dict):
            return found
    raise DataError(f"a JSON object is needed, not {raw[:80]!r}")
