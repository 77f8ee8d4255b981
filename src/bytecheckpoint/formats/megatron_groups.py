"""The groups of hyperparameters in checkpoints of Megatron-Core, which do not say which parameters a group has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bytecheckpoint.errors import listed
from bytecheckpoint.formats.megatron_names import EXPERT

__all__ = ["NamedGroups", "named_groups", "param_groups"]

#: Settings of a param group that say which parameters it has, and are no hyperparameters of the optimizer inside.
_OWN_SETTINGS: Final = ("params", "param_names", "is_expert_parallel", "step")


@dataclass(frozen=True, slots=True)
class NamedGroups:
    """Groups with the names of their parameters.

    Attributes:
        groups: the groups.
        steps: number of steps of each parameter whose group has one.
        notes: facts that a user should know.
    """

    groups: list[dict[str, Any]]
    steps: dict[str, float]
    notes: list[str]


def named_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], decayed_norms: object
) -> NamedGroups:
    """Return the groups with their parameters.

    Megatron's rule is that vectors and biases have no weight decay, and that experts have groups of their own. A parameter
    for which that leaves several groups is in none.

    Args:
        groups: hyperparameters of the groups.
        shapes: shapes of the parameters, by name.
        decayed_norms: true if the norms of queries and keys have weight decay; None if nothing says it.
    """
    named: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key not in _OWN_SETTINGS}, "params": []} for group in groups
    ]
    undecided: list[str] = []
    steps: dict[str, float] = {}
    with_experts = any(group.get("is_expert_parallel") for group in groups)
    for fqn, shape in shapes.items():
        is_vector = (len(shape) == 1 or fqn.endswith(".bias")) and not (decayed_norms and _is_qk_norm(fqn))
        is_expert = with_experts and EXPERT.search(fqn) is not None
        chosen = [k for k, group in enumerate(groups) if bool(group.get("is_expert_parallel")) == is_expert]
        if len(chosen) > 1:
            chosen = [k for k in chosen if (groups[k].get("wd_mult", 1) == 0) == is_vector]
        if len(chosen) != 1:
            undecided.append(fqn)
            continue
        named[chosen[0]]["params"].append(fqn)
        if (step := groups[chosen[0]].get("step")) is not None:
            steps[fqn] = float(step)
    notes = []
    if decayed_norms is None and len(groups) > 1 and any(map(_is_qk_norm, shapes)):
        notes.append(
            "nothing says whether the norms of queries and keys have weight decay: they are taken to have none"
        )
    if undecided:
        notes.append(
            f"nothing says which of {len(groups)} groups of hyperparameters {len(undecided)} parameters have: "
            f"{listed(undecided)}"
        )
    return NamedGroups(named, steps, notes)


def _is_qk_norm(fqn: str) -> bool:
    return "q_layernorm." in fqn or "k_layernorm." in fqn


def param_groups(value: Any) -> list[dict[str, Any]]:
    """Return the param groups in an optimizer's tree, those of all chained optimizers, each once."""
    groups: list[dict[str, Any]] = []
    waiting = [value]
    while waiting:
        found = waiting.pop(0)
        if type(found) is not dict:
            continue
        step = (found.get("state") or {}).get("common_step") if type(found.get("state")) is dict else None
        for group in found.get("param_groups") or ():
            whole = {"step": step, **group}
            settings = {key: whole[key] for key in whole if key not in ("params", "param_names")}
            if settings not in groups:
                groups.append(settings)
        waiting += [item for key, item in found.items() if key not in ("param_groups", "state")]
    return groups
