"""Other people's KV tiers behind `Tier`, so that `TierConformance` judges them, and kvpact's own beside them."""
