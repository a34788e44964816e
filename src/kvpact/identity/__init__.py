"""What decides the content of a block: its key, the weights, the adapter."""
