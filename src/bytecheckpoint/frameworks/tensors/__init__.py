"""Describe tensors of every kind as live shards."""
