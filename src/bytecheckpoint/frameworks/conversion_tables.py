"""Translate the conversion tables of transformers 5 into a layout: how its models differ in memory from their files.

`transformers.conversion_mapping` has for each family the names to change, and operations on tensors: experts that are
stacked, projections that are joined or cut. Its own functions say which tensor of a file belongs to which parameter; here
the operations become axes, and numbers that all names of an instance share become holes.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.frameworks.wrappers import unwrapped, walk_modules
from bytecheckpoint.layouts import Alias, Layout, Statement
from bytecheckpoint.layouts.examples import NUMBER, Example, escaped, rules_of
from bytecheckpoint.layouts.parts import SourcePlace

__all__ = ["layout_of_tables"]

_HOLE = "{e}"  # in the place of the number of a stacked tensor
Shape = tuple[int, ...]


def layout_of_tables(model: nn.Module, stored: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> Layout | None:
    """Return the layout from the names of a checkpoint to those of a live model of transformers.

    Args:
        model: the model.
        stored: shape of each tensor of the checkpoint.
        shapes: global shape of each tensor of the model, by the first of its names.

    Returns:
        The layout, None if the model is none of transformers 5, or has the names of the checkpoint.

    Raises:
        IncompatibleCheckpointError: a table has an operation that no layout states, or one that depends on a guess.
    """
    loading, tables = (sys.modules.get(f"transformers.{name}") for name in ("core_model_loading", "conversion_mapping"))
    model = unwrapped(model)
    bases = {(base.__module__, base.__name__) for base in type(model).__mro__}
    if ("transformers.modeling_utils", "PreTrainedModel") not in bases or loading is None or tables is None:
        return None
    second = _second_names(model)
    live = {**shapes, **{name: shapes[of] for name, of in second.items() if of in shapes}}
    if stored.keys() <= live.keys():
        return None
    transforms = tables.get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, _Converted] = {}
    same, left = shapes.keys() <= stored.keys(), dict[str, str]()
    for name in sorted(stored, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, live)
        if same or (renamed not in live and name in live):
            renamed, pattern = name, None
        if renamed in live or (pattern is not None and "*" in renamed):
            converter = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(renamed, _Converted(renamed, converter))
            group.sources.setdefault(pattern or "", []).append(name)
        else:
            left[name] = renamed
    patterns = _unused(model)
    unused = [re.escape(name) for name, renamed in left.items() if any(re.search(text, renamed) for text in patterns)]
    if not unused and all(group.plain_source == name for name, group in groups.items()):
        return None
    # Of two names of a tied parameter the second one is not read: the files must be of a model that ties them, too.
    tied = getattr(model.config, "tie_word_embeddings", False) and not groups.keys().isdisjoint(second)
    kind = type(model).__name__
    require = [Statement("", "hf.tie_word_embeddings | true", place=SourcePlace(kind))] if tied else []
    aliases = list(_aliases(second, groups))
    examples = [group.example(stored, live, model) for group in groups.values()]
    ignored = [Statement("hf", "|".join(unused))] if unused else []
    layout = Layout(kind, "hf", "hf5", rules=rules_of(examples), require=require, ignore=ignored, aliases=aliases)
    alike = [*_alike(layout, {**left, **live})]
    return replace(layout, rules=rules_of([*examples, *alike])) if alike else layout


def _unused(model: Any) -> list[str]:
    """Return the patterns of tensors without a place in a model that transformers ignores in files."""
    buffers = [name for name, _ in model.named_buffers()]
    old = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    kept = [text for end, text in old.items() if any(name.endswith(end) for name in buffers)]
    return [*kept, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]


def _alike(layout: Layout, names: Iterable[str]) -> Iterator[Example]:
    """Yield the rules of names that no rule fits, as of a head that one side lacks: they are the same on both sides.

    What only one side has is then missing or unexpected, as in a load without a layout.
    """
    templates = [family.template for rule in layout.parsed for family in rule.families]
    for name in names:
        if not any(template.match(name) for template in templates):
            yield Example({escaped(name): "..."}, {escaped(name): "..."})


def _second_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by its further names."""
    first: dict[int, str] = {}
    names = [
        (f"{prefix}{name}", first.setdefault(id(parameter), f"{prefix}{name}"))
        for _, prefix, part in walk_modules(model)
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    return {name: of for name, of in names if name != of}


def _aliases(second: Mapping[str, str], groups: dict[str, _Converted]) -> Iterator[Alias]:
    """Yield the second names of tied parameters, of both sides; add those that the checkpoint lacks to `groups`."""
    for name, of in second.items():
        if name not in groups and of in groups:
            groups[name] = _Converted(name, None, {"": [name]})  # the name that a file would have
        sources = [groups[one].plain_source if one in groups else None for one in (name, of)]
        if sources[0]:
            yield Alias("hf5", escaped(name), escaped(of))
        if sources[0] and sources[1]:
            yield Alias("hf", escaped(sources[0]), escaped(sources[1]))


@dataclass
class _CommonPart:
    """Elements that are in one tensor on each side.

    Attributes:
        source: pattern of the stored tensor.
        target: pattern of the parameter, "" for the only one.
        here: axes of the stored tensor.
        there: axes of the parameter.
    """

    source: str
    target: str
    here: list[str]
    there: list[str]


@dataclass
class _Converted:
    """The stored tensors that become one parameter, or several by one conversion.

    Attributes:
        target: name of the first parameter.
        converter: conversion, None if only names differ.
        sources: names of the tensors, by the pattern that they fit.
    """

    target: str
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def plain_source(self) -> str | None:
        """Name of the tensor that the parameter is, None if it is made of several."""
        names = [name for found in self.sources.values() for name in found]
        return names[0] if len(names) == 1 and self.converter is None else None

    def example(self, stored: Mapping[str, Shape], live: Mapping[str, Shape], model: Any) -> Example:
        """Return the rule of these tensors."""
        if self.converter is None:
            ((name, *others),) = self.sources.values()
            if others:
                raise IncompatibleCheckpointError(f"{listed([name, *others], 3)} are all {self.target} in the model")
            return Example({escaped(name): "..."}, {escaped(self.target): "..."})
        patterns = [pattern for pattern in self.converter.source_patterns if pattern in self.sources]
        shapes = {pattern: stored[self.sources[pattern][0]] for pattern in patterns}
        ndim = min(map(len, shapes.values()))
        alike = [len({shape[k] for shape in shapes.values()}) == 1 for k in range(ndim)]
        parts = []
        for number, pattern in enumerate(patterns):
            dims = [f"x{k}" if k < ndim and alike[k] else f"x{k}p{number}" for k in range(len(shapes[pattern]))]
            parts.append(_CommonPart(pattern, "", dims, [*dims]))
        conversion = _Conversion(self, parts, shapes, live, model.config)
        for operation in self.converter.operations:
            conversion.apply(operation)
        return conversion.example()


class _Conversion:
    """The operations of one conversion, as axes.

    Args:
        group: the tensors.
        parts: one part for each pattern of stored tensors.
        shapes: shape of the stored tensors of each pattern.
        live: shape of each parameter.
        config: configuration of the model.
    """

    def __init__(
        self,
        group: _Converted,
        parts: list[_CommonPart],
        shapes: Mapping[str, Shape],
        live: Mapping[str, Shape],
        config: Any,
    ) -> None:
        self._group, self._parts, self._shapes, self._live, self._config = group, parts, shapes, live, config
        self._targets: list[str] = list(group.converter.target_patterns)
        # The side on which parts follow each other, and along which dimension.
        self._joined: tuple[str, int] | None = None
        self._stacked = self._numbered = False
        self._sizes: dict[str, int] = {}

    def apply(self, operation: Any) -> None:
        """Apply one operation of transformers."""
        kind = type(operation).__name__
        method = getattr(self, f"_{kind.lower()}", None)
        if method is None or type(operation).__module__ != "transformers.core_model_loading":
            raise self._refused(f"by {kind}, which no layout states")
        method(operation)

    def _refused(self, why: str) -> IncompatibleCheckpointError:
        names = listed([name for found in self._group.sources.values() for name in found], 2)
        return IncompatibleCheckpointError(
            f"transformers makes {self._group.target} of {names} {why}: give a layout of your own"
        )

    def _mergemodulelist(self, operation: Any) -> None:
        self._stacked = True
        for part in self._parts:
            part.there.insert(operation.dim, "e")

    def _concatenate(self, operation: Any) -> None:
        if not self._stacked and any(len(names) > 1 for names in self._group.sources.values()):
            self._stacked = True
            for part in self._parts:
                part.there[operation.dim] = f"(e {part.there[operation.dim]})"
        if len(self._parts) > 1:
            self._joined = "there", operation.dim

    def _chunk(self, operation: Any) -> None:
        (part,) = self._parts
        dim = part.there[operation.dim]
        if operation.num_shards_attribute is not None:
            self._numbered, at = True, part.here.index(dim)
            part.here[at] = f"(e {dim})"
            self._sizes["e"] = getattr(self._config.get_text_config(), operation.num_shards_attribute)
            return
        self._cut(operation.dim, [dim] * len(self._targets))

    def _split(self, operation: Any) -> None:
        dim = self._parts[0].there[operation.dim]
        self._cut(operation.dim, [f"{dim}s{number}" for number in range(len(self._targets))])

    def _cut(self, dim: int, dims: Sequence[str]) -> None:
        (part,) = self._parts
        at = part.here.index(part.there[dim])
        self._parts = [copy.deepcopy(replace(part, target=target)) for target in self._targets]
        for one, name in zip(self._parts, dims, strict=True):
            one.here[at] = one.there[dim] = name
        self._joined = "here", at

    def _transpose(self, operation: Any) -> None:
        dims = operation.dim0, operation.dim1
        (part,) = self._parts
        if operation.check_dims:
            shape = self._shapes[part.source]
            if shape[dims[0]] == shape[dims[1]]:
                raise self._refused("and guesses from their shapes whether to transpose them, which are square")
            if shape == self._live[self._group.target]:
                return
        part.there[dims[0]], part.there[dims[1]] = part.there[dims[1]], part.there[dims[0]]

    def _interleave(self, operation: Any) -> None:
        self._sizes["t"] = 2
        for part in self._parts:
            dim = part.there[operation.dim]
            self._turn(part, operation, operation.dim, f"({dim} t)", f"(t {dim})")

    def _permuteforrope(self, operation: Any) -> None:
        config = getattr(self._config, operation.subconfig_key or "", self._config)
        heads = getattr(config, "num_attention_heads", 1)
        for part in self._parts:
            chosen = part.target or part.source
            if operation.permute_layer_names is None or any(name in chosen for name in operation.permute_layer_names):
                self._sizes |= {"t": 2, "n": heads}
                dim = part.there[0]
                self._turn(part, operation, 0, f"(n {dim}r t)", f"(n t {dim}r)")

    @staticmethod
    def _turn(part: _CommonPart, operation: Any, at: int, before: str, after: str) -> None:
        """Replace a dimension by one axis on the stored side and by another in the model, or the other way round."""
        where = part.here.index(part.there[at])
        part.here[where], part.there[at] = (after, before) if operation.inverse else (before, after)

    def _conv3dtolinear(self, operation: Any) -> None:
        for part in self._parts:
            if len(part.there) == 5:
                part.there = [part.there[0], f"({' '.join(part.there[1:])})"]

    def _lineartoconv3d(self, operation: Any) -> None:
        (part,) = self._parts
        dims = dict(zip("cijk", (operation.in_channels, *operation.kernel_size), strict=True))
        part.here[1], self._sizes = f"({' '.join(dims)})", {**self._sizes, **dims}
        part.there = [part.there[0], *dims]

    def example(self) -> Example:
        """Return the rule."""
        left = self._side("here", [(self._stored_name(part), part.here) for part in self._parts])
        return Example(
            left, self._side("there", [(self._live_name(part), part.there) for part in self._parts]), self._sizes
        )

    def _side(self, side: str, found: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
        """Return the axes of each name of a side."""
        (name, axes), *others = found
        if not others:
            return {name: " ".join(axes)}
        assert self._joined is not None
        if self._joined[0] != side:
            return {name: f"p{number} = {' '.join(axes)}" for number, (name, axes) in enumerate(found)}
        dim = self._joined[1]
        if any([*one[:dim], *one[dim + 1 :]] != [*axes[:dim], *axes[dim + 1 :]] for _, one in others):
            raise self._refused("whose other dimensions differ")
        terms = " | ".join(f"p{number}: {one[dim]}" for number, (_, one) in enumerate(found))
        return {name: " ".join([*axes[:dim], f"[{terms}]", *axes[dim + 1 :]])}

    def _stored_name(self, part: _CommonPart) -> str:
        names = self._group.sources[part.source]
        if not self._stacked:
            if len(names) > 1:
                raise self._refused("which are several")
            return escaped(names[0])
        numbers = [NUMBER.findall(name) for name in names]
        # The number that counts the tensors is not in the parameter's name.
        kept, count = NUMBER.findall(self._group.target), [str(k) for k in range(len(names))]
        for at in reversed(range(len(numbers[0]))):
            if all([*found[:at], *found[at + 1 :]] == kept for found in numbers) and [n[at] for n in numbers] == count:
                start, end = list(NUMBER.finditer(names[0]))[at].span()
                return f"{escaped(names[0][:start])}{_HOLE}{escaped(names[0][end:])}"
        raise self._refused("whose numbers do not run from 0")

    def _live_name(self, part: _CommonPart) -> str:
        name = self._group.target
        if part.target:
            name = name.replace(self._targets[0], part.target)
        before, star, after = name.partition("*.")
        return f"{escaped(before)}{_HOLE}.{escaped(after)}" if self._numbered and star else escaped(name)
