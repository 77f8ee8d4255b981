"""Names of tensors in checkpoints of Megatron-Core, and which of them a group of hyperparameters has.

Megatron stacks the layers of a model and the experts of a layer, and does not save which parameters a group has.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import listed
from bytecheckpoint.formats.foreign import ForeignColumns
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.representation.values.tree import TensorRef

__all__ = [
    "EXPERT", "LAYER", "PARAM", "SLOTS", "STEP", "NamedGroups", "add_steps", "block_of", "is_of_expert", "model_or_slot",
    "named_groups", "other_names", "param_groups", "place_in_stack", "settings_of", "unstacked",
]  # fmt: skip

_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
"""Place in a name with the number of a layer."""
_EXPERTS = re.compile(r"(?:^|\.)experts\.experts\.")
EXPERT: Final = re.compile(r"\.local_experts\.(\d{1,9})\.")
"""Place in a name with the number of an expert."""
PARAM: Final = "param"
"""Slot of the masters of parameters in Megatron's optimizers."""
STEP: Final = "step"
"""Slot of the number of steps of a parameter, and setting of a group that has one."""
#: The same and another name of it, and the name elsewhere.
SLOTS: Final = {PARAM: "fp32", "fp32_param": "fp32"}
#: Slot that Adam has, and Muon and SGD have not.
_MOMENT: Final = "exp_avg"
#: Names of the parameters that may have a learning rate of their own.
_ENDS: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
#: Name of the file of steps, which no folder holds.
_STEPS: Final = f"{VALUES_NAME}-steps"
#: Settings of a param group that say which parameters it has, and are no hyperparameters of the optimizer inside.
_OWN_SETTINGS: Final = ("params", "param_names", "is_expert_parallel", STEP)
#: Names of norms before a linear layer, and inside of it, where Transformer Engine has them.
_NORMS: Final = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def other_names(fqn: str) -> Iterator[str]:
    """Yield the name that a norm has with Transformer Engine, or without it."""
    for one, other in (*_NORMS.items(), *((inside, before) for before, inside in _NORMS.items())):
        if one in fqn:
            yield fqn.replace(one, other)


def model_or_slot(name: str) -> tuple[str, str]:
    """Return the slot of the optimizer that a tensor is, "" for one of the model, and the parameter's name."""
    found = _SLOT.fullmatch(name)
    return (SLOTS.get(found[1], found[1]), found[2]) if found else ("", name)


def unstacked(key: str) -> tuple[str, int]:
    """Return the pattern of the names of a stacked tensor's parts, and the number of its stacked dimensions.

    >>> unstacked("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ('decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight', 2)
    """
    template, depth = key.replace("{", "{{").replace("}", "}}"), 0
    if found := _LAYERS.search(template):
        template, depth = f"{template[: found.end()]}{{}}.{template[found.end() :]}", 1
    if found := _EXPERTS.search(template):
        begin = found.end() - len("experts.")
        template, depth = f"{template[:begin]}local_experts.{{}}.{template[found.end() :]}", depth + 1
    return template, depth


def place_in_stack(fqn: str, by_layer: bool) -> tuple[str, tuple[int, ...]]:
    """Return the name of the stacked tensor of which a tensor is a part, and the place there: layer, expert.

    Args:
        fqn: name of a tensor.
        by_layer: true if layers are stacked; experts always are.

    >>> place_in_stack("decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight", by_layer=True)
    ('decoder.layers.mlp.experts.experts.linear_fc1.weight', (3, 12))
    """
    at: list[int] = []
    if by_layer and (found := LAYER.search(fqn)):
        fqn = f"{fqn[: found.start(1)]}{fqn[found.end() :]}"
        at.append(int(found[1]))
    if found := EXPERT.search(fqn):
        fqn = f"{fqn[: found.start()]}.experts.{fqn[found.end() :]}"
        at.append(int(found[1]))
    return fqn, tuple(at)


def block_of(fqn: str) -> str | None:
    """Return the beginning of a tensor's name that is the same for all layers of a model, None for a tensor of no layer.

    >>> block_of("decoder.layers.3.mlp.linear_fc1.weight")
    'decoder.layers.'
    """
    found = LAYER.search(fqn)
    return None if found is None else fqn[: found.start(1)]


