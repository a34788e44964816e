"""A device that does everything as late, as early and as mixed up as its documentation allows."""
