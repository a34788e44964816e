"""The disk tier: blocks in slab files."""
