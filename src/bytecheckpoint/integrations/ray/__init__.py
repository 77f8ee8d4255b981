"""Checkpoints for training functions of Ray Train: `RayCheckpointManager`."""

from bytecheckpoint.integrations.ray.manager import RayCheckpointManager

__all__ = ["RayCheckpointManager"]
