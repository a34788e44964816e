"""Index of the blocks that one place holds, and the order of their eviction."""
