"""Checkpoints of verl: `VERL_USE_EXTERNAL_MODULES=bytecheckpoint.integrations.verl` in the environment of its workers.

`CheckpointManager` then takes the place of `FSDPCheckpointManager`, which the engines for FSDP and VeOmni use.
"""

from bytecheckpoint.integrations.verl.manager import VerlCheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
