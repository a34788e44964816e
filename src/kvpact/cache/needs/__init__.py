"""Needs of a request as runs of blocks: of a match of n tokens, or of what a step computed.

A *linked* run is a piece of the chain: each block needs the one before it. A place answers for it by a count, one pin
on its last block keeps all of it, and from the first failed block on it is lost. The blocks of a *loose* run stand each
for itself, attached to a row of the chain: a place answers block by block, each is pinned, and one that fails costs a
match all of it. No other module of `cache/` knows to which KV cache group which kind belongs.

Applies the rules of `identity/groups.py` to a request's keys and the engine's block tables. Owns no state of requests,
and changes nothing: knows no index, tier, clock or counter.
"""
