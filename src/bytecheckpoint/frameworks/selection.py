"""The part of the states that a call saves or loads: `include=` and `exclude=`, patterns over names.

A name is spelled as `bytecheckpoint.open` spells it, "<state>/FQN". A pattern has the wildcards of `fnmatch` (`*`, `?`,
`[...]`; `*` stands for dots and slashes too) and is case sensitive. These are the names of

- a parameter, buffer or extra state of a module, or a tensor in a dict that is "model" or "optimizer": "<state>/FQN";
- the optimizer state of a parameter, as a whole: "<state>/FQN" and "<state>/state/FQN/";
- any other state, as a whole, and the plain values in a dict that is "model" or "optimizer": "<state>/".

A pattern that matches a state alone ("scheduler", "optim*") matches all of its names.
"""

from __future__ import annotations

import collections
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.optimizer_tree import is_optimizer_tree
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.representation.shards import LiveState, TensorKey
from bytecheckpoint.representation.similar_names import SimilarNames
from bytecheckpoint.representation.values.codec import TensorRef, decode, encode

__all__ = ["NameSelection", "SelectionReport", "check_selections", "select_states"]

_WILDCARD = re.compile(r"[*?\[]")
_MOST_SIMILAR = 3


class SelectionReport(msgspec.Struct, frozen=True):
    """A rank's selection, for comparison with those of the other ranks.

    Attributes:
        include: patterns of the names to select; None selects everything.
        exclude: patterns of the names to leave out.
        matched: one bool per pattern, those of `include` first: True if the pattern matches a name of this rank.
        similar: names of this rank like each pattern; empty if the pattern matches, or without a search.
    """

    include: list[str] | None = None
    exclude: list[str] = []
    matched: list[bool] = []
    similar: list[list[str]] = []


class NameSelection:
    """Decide by patterns which names a call selects, and remember which patterns have matched.

    Args:
        include: patterns of the names to select; None selects all.
        exclude: patterns of names that are not selected.

    Attributes:
        active: True if any name may be left out.
    """

    def __init__(self, include: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> None:
        self.active = include is not None or bool(exclude)
        self._include = None if include is None else list(include)
        self._exclude = list(exclude)
        self._included = None if include is None else _compiled(include)
        self._excluded = _compiled(exclude) if exclude else None
        self._unmatched = {pattern: _compiled([pattern]) for pattern in self._patterns}
        self._known: dict[tuple[str, str, bool], bool] = {}

    @property
    def _patterns(self) -> list[str]:
        return [*(self._include or ()), *self._exclude]

    def takes(self, state_name: str, fqn: str = "", *, parameter: bool = False) -> bool:
        """Return whether a name is selected.

        Args:
            state_name: name of the state.
            fqn: FQN of a tensor or extra state; "" for the state as a whole.
            parameter: the name stands for the optimizer state of that parameter.
        """
        if not self.active:
            return True
        found = self._known.get((state_name, fqn, parameter))
        if found is None:
            names = [f"{state_name}/{fqn}", state_name]
            if parameter:
                names += [f"{state_name}/state/{fqn}/", f"{state_name}/state/{fqn}"]
            self._note_matches(names)
            found = self._included is None or any(map(self._included.match, names))
            found = found and not (self._excluded is not None and any(map(self._excluded.match, names)))
            self._known[state_name, fqn, parameter] = found
        return found

    def takes_any(self, key: TensorKey, aliases: Sequence[str] = ()) -> bool:
        """Return whether a tensor is selected: by any of its names."""
        # All are asked: each may match a pattern.
        taken = [fqn for fqn in (key.fqn, *aliases) if self.takes(key.state, fqn, parameter=bool(key.slot))]
        return bool(taken)

    def may_take(self, state_name: str) -> bool:
        """Return whether some name of the state may be selected, without knowing its names."""
        start = f"{state_name}/"
        literals = (_WILDCARD.split(pattern, 1)[0] for pattern in self._include or ("",))
        return any(start.startswith(literal) or literal.startswith(start) for literal in literals)

    def takes_all_of(self, state_name: str) -> bool:
        """Return whether the patterns select a whole state for sure."""
        start = f"{state_name}/"
        literals = (_WILDCARD.split(pattern, 1)[0] for pattern in self._exclude)
        if any(start.startswith(literal) or literal.startswith(start) for literal in literals):
            return False
        return self._include is None or bool({state_name, f"{start}*", "*"} & {*self._include})

    @property
    def unmatched(self) -> list[str]:
        """The patterns that have matched no name yet."""
        return list(self._unmatched)

    def report(self, *, look_for_similar: bool = False) -> SelectionReport:
        """Describe the selection, after `takes` was asked for all names of this rank.

        Args:
            look_for_similar: look for names like the patterns that match nothing.
        """
        if not self.active:
            return SelectionReport()
        similar: list[list[str]] = [[] for _ in self._patterns]
        if look_for_similar and self._unmatched:
            names = SimilarNames(f"{state_name}/{fqn}" if fqn else state_name for state_name, fqn, _ in self._known)
            for number, pattern in enumerate(self._patterns):
                if pattern in self._unmatched:
                    similar[number] = [escape(name) for name in names.of(pattern, _MOST_SIMILAR, 0.0)]
        return SelectionReport(
            None if self._include is None else list(map(escape, self._include)),
            list(map(escape, self._exclude)),
            [pattern not in self._unmatched for pattern in self._patterns],
            similar,
        )

    def _note_matches(self, names: Sequence[str]) -> None:
        if self._unmatched:
            matched = [p for p, compiled in self._unmatched.items() if any(map(compiled.match, names))]
            for pattern in matched:
                del self._unmatched[pattern]


def _compiled(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)))


