"""Adapters from the live objects of a training framework to shards and back. Nothing else knows a framework's name."""
