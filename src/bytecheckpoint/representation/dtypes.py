"""The dtypes that a checkpoint can hold: their sizes and their safetensors codes.

This module does not import torch, so a process that only writes bytes does not need torch.
"""

from __future__ import annotations

from bytecheckpoint.errors import UsageError

__all__ = ["dtype_names", "from_safetensors_code", "itemsize", "safetensors_code", "stored_shape"]

# The codes that safetensors 0.5.0, the oldest supported version, reads into torch. One newer code (C64, F4, F8_E8M0,
# the FNUZ floats) makes a whole file unreadable there, so such tensors are stored as bytes; the catalog and the file's
# metadata hold the true dtype.
_CODED: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
}
_AS_BYTES: dict[str, int] = {
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
_ITEMSIZE: dict[str, int] = {**{name: size for name, (size, _) in _CODED.items()}, **_AS_BYTES}
_QUANTISED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

# For reading foreign files.
_FROM_CODE: dict[str, str] = {
    **{code: name for name, (_, code) in _CODED.items()},
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


def dtype_names() -> tuple[str, ...]:
    """Return torch's names, without "torch.", of all dtypes that can be stored."""
    return tuple(_ITEMSIZE)


def itemsize(name: str) -> int:
    """Return the bytes per element of the dtype `name` (torch's name without "torch."), as torch counts elements.

    Raises:
        UsageError: `name` is a quantised or an unknown dtype.
    """
    size = _ITEMSIZE.get(name)
    if size is None:
        if name in _QUANTISED:
            raise UsageError(
                f"dtype {name!r} is quantised and cannot be stored: save int_repr() with its scale and zero point, "
                "or dequantize()"
            )
        raise UsageError(f"dtype {name!r} is not known to this version; known are {', '.join(sorted(_ITEMSIZE))}")
    return size


def safetensors_code(name: str) -> str | None:
    """Return the safetensors code of dtype `name`, or None when a storage file holds it as plain bytes (U8)."""
    coded = _CODED.get(name)
    return coded[1] if coded else None


def stored_shape(name: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a storage file's header states for a box of extent `lengths` and dtype `name`.

    For a dtype without code the shape counts bytes: the last dimension is multiplied by the item size, and a
    0-dimensional box has the shape [item size].
    """
    if name in _CODED:
        return lengths
    size = itemsize(name)
    return (*lengths[:-1], lengths[-1] * size) if lengths else (size,)


def from_safetensors_code(code: str) -> str | None:
    """Return torch's name of the dtype with the safetensors code `code`, or None when torch lacks the dtype."""
    return _FROM_CODE.get(code)
