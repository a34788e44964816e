"""The tier over any store of named records that engines share."""
