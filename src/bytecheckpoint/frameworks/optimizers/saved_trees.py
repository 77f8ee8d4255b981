"""The saved trees of all ranks' optimizers, read as one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, listed
from bytecheckpoint.frameworks.base import ParameterName, SavedStates
from bytecheckpoint.frameworks.objects.classes import HeldClasses
from bytecheckpoint.frameworks.optimizer_tree import is_optimizer_tree
from bytecheckpoint.frameworks.optimizers.names import ParamGroup
from bytecheckpoint.frameworks.optimizers.renaming import renamed_trees
from bytecheckpoint.frameworks.optimizers.state_dtypes import StateDtypes
from bytecheckpoint.frameworks.optimizers.state_memory import allocate_state
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import decode, naming_file
from bytecheckpoint.representation.values.tree import parse_state_reference

__all__ = ["SavedTrees"]

_Found = TypeVar("_Found")


@dataclass(slots=True)
class MergedTrees:
    """The contents of several trees.

    Attributes:
        groups: saved param groups that have the parameter or a replica of it, by saved FQN; each with the number of its
            tree in the order of reading.
        values: state that is not plain tensors, by saved FQN.
        fqn_of_alias: saved FQN by alias.
        globals: state that belongs to no parameter, one dict per optimizer.
        own_values: further entries of the optimizers' state_dicts, one dict per optimizer, or none at all.
        optimizer_types: names of the types of all optimizers.
        group_sizes: number of parameters of each group in the first tree.
    """

    groups: dict[str, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    values: dict[str, dict[Any, Any]] = field(default_factory=dict)
    fqn_of_alias: dict[str, str] = field(default_factory=dict)
    globals: list[dict[Any, Any]] = field(default_factory=list)
    own_values: list[dict[str, Any]] = field(default_factory=list)
    optimizer_types: set[str] = field(default_factory=set)
    group_sizes: list[int] = field(default_factory=list)


class SavedTrees:
    """The trees of all ranks as one: hyperparameters and plain state by parameter name, this rank's own tree first.

    Trees that are complete are read until every live parameter is found. Those of other pipeline stages, or of ranks
    that stepped other parameters, are not read.

    Args:
        state_name: name of the state.
        saved: the checkpoint.
        live: the param groups to find.

    Attributes:
        merged: contents of the trees that were read.
        dtypes: choice of the dtypes of the loaded state.
        nested: memory for tensors inside containers, for the parameters of this rank, by saved (FQN, slot).
    """

    def __init__(self, state_name: str, saved: SavedStates, live: Sequence[ParamGroup]) -> None:
        self.merged = MergedTrees()
        names = [(fqn, *aliases) for group in live for fqn, aliases in group.names]
        self.dtypes = StateDtypes(state_name, saved, self.merged.optimizer_types, names)
        self.nested: dict[tuple[str, str], torch.Tensor] = {}
        self._state_name = state_name
        self._saved = saved
        self._live = live
        holders = [(group.live, dict(group.optimizer.state)) for group in live]
        self._classes = HeldClasses(holders, pickled=saved.is_foreign)
        self._taken: set[int] = set()  # ids of the values that a parameter has got
        self._live_parameters: dict[str, tuple[torch.Tensor, Optimizer]] | None = None  # by saved name
        missing = [name for group in live for name in group.names if self._names(*name)]
        all_names = [name for fqn, aliases in missing for name in (fqn, *aliases)]
        if not missing and not saved.names_of(state_name, ("",)):
            return  # the load selects nothing of this state
        for position, tree in enumerate(self._read_all(all_names)):
            for group in tree["groups"]:
                for fqn in group["params"]:
                    self.merged.groups.setdefault(fqn, []).append((position, group))
            for fqn, values in tree["state"].items():
                self.merged.values.setdefault(fqn, values)
            if position == 0:
                self.merged.globals, self.merged.own_values = tree["globals"], tree.get("own", [])
                self.merged.group_sizes = [len(group["params"]) for group in tree["groups"]]
            if tree.get("complete", False):
                missing = [name for name in missing if not self.knows(name)]
                if not missing:
                    break

    def _read_all(self, names: Sequence[str]) -> Iterator[Any]:
        """Read the trees as they are asked for; through a layout all of them at once, under the names that it shows."""
        trees = map(self._read, self._saved.trees_about(self._state_name, names))
        shown = self._saved.shown_names
        if not shown:
            return trees
        renamed = renamed_trees(self._state_name, list(trees), shown)
        for tree in renamed:
            self._note_aliases(tree)
        return iter(renamed)

    def _note_aliases(self, tree: Any) -> None:
        for fqn, aliases in tree["aliases"].items():
            self.merged.fqn_of_alias.update(dict.fromkeys(aliases, fqn))

    def _read(self, blob: bytes) -> Any:
        """Decode a tree, and note its optimizers and aliases."""
        references: list[str] = []
        tree: Any = decode(blob, on_tensor=partial(_note_reference, references), on_unregistered=self._classes)
        with naming_file(blob):
            if not is_optimizer_tree(tree):
                what = f"a dict of {listed([*tree])}" if type(tree) is dict else type(tree).__name__
                raise IncompatibleCheckpointError(
                    f"{self._state_name} was saved as {what}, which has not the form of an optimizer: load it into a dict, "
                    "and give that to load_state_dict"
                )
        self.merged.optimizer_types.update(tree["optimizers"])
        if references and self._saved.shown_names:
            raise IncompatibleCheckpointError(
                f"{self._state_name} has tensors inside of values of a parameter ({listed(references)}), which follow no "
                "elements: load the optimizer without a layout, or leave it out"
            )
        self._note_aliases(tree)
        # The aliases are known now: decode again, with memory in place of the tensors.
        return decode(blob, on_tensor=self._memory, on_unregistered=self._classes) if references else tree

    def _memory(self, reference: str) -> torch.Tensor | None:
        fqn, slot = parse_state_reference(reference)
        if (fqn, slot) not in self.nested:
            live = self._live_parameter(fqn)
            found = self._saved.stored(TensorKey(self._state_name, fqn, slot))
            if found is None:
                raise CorruptCheckpointError(
                    f"the values of {self._state_name} refer to {reference!r}, which the catalog lacks"
                )
            if live is None:
                return None
            parameter, optimizer = live
            dtype = self.dtypes.choose(found, optimizer, tuple(parameter.shape), parameter.dtype, None, on_device=False)
            self.nested[fqn, slot] = allocate_state(found, parameter, dtype, on_device=False)
        return self.nested[fqn, slot]

    def _live_parameter(self, saved_fqn: str) -> tuple[torch.Tensor, Optimizer] | None:
        if self._live_parameters is None:
            self._live_parameters = {
                saved: (parameter, group.optimizer)
                for group in self._live
                for parameter, (fqn, aliases) in zip(group.params, group.names, strict=True)
                for name in self._names(fqn, aliases)
                for saved in (name, self.merged.fqn_of_alias.get(name, name))
            }
        return self._live_parameters.get(saved_fqn)

    def knows(self, name: ParameterName) -> bool:
        """Return whether a saved param group has the parameter."""
        return bool(self._by_name(self.merged.groups, *name))

    def groups_of(self, group: ParamGroup) -> list[list[dict[str, Any]]]:
        """Return for each parameter of a live group the saved groups that its hyperparameters come from.

        A parameter has at most one, unless it had replicas in several saved groups. Then it is the group that has
        other parameters of the live group too, else the one of the replica with the same number. All of them, if the
        number of replicas differs.
        """
        named = [self._by_name(self.merged.groups, *name) or [] for name in group.names]
        sole = {id(found[0][1]) for found in named if len(found) == 1}
        return [
            [saved for _, saved in found] if len(found) < 2 else self._groups_of_replica(found, sole, name, number)
            for found, name, number in zip(named, group.names, group.copies, strict=True)
        ]

    def _groups_of_replica(
        self, found: list[tuple[int, dict[str, Any]]], sole: set[int], name: ParameterName, number: int
    ) -> list[dict[str, Any]]:
        for _, saved in found:
            if id(saved) in sole:
                return [saved]
        # Other trees describe replicas on other ranks.
        own = [saved for tree, saved in found if tree == found[0][0]]
        live = sum(fqn == name[0] for group in self._live for fqn, _ in group.names)
        return [own[number]] if len(own) == live else own

    def values_of(self, fqn: str, aliases: tuple[str, ...]) -> dict[Any, Any]:
        """Return the saved state of a parameter that is not plain tensors."""
        return self._by_name(self.merged.values, fqn, aliases) or {}

    def take_values(
        self, fqn: str, aliases: tuple[str, ...]
    ) -> tuple[dict[Any, Any], Mapping[tuple[str, str], torch.Tensor]]:
        """Return `values_of` a parameter and `nested`; for a further replica of the parameter, copies of both."""
        values = self.values_of(fqn, aliases)
        if id(values) not in self._taken:
            self._taken.add(id(values))
            return values, self.nested
        copies: dict[int, Any] = {}
        values = copy.deepcopy(values, copies)
        return values, {key: copies[id(tensor)] for key, tensor in self.nested.items() if id(tensor) in copies}

    def _by_name(self, table: Mapping[str, _Found], fqn: str, aliases: tuple[str, ...]) -> _Found | None:
        for name in self._names(fqn, aliases):
            found = table.get(name) or table.get(self.merged.fqn_of_alias.get(name, name))
            if found is not None:
                return found
        return None

    def _names(self, fqn: str, aliases: tuple[str, ...]) -> Sequence[str]:
        """Return the checkpoint's names of a live parameter; none if the load does not select it."""
        return self._saved.names_of(self._state_name, (fqn, *aliases), parameter=True)


def _note_reference(references: list[str], name: str) -> None:
    references.append(name)
