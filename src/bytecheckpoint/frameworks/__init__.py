"""Adapters: live objects of one framework to live shards and back."""
