"""The memory tier: slots in shared memory, and when their pages are taken."""
