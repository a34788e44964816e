"""JSON from others, as files, stores and peers send it.

Owns the one way in which it becomes an object or a DataError. Believes nothing that it says.
"""

from __future__ import annotations

import json

from kvpact.errors import DataError


def json_object(raw: bytes | str) -> dict[str, object]:
    """The JSON object in `raw`, text or UTF-8. Raises DataError for anything else, such as one nested too deeply."""
    try:
        found = json.loads(raw if isinstance(raw, str) else raw.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise DataError(f"a JSON object is needed, not {type(found).__name__}")
    return found
