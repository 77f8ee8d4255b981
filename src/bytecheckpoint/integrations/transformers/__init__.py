"""Checkpoints for the Trainer of Hugging Face transformers, and for what inherits it (TRL): `attach`."""

from bytecheckpoint.integrations.transformers.attach import attach
from bytecheckpoint.integrations.transformers.checkpoints import TrainerCheckpoints
from bytecheckpoint.integrations.transformers.from_checkpoint import from_checkpoint
from bytecheckpoint.integrations.transformers.layout_of import layout_of
from bytecheckpoint.integrations.transformers.pretrained import describe_pretrained

__all__ = ["TrainerCheckpoints", "attach", "describe_pretrained", "from_checkpoint", "layout_of"]
