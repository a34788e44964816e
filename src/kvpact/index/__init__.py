"""Which blocks one place holds, and which is evicted next."""
