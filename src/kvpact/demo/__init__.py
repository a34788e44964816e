"""The demonstration: the main job on a real vLLM engine, with a model and texts made on the spot.

Owns a random-weight model, real documents with questions after them, engines in processes of their own, and the table
that compares them. Never downloads anything, and nothing else in kvpact imports it but the command.
"""
