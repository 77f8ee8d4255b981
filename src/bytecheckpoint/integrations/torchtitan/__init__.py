"""Checkpoints for torchtitan's Trainer: `config.checkpoint = BytecheckpointManager.Config(enable=True)`."""

from bytecheckpoint.integrations.torchtitan.manager import BytecheckpointManager

__all__ = ["BytecheckpointManager"]
