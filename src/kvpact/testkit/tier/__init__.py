"""Checks for authors of tiers."""

from kvpact._moved import moved_names

__getattr__ = moved_names(__name__, "kvpact.testkit.tier.conformance", "Damage", "Place", "TierConformance")
