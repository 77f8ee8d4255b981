"""Checkpoints of VeOmni: importing this module puts `Checkpointer` in the place of VeOmni's own, under its name "dcp"."""

from bytecheckpoint.integrations.veomni.checkpointer import VeomniCheckpointer as Checkpointer

__all__ = ["Checkpointer"]
