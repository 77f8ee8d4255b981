"""Variants of a test: some run always, the others with the slow tests (tests/README.md, "Slow tests")."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["crossed", "quick"]


def quick(variants: Iterable[Any], *, every: int) -> list[Any]:
    """List the variants as parameters; all but the first of every `every` are marked slow.

    Args:
        variants: values; a tuple is the values of several parameters.
        every: 1 marks none.
    """
    return [_parameter(variant, slow=number % every != 0) for number, variant in enumerate(variants)]


def crossed(*axes: Sequence[Any], every: int = 1) -> list[Any]:
    """List every combination of the axes' values as parameters; all but those of a diagonal are marked slow.

    Args:
        axes: the values of each parameter. The diagonal has each of them at least once, if `every` is 1.
        every: leaves only one of so many of the diagonal.
    """
    longest = max(map(len, axes))
    diagonal = {tuple(number % len(axis) for axis in axes) for number in range(0, longest, every)}
    numbers = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        _parameter(tuple(axis[n] for axis, n in zip(axes, chosen, strict=True)), slow=chosen not in diagonal)
        for chosen in numbers
    ]


def _parameter(variant: Any, *, slow: bool) -> Any:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(*variant, marks=marks) if isinstance(variant, tuple) else pytest.param(variant, marks=marks)
