"""The steps of which a streaming data set of Hugging Face consists, and whether their state is exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

__all__ = ["passes_all_rows", "steps_of"]

# The first version whose own state passes the tests of tests/dataloader. Rows were skipped after `map` up to 4.8 (datasets
# issue 8145) and after `filter` up to 5.0 (pull request 8360).
_EXACT_SINCE: Final = (5, 2)


def steps_of(dataset: Any) -> Iterator[Any]:
    """Iterate over the steps of which a streaming data set consists."""
    todo = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while todo:
        yield (step := todo.pop())
        todo += [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", [])


def passes_all_rows() -> bool:
    """Return whether the installed `datasets` is no version whose streaming data sets drop rows after a restart."""
    import datasets

    return tuple(map(int, datasets.__version__.split(".")[:2])) >= _EXACT_SINCE
