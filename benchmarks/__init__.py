"""Measurements of bytecheckpoint beside the raw limits and its peers: `python -m benchmarks`."""
