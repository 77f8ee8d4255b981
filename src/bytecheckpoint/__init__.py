"""Checkpointing for large-model training: save from any layout, load at any other, every byte verified.

    import bytecheckpoint
    bytecheckpoint.save("checkpoints/step_100", {"model": model, "optimizer": optimizer}, async_checkpoint=True)
    bytecheckpoint.load("checkpoints/step_100", {"model": model, "optimizer": optimizer})
    bytecheckpoint.open("checkpoints/step_100")["model/layers.0.weight"][0:16]

The names in `__all__` are the public API. They are imported here if torch is imported already, else at their first use:
the command line and the helper process, which need no torch, start quickly.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from bytecheckpoint._distribution import warn_of_other
from bytecheckpoint._version import __version__

# Imported eagerly: a later import of the module `settings` would put the module in place of the function.
from bytecheckpoint.settings import (
    MonitoringSettings,
    Settings,
    StagingSettings,
    StorageSettings,
    TierSettings,
    TransportSettings,
    configure,
    settings,
)

warn_of_other()

if TYPE_CHECKING:
    from bytecheckpoint import tools as tools
    from bytecheckpoint.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointTimeoutError,
        CorruptCheckpointError,
        IncompatibleCheckpointError,
        MissingKeyError,
        OutOfRangeError,
        PeerLostError,
        StateChangedError,
        StorageConflictError,
        StorageError,
        StorageFullError,
        StorageUnavailableError,
        UsageError,
    )
    from bytecheckpoint.frameworks.providers.base import Piece, PieceReader, StateProvider
    from bytecheckpoint.frameworks.providers.files import FileProvider
    from bytecheckpoint.frameworks.providers.replay import ReplayBuffer
    from bytecheckpoint.frameworks.rng import rng_state
    from bytecheckpoint.handles import LoadReport, SaveHandle, SaveReport
    from bytecheckpoint.loading import load
    from bytecheckpoint.manager import CheckpointManager
    from bytecheckpoint.opening import Checkpoint, Entry, open
    from bytecheckpoint.options import LoadOptions, SaveOptions
    from bytecheckpoint.representation.values.codec import register
    from bytecheckpoint.saving import prepare, save
    from bytecheckpoint.step_fence import fence
    from bytecheckpoint.tools.huggingface_view import HuggingFaceView
    from bytecheckpoint.world import release_memory

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointTimeoutError",
    "CorruptCheckpointError",
    "Entry",
    "FileProvider",
    "HuggingFaceView",
    "IncompatibleCheckpointError",
    "LoadOptions",
    "LoadReport",
    "MissingKeyError",
    "MonitoringSettings",
    "OutOfRangeError",
    "PeerLostError",
    "Piece",
    "PieceReader",
    "ReplayBuffer",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "Settings",
    "StagingSettings",
    "StateChangedError",
    "StateProvider",
    "StorageConflictError",
    "StorageError",
    "StorageFullError",
    "StorageSettings",
    "StorageUnavailableError",
    "TierSettings",
    "TransportSettings",
    "UsageError",
    "__version__",
    "configure",
    "fence",
    "load",
    "open",
    "prepare",
    "register",
    "release_memory",
    "rng_state",
    "save",
    "settings",
]

_HOME = {
    **dict.fromkeys((n for n in __all__ if n.endswith("Error")), "errors"),
    **dict.fromkeys(("LoadReport", "SaveHandle", "SaveReport"), "handles"),
    **dict.fromkeys(("Checkpoint", "Entry", "open"), "opening"),
    **dict.fromkeys(("LoadOptions", "SaveOptions"), "options"),
    **dict.fromkeys(("Piece", "PieceReader", "StateProvider"), "frameworks.providers.base"),
    "FileProvider": "frameworks.providers.files",
    "HuggingFaceView": "tools.huggingface_view",
    "ReplayBuffer": "frameworks.providers.replay",
    "register": "representation.values.registry",
    "CheckpointManager": "manager",
    "fence": "step_fence",
    "load": "loading",
    "prepare": "saving",
    "release_memory": "world",
    "rng_state": "frameworks.rng",
    "save": "saving",
}


if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "tools":
            return importlib.import_module(".tools", __name__)
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING and "torch" in sys.modules:  # a training program, whose first save should not wait for imports
    for _name in ("load", "save"):
        __getattr__(_name)
