"""The steps of a training run that this machine has in its hot tier."""

from __future__ import annotations

import os
from collections.abc import Iterator

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.tiers.hot_folder import HotStep
from bytecheckpoint.tiers.names import step_name
from bytecheckpoint.tiers.storage import TierStorage

__all__ = ["folders_of_run", "run_of", "steps_of_run"]


def run_of(url: str) -> str:
    """Return the URL of the run that a step belongs to: the folder of the step's folder."""
    return url.rpartition("/")[0]


def folders_of_run(run: str) -> Iterator[TierStorage]:
    """Yield the folders of a run in this machine's hot tier, in the order of their names, with any content."""
    try:
        root = os.path.dirname(TierStorage(f"{run}/-").hot.root)
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return
    for name in names:
        try:
            yield TierStorage(f"{run}/{step_name(name)}")
        except CheckpointError:
            continue  # another program's folder


def steps_of_run(run: str) -> Iterator[tuple[TierStorage, HotStep]]:
    """Yield the steps of a run that are committed in this machine's hot tier."""
    for storage in folders_of_run(run):
        if (step := storage.hot_folder.step()) is not None:
            yield storage, step
