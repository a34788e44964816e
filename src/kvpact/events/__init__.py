"""Announcements to routers of blocks that a place has got or lost, until the engine takes them; times of loads."""
