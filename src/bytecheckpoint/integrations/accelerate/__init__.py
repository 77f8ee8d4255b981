"""Checkpoints for programs that train with Hugging Face Accelerate: `attach`."""

from bytecheckpoint.integrations.accelerate.attach import attach
from bytecheckpoint.integrations.accelerate.checkpoints import AcceleratorCheckpoints

__all__ = ["AcceleratorCheckpoints", "attach"]
