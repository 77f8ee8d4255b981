"""Optimizer state and hyperparameters, by parameter name."""
