"""Tools over whole checkpoints: verify, diff, export, repair."""
