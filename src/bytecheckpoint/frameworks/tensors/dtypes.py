"""Convert dtypes to their names in catalogs, and back."""

from __future__ import annotations

from functools import cache

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError

__all__ = ["dtype_name", "dtype_named"]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without its prefix, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        IncompatibleCheckpointError: this version of torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IncompatibleCheckpointError(f"dtype {name!r} is unknown to torch {torch.__version__}: use a newer torch")
    return dtype