def check_selections(reports: Sequence[SelectionReport]) -> None:
    """Refuse selections that differ between ranks, and a pattern that matches nothing on any rank.

    Args:
        reports: selections of all ranks, in order of rank.

    Raises:
        UsageError: selections differ, or a pattern matches nothing; names like the pattern are in the message.
    """
    first = reports[0]
    for rank, report in enumerate(reports):
        for argument in ("include", "exclude"):
            own, other = getattr(first, argument), getattr(report, argument)
            if own != other:
                raise UsageError(
                    f"ranks select different parts: rank 0 has {argument}={own}, rank {rank} {argument}={other}; give all "
                    "ranks the same patterns (those that match nothing on a rank do no harm there)"
                )
    for number, (argument, pattern) in enumerate(
        [*(("include", p) for p in first.include or ()), *(("exclude", p) for p in first.exclude)]
    ):
        if any(report.matched[number] for report in reports):
            continue
        every = SimilarNames(unescape(name) for report in reports for name in report.similar[number])
        similar = every.of(pattern, _MOST_SIMILAR, 0.0)
        hint = f"names like it: {', '.join(map(repr, similar))}"
        raise UsageError(
            f"{argument}: the pattern {unescape(pattern)!r} matches no name on any rank; "
            + (hint if similar else "names are spelled as bytecheckpoint.open spells them, 'state/FQN'")
        )


_LEFT_OUT = object()
_ANY_SLOT = "state"  # the state of a parameter is selected as a whole


def select_states(states: Sequence[LiveState], selection: NameSelection) -> Sequence[LiveState]:
    """Reduce captured states, in place, to what `selection` selects; return them.

    Raises:
        UsageError: the selection would leave out a part of a list or an object.
    """
    if selection.active:
        for state in states:
            _select(state, selection)
    return states


