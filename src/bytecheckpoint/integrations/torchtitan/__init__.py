"""Checkpoints for torchtitan's Trainer: `config.checkpoint = CheckpointManager.Config(enable=True)`."""

from bytecheckpoint.integrations.torchtitan.manager import TorchtitanCheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
