"""The demonstration: the main job on a real vLLM engine, with a generated model and texts.

Owns a random-weight model, real documents with questions after them, engines in processes of their own, and the table
that compares them. Never downloads anything; only the command imports it.
"""
