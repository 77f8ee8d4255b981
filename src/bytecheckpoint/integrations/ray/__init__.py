"""Checkpoints for training functions of Ray Train: `CheckpointManager`."""

from bytecheckpoint.integrations.ray.manager import RayCheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
