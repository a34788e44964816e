"""Which blocks one place holds, and what goes next."""
