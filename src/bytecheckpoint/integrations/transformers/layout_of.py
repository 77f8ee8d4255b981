"""Make the layout between the names in files of Hugging Face and those of a model in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.conversion_tables import layout_of_tables
from bytecheckpoint.layouts import Layout

__all__ = ["layout_of"]


def layout_of(model: Any, path: str | os.PathLike[str], *, state: str = "model") -> Layout | None:
    """Return the layout between the names of a checkpoint and those of a model of Transformers.

    It is made from the conversion tables of Transformers, as `layout="auto"` does in a load. It also leads back: a step of
    a training opened through it has the names of the files.

    Args:
        model: the model, whole.
        path: folder or URL of a checkpoint with the names of files, of which headers are read.
        state: name of the state that is the model.

    Returns:
        The layout, from the side "hf" to the side "hf5"; None if the names are the same.

    Raises:
        UsageError: `model` is no model of Transformers 5.
        IncompatibleCheckpointError: a table of Transformers has an operation that no layout states, or that depends on a
            guess.
    """
    bases: Mapping[str, Any] = {base.__name__: base for base in type(model).__mro__}
    if "PreTrainedModel" not in bases:
        raise UsageError(f"layout_of is for models of transformers, not for {type(model).__name__}")
    with bytecheckpoint.open(path) as found:
        prefix = f"{state}/"
        stored = {
            key.removeprefix(prefix): tuple(t.shape) for key, t in found.tensors.items() if key.startswith(prefix)
        }
    layout = layout_of_tables(model, stored, {name: tuple(t.shape) for name, t in model.state_dict().items()})
    # One that only ignores names of files is of no use to a step.
    return None if layout is None or all(rule.left == rule.right for rule in layout.rules) else layout
