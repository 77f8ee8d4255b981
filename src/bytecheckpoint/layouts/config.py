"""Evaluate the expressions of a layout over the configurations of both sides, as `hf.hidden_size / 2`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from bytecheckpoint.layouts.axes import TextError

__all__ = [
    "Config",
    "check_condition",
    "check_keys",
    "check_size",
    "condition",
    "dim_size",
    "flattened",
    "keys_of",
    "said",
]

Config = Mapping[str, object]
_WORD = r"[^\W\d]\w*(?:\.\w+)*"
_OPERAND = re.compile(rf"\s*({_WORD}|[0-9]+)\s*")
_OTHERS = r"(?:\s*\|\s*[\w.+-]+)*"
_CLAUSE = re.compile(rf"(not\s+)?({_WORD}{_OTHERS})(?:\s*(!=|=)\s*(\S+{_OTHERS})|\s+in\s+(\S.*))?", re.DOTALL)
_KEY = re.compile(r"[^\W\d]\w*(?:\.\w+)+")
_LARGEST = 1 << 53  # beyond it floats are not exact
_CONSTANTS = {"true": True, "false": False, "none": None}


def flattened(prefix: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return a nested configuration with one key for each value, as `hf.rope_parameters.rope_theta`.

    A list of texts or integers, such as one of all layers, becomes one text: "1 1 1 0".
    """
    result: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            result |= flattened(name, value)
        elif isinstance(value, list) and value and all(type(one) in (int, str) for one in value):
            result[name] = " ".join(map(str, value))
        else:
            result[name] = value
    return result


def keys_of(text: str) -> Iterator[str]:
    """Yield the keys, as `hf.vocab_size`, that an expression or a condition asks for."""
    yield from re.findall(rf"(?<![\w.]){_KEY.pattern}", text)


def check_size(text: str, sides: Sequence[str]) -> None:
    """Refuse a text that is no expression of a size."""
    for alternative in text.split("|"):
        parts = re.split(r"[-+*/]", alternative)
        if not all(_OPERAND.fullmatch(part) for part in parts):
            raise TextError(
                f"'{alternative.strip()}' is no size: write keys and numbers with + - * /, as hf.hidden_size / 2"
            )
        check_keys(parts, sides)


def check_condition(text: str, sides: Sequence[str]) -> None:
    """Refuse a text that is no condition."""
    for clause in _clauses(text):
        found = _CLAUSE.fullmatch(clause)
        if not found:
            raise TextError(
                f"'{clause}' is no condition: write 'KEY', 'not KEY', 'KEY = VALUE' or 'KEY in VALUE VALUE'"
            )
        first, *others = found[2].split("|")
        values = [*map(str.strip, [*others, *(found[4] or "").split("|")]), *(found[5] or "").split()]
        check_keys([first, *filter(_KEY.fullmatch, values)], sides)


def check_keys(texts: Sequence[str], sides: Sequence[str]) -> None:
    """Refuse keys of neither side."""
    for text in texts:
        key = text.strip()
        if not key.isdecimal() and key.partition(".")[0] not in sides:
            raise TextError(f"'{key}' is of no side: it must begin with {' or '.join(f'{side}.' for side in sides)}")


def _clauses(text: str) -> list[str]:
    return [clause.strip() for clause in re.split(r"\sand\s", text)]


def condition(text: str, config: Config) -> bool | None:
    """Return whether a condition holds, None if the configurations do not have its keys."""
    results = [_clause(clause, config) for clause in _clauses(text)]
    return False if False in results else None if None in results else True


def _clause(text: str, config: Config) -> bool | None:
    negated, keys, relation, value, members = _CLAUSE.fullmatch(text).groups()  # type: ignore[union-attr]
    actual = _value(keys, config)
    if actual is None and value != "none":
        return None
    if members is not None:
        result = any(_equal(actual, _value(member, config)) for member in members.split())
        if not result and any(config.get(key) is None for key in keys_of(members)):
            return None
    elif relation:
        expected = _value(value, config)
        if expected is None and value != "none":
            return None
        result = _equal(actual, expected) == (relation == "=")
    else:
        result = bool(actual)
    return not result if negated else result


def said(text: str, config: Config) -> str:
    """Return what the configurations say about a condition, as `hf.hidden_act is gelu, megatron.activation is silu`."""
    found: list[str] = []
    for clause in _clauses(text):
        _, keys, _, value, members = _CLAUSE.fullmatch(clause).groups()  # type: ignore[union-attr]
        for alternatives in (keys, value or "", *(members or "").split()):
            names = [*keys_of(alternatives)]
            known = [f"{name} is {config[name]}" for name in names if config.get(name) is not None]
            found += known[:1] or [f"{name} is not set" for name in names[:1]]
    return ", ".join(dict.fromkeys(found))


def _value(text: str, config: Config) -> object:
    """Return the first known of `KEY | KEY | CONSTANT`: the constant if a configuration of the side lacks the keys."""
    first, *_ = alternatives = [*map(str.strip, text.split("|"))]
    for one in alternatives:
        if _KEY.fullmatch(one):
            if config.get(one) is not None:
                return config[one]
        elif one is first or any(key.startswith(first.partition(".")[0] + ".") for key in config):
            return _constant(one)
    return None


def _constant(text: str) -> object:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return float(text)
    except ValueError:
        return text


def _equal(actual: object, value: object) -> bool:
    return bool(actual == value) and isinstance(actual, bool) == isinstance(value, bool)


def dim_size(text: str, config: Config) -> int | None:
    """Return the size that an expression gives: the first known alternative of each side, on which the sides must agree.

    Raises:
        TextError: the sides disagree, or the size is no natural number.
    """
    found: dict[str, tuple[str, int]] = {}
    for alternative in map(str.strip, text.split("|")):
        side = next(keys_of(alternative), "").partition(".")[0]
        value = None if side in found else _arithmetic(alternative, config)
        if value is not None:
            found[side] = (alternative, value)
    for (first, one), (other, two) in zip(found.values(), list(found.values())[1:], strict=False):
        if one != two:
            raise TextError(f"{first} is {one}, but {other} is {two}")
    return next((value for _, value in found.values()), None)


def _arithmetic(text: str, config: Config) -> int | None:
    """Evaluate `a + b * c`: products before sums, each from left to right."""
    total, tokens = 0.0, re.split(r"([-+*/])", text)
    product, sign = 1.0, 1
    operator = "*"
    for token in map(str.strip, tokens):
        if token in "+-":
            total, product, sign, operator = total + sign * product, 1.0, -1 if token == "-" else 1, "*"
        elif token in "*/":
            operator = token
        else:
            value = int(token) if token.isdecimal() else config.get(token)
            if value is None:
                return None
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TextError(f"{token} is {value!r}, which is no number")
            if operator == "/" and value == 0:
                raise TextError(f"{token} is 0 in '{text}'")
            product = product * value if operator == "*" else product / value
    total += sign * product
    if total != total // 1 or not 0 <= total < _LARGEST:  # also for nan and infinity
        raise TextError(f"'{text}' is {total:g}, which is no size")
    return int(total)
