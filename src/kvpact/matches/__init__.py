"""A connector's matches under an engine that says how each of them ends: `forms.py`, `tracker.py`."""
