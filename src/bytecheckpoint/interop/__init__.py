"""Foreign formats in and out, and tools over whole checkpoints: verify, compare, export, repair."""
