"""Foreign formats in and out."""
