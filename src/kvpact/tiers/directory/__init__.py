"""Records in a directory that many hosts mount."""
