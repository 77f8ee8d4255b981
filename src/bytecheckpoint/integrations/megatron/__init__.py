"""Save and load by Megatron-Core's `dist_checkpointing`: `SaveStrategy` and `LoadStrategy` are its `sharded_strategy`."""

from bytecheckpoint.integrations.megatron.strategies import MegatronLoadStrategy as LoadStrategy
from bytecheckpoint.integrations.megatron.strategies import MegatronSaveStrategy as SaveStrategy

__all__ = ["LoadStrategy", "SaveStrategy"]
