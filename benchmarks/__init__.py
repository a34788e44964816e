"""The benchmarks: `python -m benchmarks` lists them.

A module with a function `rows` or `main` is one. `rows(...)` measures and returns a list of dictionaries; its
parameters, all with defaults, are the benchmark's options. A module with `main` alone is a script with options of its
own. The first line of a module says what it shows; `NAME` names it where the file's name cannot.
"""
