"""Data loading whose state belongs to a fixed number of streams, so that any number of ranks goes on exactly."""
