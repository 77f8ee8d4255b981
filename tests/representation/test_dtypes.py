from __future__ import annotations

import pytest
import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.dtypes import (
    dtype_names,
    from_safetensors_code,
    itemsize,
    safetensors_code,
    stored_shape,
)

ALL = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
QUANTISED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


def test_every_torch_dtype_but_the_quantised_is_known() -> None:
    assert set(ALL) - QUANTISED <= set(dtype_names())
    for name, dtype in ALL.items():
        if name not in QUANTISED:
            assert itemsize(name) == dtype.itemsize, name


def test_quantised_and_unknown_dtypes_are_refused_by_name() -> None:
    for name in QUANTISED:
        with pytest.raises(UsageError, match=f"'{name}' is quantised"):
            itemsize(name)
    with pytest.raises(UsageError, match="'float7' is not known"):
        itemsize("float7")


def test_codes_read_back_as_the_same_dtype() -> None:
    for name in dtype_names():
        code = safetensors_code(name)
        assert code is None or from_safetensors_code(code) == name
    assert from_safetensors_code("F6_E2M3") is None


def test_dtypes_without_a_code_are_stored_as_bytes() -> None:
    assert safetensors_code("complex64") is None
    assert stored_shape("complex64", (3, 5)) == (3, 40)
    assert stored_shape("complex64", ()) == (8,)
    assert stored_shape("complex64", (0,)) == (0,)
    assert stored_shape("float8_e8m0fnu", ()) == (1,)
    assert stored_shape("bfloat16", (3, 5)) == (3, 5)