def is_of_expert(fqn: str) -> bool:
    """Return whether a tensor is one of routed experts, in any form in which Megatron has them."""
    return ".experts." in fqn


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group that the optimizer inside knows."""
    return {key: value for key, value in group.items() if key not in _OWN_SETTINGS}


@dataclass(frozen=True, slots=True)
class NamedGroups:
    """Groups with the names of their parameters.

    Attributes:
        groups: the groups.
        steps: number of steps of each parameter with state, if its group has one; without a distributed optimizer, a
            tensor of a file.
        notes: facts that a user should know.
        undecided: that one of them which names parameters in no group, if there is one.
    """

    groups: list[dict[str, Any]]
    steps: dict[str, Any]
    notes: list[str]
    undecided: list[str]


def named_groups(
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[str, Container[str]],
    args: Mapping[str, Any],
) -> NamedGroups:
    """Return the groups with their parameters.

    Megatron's rule is that vectors and biases have no weight decay, and that experts have groups of their own, as have
    embedding and head with a decoupled learning rate. Beside Muon, Adam steps some of the parameters, which then have its
    moments. A parameter for which that leaves several groups is in none.

    Args:
        groups: hyperparameters of the groups.
        shapes: shapes of the parameters, by name.
        states: slots of the parameters, by name.
        args: arguments of the training program, {} if nothing says them.
    """
    named: list[dict[str, Any]] = [{**settings_of(group), "params": []} for group in groups]
    free: list[str] = []
    steps: dict[str, Any] = {}
    with_experts = any(group.get("is_expert_parallel") for group in groups)
    decayed_norms = args.get("apply_wd_to_qk_layernorm")
    of_ends = [k for k, group in enumerate(groups) if _is_decoupled(group, args)]
    for fqn, shape in shapes.items():
        is_vector = (len(shape) == 1 or fqn.endswith(".bias")) and not (decayed_norms and _is_qk_norm(fqn))
        is_expert = with_experts and is_of_expert(fqn)
        chosen = [k for k, group in enumerate(groups) if bool(group.get("is_expert_parallel")) == is_expert]
        if len(chosen) > 1:
            chosen = [k for k in chosen if ("betas" in groups[k]) == (_MOMENT in states.get(fqn, ()))] or chosen
        if len(chosen) > 1:
            chosen = [k for k in chosen if (groups[k].get("wd_mult", 1) == 0) == is_vector]
        if len(chosen) > 1:
            chosen = [k for k in chosen if (k in of_ends) == (fqn in _ENDS)]
        if len(chosen) != 1:
            free.append(fqn)
            continue
        named[chosen[0]]["params"].append(fqn)
        if (step := groups[chosen[0]].get(STEP)) is not None and states.get(fqn):
            steps[fqn] = step
    notes = []
    if decayed_norms is None and len(groups) > 1 and any(map(_is_qk_norm, shapes)):
        notes.append(
            "nothing says whether the norms of queries and keys have weight decay: they are taken to have none"
        )
    undecided = []
    if free:
        text = f"which of {len(groups)} groups of hyperparameters {len(free)} parameters have: {listed(free)}"
        undecided = [f"nothing says {text}"]
    return NamedGroups(named, steps, notes + undecided, undecided)


def add_steps(
    columns: ForeignColumns, states: Mapping[str, dict[str, Any]], steps: Mapping[str, Any]
) -> dict[str, bytes]:
    """Add a step for each parameter, as torch's optimizers have: Megatron saves one for a group. Return the file."""
    stored = {fqn: step for fqn, step in steps.items() if type(step) is StoredTensor}
    numbers = {fqn: float(step) for fqn, step in steps.items() if fqn not in stored}
    data = np.fromiter(numbers.values(), "<f4", len(numbers)).tobytes()
    file = columns.add_file(_STEPS, len(data)) if numbers else 0
    for k, fqn in enumerate((*numbers, *stored)):
        states[fqn][STEP] = TensorRef(name := f"state.{fqn}.{STEP}")
        if fqn in stored:
            columns.add_whole("optimizer", {name: stored[fqn]})
        else:
            columns.rows.append((columns.add_tensor("optimizer", name, "float32", ()), (), (), file, 4 * k, ()))
    return {_STEPS: data} if numbers else {}


def _is_decoupled(group: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    """Return whether a group has the learning rate of embedding and head; newer groups say only which rate they have."""
    rate = None if group.get("default_config", True) or args.get("use_mup") else args.get("decoupled_lr")
    return bool(group.get("is_decoupled_lr")) or (rate is not None and group.get("max_lr") == rate)


def _is_qk_norm(fqn: str) -> bool:
    return "q_layernorm." in fqn or "k_layernorm." in fqn


def param_groups(value: Any) -> list[dict[str, Any]]:
    """Return the param groups in an optimizer's tree, those of all chained optimizers, each once."""
    groups: list[dict[str, Any]] = []
    waiting = [value]
    while waiting:
        found = waiting.pop(0)
        found = dict(enumerate(found)) if type(found) is list else found
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
