"""Tensors of every kind as live shards."""
