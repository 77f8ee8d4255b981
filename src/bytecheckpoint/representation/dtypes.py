"""The dtypes that a checkpoint can hold: size, and the code under which safetensors knows them.

Torch is not imported here: a process that only writes bytes needs the sizes and nothing else.
"""

from __future__ import annotations

from bytecheckpoint.errors import UsageError

__all__ = ["dtype_names", "from_safetensors_code", "itemsize", "safetensors_code", "stored_shape"]

# Only codes that safetensors 0.5.0, the oldest version supported, reads into torch. Newer codes (C64, F4, F8_E8M0,
# the FNUZ floats) would make the whole file unreadable there, so such tensors are stored as bytes, and the catalog
# and the file's own metadata hold the true dtype.
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

# For reading files that others wrote.
_FROM_CODE: dict[str, str] = {
    **{code: name for name, (_, code) in _CODED.items()},
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


def dtype_names() -> tuple[str, ...]:
    """Every dtype that can be stored, by torch's name without prefix."""
    return tuple(_ITEMSIZE)


def itemsize(name: str) -> int:
    """Bytes per element of the dtype that torch calls `name` (without prefix), packed dtypes counted as torch does.

    Raises:
        UsageError: `name` is a quantised dtype, or not known.
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
    """The dtype code under which `name` stands in a storage file, or None when it is stored as plain bytes (U8)."""
    coded = _CODED.get(name)
    return coded[1] if coded else None


def stored_shape(name: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a storage file's header states for a box of `lengths` elements of dtype `name`.

    Dtypes without a code count bytes: the last dimension times the item size; a 0-dimensional one becomes [item size].
    """
    if name in _CODED:
        return lengths
    size = itemsize(name)
    return (*lengths[:-1], lengths[-1] * size) if lengths else (size,)


def from_safetensors_code(code: str) -> str | None:
    """Torch's name of the dtype that a foreign safetensors file calls `code`, or None when torch has none."""
    return _FROM_CODE.get(code)
