"""Look into a streaming data set of Hugging Face: its steps, its parts, and the exactness of its state."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, Final

__all__ = ["part_of", "passes_all_rows", "steps_of"]

# The first version whose own state passes the tests of tests/dataloader. Rows were skipped after `map` up to 4.8 (datasets
# issue 8145) and after `filter` up to 5.0 (pull request 8360).
_EXACT_SINCE: Final = (5, 2)


def steps_of(dataset: Any) -> Iterator[Any]:
    """Iterate over the steps of which a streaming data set consists."""
    todo = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while todo:
        step = todo.pop()
        yield step
        todo += [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", [])


def part_of(dataset: Any, number: int, count: int, epoch: int) -> Any:
    """Return the part of a streaming data set that one of `count` streams reads in an epoch.

    It has steps of its own, because they hold the positions, and splitting a data set shares them.
    """
    from datasets.distributed import split_dataset_by_node

    own = copy(dataset)
    own._ex_iterable = _own_steps(dataset._ex_iterable)
    part = split_dataset_by_node(own, rank=number, world_size=count)
    part.set_epoch(epoch)
    return part


def _own_steps(step: Any) -> Any:
    """Copy a chain of steps, but not the data and functions in it.

    deepcopy would reach into the cache of all file systems, which other threads change meanwhile.
    """
    own = copy(step)
    for name, value in vars(step).items():
        if name == "ex_iterable":
            setattr(own, name, _own_steps(value))
        elif name == "ex_iterables":
            setattr(own, name, [_own_steps(each) for each in value])
        elif type(value) in (list, dict):
            setattr(own, name, copy(value))
    return own


def passes_all_rows() -> bool:
    """Return True if streaming data sets of the installed `datasets` drop no rows after a restart."""
    import datasets

    return tuple(map(int, datasets.__version__.split(".")[:2])) >= _EXACT_SINCE
