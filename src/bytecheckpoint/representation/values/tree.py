"""Walk nested values: their leaves, the paths to these, and references to tensors."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError

__all__ = [
    "MAX_DEPTH",
    "PACKED_TENSOR",
    "TENSOR_CLASS",
    "StoredTree",
    "TensorRef",
    "key_of_path",
    "leaves_with_paths",
    "naming_file",
    "parse_state_reference",
    "state_reference",
]

MAX_DEPTH = 100
"""Largest number of nested containers; real states have about ten."""


#: Name of the class in whose place a tensor is stored that is a parameter or requires a gradient.
TENSOR_CLASS = "torch.Tensor"
#: Key of a tensor among plain values of an optimizer, which is a dict with the name of its dtype, its shape and its bytes.
PACKED_TENSOR = "__tensor__"


def state_reference(fqn: str, slot: str) -> str:
    """Return the name by which the tree of an optimizer refers to a state tensor inside a container."""
    return f"{len(fqn)}:{fqn}{slot}"


def parse_state_reference(name: str) -> tuple[str, str]:
    """Return the (FQN, slot) of a `state_reference`."""
    length, _, rest = name.partition(":")
    if not length.isdecimal():
        raise CorruptCheckpointError(f"the optimizer's values refer to a tensor by a malformed name: {name!r}")
    end = int(length) if len(length) < 10 else len(rest)
    return rest[:end], rest[end:]


class StoredTree(bytes):
    """An encoded value of a checkpoint.

    Attributes:
        file: name of the storage file that holds it; of another program's checkpoint, the state.
        key: key of the state to which it belongs.
    """

    file: str
    key: str

    def __new__(cls, data: bytes, file: str, key: str) -> StoredTree:  # noqa: D102
        tree = super().__new__(cls, data)
        tree.file, tree.key = file, key
        return tree


@contextlib.contextmanager
def naming_file(blob: bytes) -> Iterator[None]:
    """Name the file of `blob`, if it is a `StoredTree`, in errors about its content.

    Raises:
        CorruptCheckpointError: the `with` block raised it.
        IncompatibleCheckpointError: the `with` block raised it.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if error.file or not isinstance(blob, StoredTree):
            raise
        tensors = error.tensors or (blob.key,)
        raise CorruptCheckpointError(f"{blob.file}: {error}", file=blob.file, tensors=tensors) from error
    except IncompatibleCheckpointError as error:
        if not isinstance(blob, StoredTree) or blob.file in str(error):
            raise
        raise IncompatibleCheckpointError(f"{blob.file}: {error}") from error


class TensorRef(msgspec.Struct, frozen=True):  # made by the ten thousand, in a fifth of the time of a dataclass
    """A reference to a tensor that is stored elsewhere; `decode(..., on_tensor=TensorRef)` makes them.

    Attributes:
        name: name under which the tensor is stored.
        parameter: True if the tensor is a `torch.nn.Parameter`.
        requires_grad: True if the tensor requires a gradient.
        array: True if the tensor holds the elements of a numpy array.
    """

    name: str
    parameter: bool = False
    requires_grad: bool = False
    array: bool = False


def key_of_path(path: tuple[object, ...]) -> str:
    """Join the steps of `path` with dots: str steps unchanged, other steps as their repr.

    Different paths may have one key: ("a", 0), ("a", "0") and ("a.0",).

    >>> key_of_path(("layers", 0, (1, 2)))
    'layers.0.(1, 2)'
    """
    if len(path) == 1 and type(path[0]) is str:  # nearly all tensors
        return path[0]
    return ".".join(step if type(step) is str else _step_text(step) for step in path)


def _step_text(step: object) -> str:
    try:
        return repr(step)
    except ValueError:
        # Python refuses to print an int of so many decimal digits.
        return hex(step) if isinstance(step, int) else f"<{type(step).__name__}>"


def leaves_with_paths(value: object) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield (path, leaf) for every leaf of nested dicts, OrderedDicts, lists and tuples, depth first, in order.

    Any other value is a leaf, as are sets, empty containers and instances of subclasses.

    Raises:
        UsageError: containers are nested more than `MAX_DEPTH` levels deep, or form a cycle.

    >>> list(leaves_with_paths({"a": [1, {}], "b": ()}))
    [(('a', 0), 1), (('a', 1), {}), (('b',), ())]
    """
    stack: list[Iterator[tuple[tuple[object, ...], object]]] = [iter([((), value)])]
    while stack:
        for path, item in stack[-1]:
            children = _children(path, item)
            if children is None:
                yield path, item
                continue
            if len(stack) > MAX_DEPTH:
                raise UsageError(
                    f"{key_of_path(path[:8])}: containers nested more than {MAX_DEPTH} levels deep, or a cycle"
                )
            stack.append(children)
            break
        else:
            stack.pop()


def _children(path: tuple[object, ...], item: Any) -> Iterator[tuple[tuple[object, ...], object]] | None:
    kind = type(item)
    if kind is dict or kind is collections.OrderedDict:
        pairs = item.items()
    elif kind is list or kind is tuple:
        pairs = enumerate(item)
    else:
        return None
    return (((*path, key), child) for key, child in pairs) if item else None