def _select(state: LiveState, selection: NameSelection) -> None:
    takes_rest = selection.takes(state.name)
    if state.stream_count and not takes_rest:
        state.streams, state.stream_count, state.tree = [], 0, None
    if state.stream_count:
        return
    if not state.merged:
        if not takes_rest:
            state.shards, state.tree, state.provider = [], None, None
        return
    tree = None if state.tree is None else decode(state.tree, on_tensor=TensorRef)
    if is_optimizer_tree(tree):
        assert isinstance(tree, dict)
        _select_optimizer_tree(state, tree, selection, takes_rest=takes_rest)
    elif state.entries:
        assert isinstance(tree, dict | None)
        _select_entries(state, tree or {}, selection)
        return
    elif takes_rest and tree is not None:
        tree = _without_tensors(state.name, tree, selection)
        state.tree = None if tree is _LEFT_OUT else _encoded(tree)
        _refuse_parts(state, selection)
    else:
        state.tree = None
    state.shards = [shard for shard in state.shards if selection.takes_any(shard.key, shard.aliases)]


def _select_optimizer_tree(
    state: LiveState, tree: dict[str, Any], selection: NameSelection, *, takes_rest: bool
) -> None:
    """Reduce a tree (`optimizers/tree.py`) to the selected parameters; other values go with any of them."""
    aliases: Mapping[str, Sequence[str]] = tree["aliases"]

    def taken(fqn: str) -> bool:
        return selection.takes_any(TensorKey(state.name, fqn, _ANY_SLOT), aliases.get(fqn, ()))

    groups = [{**group, "params": [fqn for fqn in group["params"] if taken(fqn)]} for group in tree["groups"]]
    if groups == tree["groups"] and (groups or takes_rest):
        return
    tree["groups"] = [group for group in groups if group["params"]]
    for part in ("state", "aliases"):
        tree[part] = {fqn: values for fqn, values in tree[part].items() if taken(fqn)}
    state.tree = _encoded(tree) if tree["groups"] else None


def _select_entries(state: LiveState, tree: dict[str, Any], selection: NameSelection) -> None:
    """Reduce the extra states of modules to the selected ones, with the tensors in them."""
    kept = {fqn: value for fqn, value in tree.items() if selection.takes(state.name, fqn)}
    inside, kept_inside = _references(_encoded(tree)), _references(_encoded(kept))
    state.tree = _encoded(kept) if kept else None
    state.shards = [
        shard
        for shard in state.shards
        if (shard.key.fqn in kept_inside if shard.key.fqn in inside else selection.takes_any(shard.key, shard.aliases))
    ]


def _without_tensors(state_name: str, value: Any, selection: NameSelection) -> Any:
    """Return `value` without the tensors in its dicts that are not selected."""
    if isinstance(value, TensorRef):
        return value if selection.takes(state_name, value.name) else _LEFT_OUT
    if type(value) in (dict, collections.OrderedDict):
        pairs = [(key, _without_tensors(state_name, item, selection)) for key, item in value.items()]
        return type(value)((key, item) for key, item in pairs if item is not _LEFT_OUT)
    if type(value) in (list, tuple):
        items = [_without_tensors(state_name, item, selection) for item in value]
        # A list of fewer items would be another one: the tensor stays in it, and is refused below.
        return type(value)(old if new is _LEFT_OUT else new for old, new in zip(value, items, strict=True))
    return value


def _refuse_parts(state: LiveState, selection: NameSelection) -> None:
    for name in _references(state.tree) if state.tree is not None else ():
        if not selection.takes(state.name, name):
            raise UsageError(
                f"{state.name}/{name} is not selected and lies in a list, or in an object, that is: "
                "leave out all of that, or nothing"
            )


def _references(tree: bytes) -> set[str]:
    """Return the names of the tensors to which a tree refers."""
    found: set[str] = set()
    decode(tree, on_tensor=found.add)
    return found


def _encoded(tree: Any) -> bytes:
    return encode(tree, on_tensor=_no_tensor)


def _no_tensor(path: tuple[object, ...], tensor: object) -> str:
    raise AssertionError("decoded trees refer to tensors by name")
