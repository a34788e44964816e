"""One pool for a host: how the engines of one user find each other, and what each has of the others."""
