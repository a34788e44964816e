"""Identity of a block's content: its key, the weights, the adapter."""
