"""Attributes that are computed at the first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["lazy"]

_T = TypeVar("_T")


class lazy(Generic[_T]):
    """A method whose result becomes the attribute of that name at the first use.

    As `functools.cached_property`, which in Python 3.11 holds a lock per class while it computes. A signal handler that
    saves would wait forever for a thread that needs the same lock. Here two threads may compute the same result twice.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | _T:
        """Compute and store the result. Python calls this only while the instance has no attribute of that name."""
        if instance is None:
            return self
        result = vars(instance)[self._compute.__name__] = self._compute(instance)
        return result
