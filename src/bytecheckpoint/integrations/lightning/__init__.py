"""Checkpoints for Lightning's Trainer: `ModelCheckpoint`, in the place of Lightning's own; `export_ckpt`."""

from bytecheckpoint.integrations.lightning.callback import ModelCheckpoint
from bytecheckpoint.integrations.lightning.export import export_ckpt

__all__ = ["ModelCheckpoint", "export_ckpt"]
