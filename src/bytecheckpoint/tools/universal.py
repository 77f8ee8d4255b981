"""Write a checkpoint in the universal form of DeepSpeed, which it loads at any stage of ZeRO and any number of ranks.

A folder `global_step7` has a file for each state of each parameter, `latest_universal` beside it names the folder:

    global_step7/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step7/zero/optimizer_state.pt                          param groups
    global_step7/mp_rank_00_model_states.pt                       the model as it is, counters, values of the program
    global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt        the same without the model, under the name for stage 3
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.representation.values.codec import leaves_with_paths
from bytecheckpoint.tools.optimizer_states import Parameter, names_beside, parameters_of
from bytecheckpoint.tools.state_dicts import state_dict_of
from bytecheckpoint.tools.torch_files import Advance, Written, write_object, write_torch_file

__all__ = ["Universal", "universal_of"]

#: Version of DeepSpeed whose reading code this module follows.
_VERSION = "0.19.8"
_LATEST = "latest_universal"
#: Objects of an engine, and facts of the run, that DeepSpeed looks for among the values of the program.
_FACTS: Mapping[str, Any] = {
    "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "shared_params": {}, "ds_config": {},
    "ds_version": _VERSION,
}  # fmt: skip
#: Keys of the file of the model that hold no values of the program.
_OWN = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "universal_checkpoint_info", "checkpoint_parallel_dimensions", "dp_world_size", "mp_world_size",
)  # fmt: skip
_SIZES: Mapping[str, Any] = {
    "optimizer": None, "buffer_names": [], "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    "dp_world_size": 1, "mp_world_size": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Universal:
    """A checkpoint that can be written in the universal form.

    Attributes:
        view: the checkpoint.
        parameters: the parameters by name.
        groups: param groups, with the names of their parameters.
        module: the model as it is.
        rest: further content of the file of the model.
        skipped: names of states and values that are left out.
    """

    view: CheckpointView
    parameters: Mapping[str, Parameter]
    groups: list[dict[str, Any]]
    module: Any
    rest: dict[str, Any]
    skipped: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of tensors to read."""
        of_optimizer = (entry for one in self.parameters.values() for entry in (one.weight, *one.slots.values()))
        of_model = (leaf for _, leaf in leaves_with_paths(self.module) if isinstance(leaf, Entry))
        return sum(entry.nbytes for entry in (*of_optimizer, *of_model))

    def write(self, folder: str, advance: Advance) -> Written:
        """Write all files into a new folder."""
        files: list[str] = []
        tag = f"global_step{self.rest['global_steps']}"
        count, done = 0, 0

        def path(*parts: str) -> str:
            files.append("/".join((tag, *parts)))
            found = os.path.join(folder, files[-1])
            os.makedirs(os.path.dirname(found), exist_ok=True)
            return found

        def write(tree: Any, target: str, dtype: torch.dtype | None = None) -> None:
            nonlocal count, done
            written = write_torch_file(self.view, tree, target, lambda n: advance(done + n), dtype)
            count, done = count + written.tensors, done + written.nbytes

        for fqn, one in self.parameters.items():
            write({"param": one.weight}, path("zero", fqn, "fp32.pt"), torch.float32)
            for slot, entry in one.slots.items():
                write({"param": entry}, path("zero", fqn, f"{slot}.pt"))
            if one.step is not None:
                write_object(one.step, path("zero", fqn, "step.pt"))
        numbered = [{**group, "params": [k]} for k, group in enumerate(self.groups)]
        first = next(iter(self.parameters.values())).step
        common = {
            "zero_stage": 1,  # the form of param groups that our reader expects; DeepSpeed does not look at it
            "ds_version": self.rest["ds_version"],
            "param_groups": numbered,
            "optimizer_state_dict": {"state": {0: {"step": first}}, "param_groups": numbered},  # for stage 3
        }
        write_object(common, path("zero", "optimizer_state.pt"))
        shapes = [{fqn: self.parameters[fqn].weight.shape for fqn in group["params"]} for group in self.groups]
        content = {"module": {}, "param_shapes": shapes, **self.rest}
        write(content, path("zero_pp_rank_0_mp_rank_00_model_states.pt"))
        write({**content, "module": self.module}, path("mp_rank_00_model_states.pt"))
        with open(os.path.join(folder, _LATEST), "w") as file:
            file.write(tag)
        return Written([*files, _LATEST], count, done)


def universal_of(view: CheckpointView, model: str) -> Universal:
    """Return a checkpoint as the universal form holds it: a model, its optimizer and its engine as a save names them.

    Raises:
        UsageError: there is no such model, or no optimizer for it.
        IncompatibleCheckpointError: the form cannot hold the state of the optimizer; the message says why.
    """
    optimizer, engine = names_beside(model)
    parameters, groups = parameters_of(view, model, optimizer, "DeepSpeed")
    for fqn in parameters:
        if any(part in ("", ".", "..") for part in fqn.split("/")):
            raise IncompatibleCheckpointError(f"{view.path}: {fqn!r} is no name of a file")
    rest, skipped = _rest(view, (model, optimizer), engine)
    step = max((float(one.step) for one in parameters.values() if one.step is not None), default=0)
    counters = {"global_steps": int(step), "global_samples": 0, "skipped_steps": 0}
    rest = {**_FACTS, **counters, **rest, **_SIZES}
    return Universal(view, parameters, groups, state_dict_of(view, model), rest, skipped)


def _rest(view: CheckpointView, left_out: Sequence[str], engine: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the program and of the engine, and the names of those that DeepSpeed cannot take."""
    others = {
        state: state_dict_of(view, state)
        for state in view.states
        if state not in left_out and not view.has_streams(state)
    }
    skipped = [state for state in view.states if view.has_streams(state)]
    of_engine = others.pop(engine, None) or {}
    for key in ("loss_scale", "grad_scaler"):  # objects of classes
        if of_engine.pop(key, None) is not None:
            skipped.append(f"{engine}/{key}")
    extra = others.pop("extra_states", {})
    rest = {**others, **(extra if isinstance(extra, dict) else {"extra_states": extra})}
    taken = sorted(set(_OWN) & rest.keys())
    if taken and not view.catalog.is_foreign:  # those of a folder of DeepSpeed are written anew
        raise IncompatibleCheckpointError(f"{view.path}: DeepSpeed has other meanings for the names {listed(taken)}")
    return {key: value for key, value in {**rest, **of_engine}.items() if key not in _OWN}, skipped
