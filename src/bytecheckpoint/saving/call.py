"""One call of save or prepare: its arguments, and what rank 0's coordinator shares with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.frameworks.base import Framework
from bytecheckpoint.frameworks.selection import Selection
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage

__all__ = ["SaveCall", "SaveTask"]


@dataclass(frozen=True, slots=True)
class SaveCall:
    """The arguments of one save, checked.

    Attributes:
        storage: where the checkpoint goes.
        framework: the adapter.
        states: what to save.
        names: explicit parameter names.
        selection: what to save of them.
        check_replicas: compare the copies of replicated tensors; None: by samples, once for each plan.
        settings: in force at the call.
        metadata: the caller's own facts for the catalog.
        step: the training step that the caller gave.
    """

    storage: Storage
    framework: Framework
    states: Mapping[str, object]
    names: Mapping[Any, Any] | None
    selection: Selection
    check_replicas: bool | None
    settings: Settings
    metadata: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None


@dataclass(slots=True)
class SaveTask:
    """The number of one save and, on rank 0, what its own save tells the coordinator besides the messages.

    Attributes:
        number: number of the save, equal on all ranks.
        timeout: seconds that a step may take, beyond the time for moving bytes.
        storage: where the checkpoint goes; set before rank 0 sends its first message.
        replaces: version of the catalog that was there when rank 0 began to write, "" for none.
        generation: of the new files.
        info: what the catalog says about the save as a whole.
        layout: how the objects are distributed. Rank 0 reads it when it asks for a plan, and caches it with the plan.
    """

    number: int
    timeout: float
    storage: Storage | None = None
    replaces: str = ""
    generation: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] | None = None
