"""Checkpoints for the Trainer of Hugging Face transformers, and for what inherits it (TRL): `attach`."""

from bytecheckpoint.integrations.transformers.attach import attach
from bytecheckpoint.integrations.transformers.checkpoints import TrainerCheckpoints

__all__ = ["TrainerCheckpoints", "attach"]
