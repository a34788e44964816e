"""Records in object stores."""
