"""Checkpoints under the names of Hugging Face as lazy weights, for the load formats of inference engines."""
