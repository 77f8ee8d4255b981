"""What the folder of a torchtitan run holds. Rank 0 looks."""

from __future__ import annotations

import re

from bytecheckpoint.manager import CheckpointManager
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = ["SEED", "find_steps", "is_stock_checkpoint"]

#: Folder of the seed checkpoint inside of the run's.
SEED = "seed"
#: Names that torchtitan's own manager gives its steps.
_STOCK_STEP = re.compile(r"step-([0-9]+)")


def find_steps(manager: CheckpointManager, step: int) -> tuple[int, int, bool]:
    """Look for a step, or for the newest one if `step` is -1.

    Returns:
        Its number among the steps of `manager`, and among those of torchtitan's own manager, -1 where it is not; and
        whether there is a seed.
    """
    root = manager.root
    own = {info.step for info in manager.steps()}
    names = (_STOCK_STEP.fullmatch(name) for name in with_time_limits(resolve(root)).folders())
    stock = {int(name[1]) for name in names if name and is_stock_checkpoint(f"{root}/{name[0]}")}
    newest, newest_stock = (max((n for n in found if step in (n, -1)), default=-1) for found in (own, stock))
    return newest, newest_stock, _has(f"{root}/{SEED}", CATALOG_NAME)


def is_stock_checkpoint(folder: str) -> bool:
    """Return whether torchtitan's own manager (DCP) has written a folder."""
    return _has(folder, ".metadata")


def _has(folder: str, name: str) -> bool:
    return bool(with_time_limits(resolve(folder)).version(name))
