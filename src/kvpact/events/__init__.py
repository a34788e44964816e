"""Announcements to routers of blocks that a place has got or lost, in order, until the engine takes them."""
