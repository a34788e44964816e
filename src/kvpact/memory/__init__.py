"""The memory tier: slots in shared memory, and the schedule for taking their pages."""
