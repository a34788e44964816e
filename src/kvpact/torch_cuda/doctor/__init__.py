"""What a GPU and its machine can do for kvpact, measured through kvpact's own copies, and what to set.

Importing this imports neither torch nor Triton; `torch_bench.py` does.
"""
