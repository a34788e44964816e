"""One rank: it copies, and reports what it copied."""
