"""Moves bytes: staging pool, D2H and H2D, write and read pipelines, exchange between ranks."""
