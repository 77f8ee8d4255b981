"""What ranks run in the tests of this folder. Each returns plain data."""

from __future__ import annotations

from typing import Any

import torch

import bytecheckpoint
from tests.frameworks.megatron.worlds import Layout, Trainer, code

BEFORE, AFTER = 3, 5


def wrong(report: Any) -> list[str]:
    """What a load should not have to say."""
    return [f"{name}: {found}" for name in ("missing", "unexpected", "cast") if (found := getattr(report, name))]


def tensors(path: Any) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    with bytecheckpoint.open(path) as saved:
        entries = {key: saved[key] for key in saved.keys()}  # noqa: SIM118 - not a dict
        return {key: entry[...] for key, entry in entries.items() if isinstance(entry, bytecheckpoint.Entry)}


def unlike(first: Any, second: Any) -> list[str]:
    """Keys under which two checkpoints hold different tensors, or only one has any."""
    one, other = tensors(first), tensors(second)
    assert len(one) > 50
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in one
        or key not in other
        or one[key].dtype != other[key].dtype
        or not torch.equal(one[key], other[key])
    ]


def start(layout: Layout, path: str) -> None:
    """A checkpoint from which all layouts start, in one process."""
    states = Trainer(layout).states()
    bytecheckpoint.save(path, states)


def train_and_save(layout: Layout, source: str, path: str) -> list[float]:
    """From the start; the losses of the steps after the save, which goes on beside them."""
    trainer = Trainer(layout, seed=4, lr=0.5)
    assert not wrong(bytecheckpoint.load(source, trainer.states(), framework="megatron"))
    trainer.loaded()
    trainer.train(BEFORE)
    handle = bytecheckpoint.save(path, trainer.states(), framework="megatron", async_checkpoint=True)
    losses = trainer.train(AFTER)
    handle.result(120)
    return losses


# --- by coordinates --------------------------------------------------------------------------------------------------


def save_coordinates(layout: Layout, path: str) -> None:
    """Every element of every tensor says which it is; in one process, where all parameters are whole."""
    assert layout.world == 1
    trainer = Trainer(layout)
    trainer.train(1)
    named = {id(p): name for chunk in trainer.bare for name, p in chunk.named_parameters()}
    with torch.no_grad():
        for chunk in trainer.bare:
            for name, parameter in chunk.named_parameters():
                parameter.copy_(code(5, name, parameter.shape))
        for optimizer in trainer.optimizer.chained_optimizers:
            for name, main, state in stepped(optimizer, named):
                if main is not None:
                    main.copy_(code(5, f"{name}/master", main.shape))
                for slot in ("exp_avg", "exp_avg_sq"):
                    state[slot].copy_(code(5, f"{name}/{slot}", state[slot].shape))
                state["step"].fill_(step_of(name))
    bytecheckpoint.save(path, trainer.states())


def step_of(name: str) -> float:
    """A step of each parameter's own."""
    return float(10 + sum(name.encode()) % 50)


def stepped(optimizer: Any, named: dict[int, str]) -> list[tuple[str, torch.Tensor | None, dict[str, Any]]]:
    """(name, master weight, state) of what one optimizer steps, by Megatron's own tables."""
    inner = optimizer.optimizer
    found: list[tuple[str, torch.Tensor | None, dict[str, Any]]] = []
    if hasattr(optimizer, "model_param_group_index_map"):
        for parameter, (group, place) in optimizer.model_param_group_index_map.items():
            tensor = inner.param_groups[group]["params"][place]
            master = None if parameter.dtype == torch.float32 else tensor
            found.append((named[id(parameter)], master, inner.state[tensor]))
        return found
    pairs: dict[int, Any] = {}
    for low, high in zip(
        getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
    ):
        pairs.update((id(main), parameter) for parameter, main in zip(low, high, strict=True))
    for group in inner.param_groups:
        for tensor in group["params"]:
            parameter = pairs.get(id(tensor), tensor)
            master = tensor if id(tensor) in pairs else None
            found.append((named[id(parameter)], master, inner.state[tensor]))
    return found


def pass_on(layout: Layout, sources: dict[str, str], folder: str) -> dict[str, list[str]]:
    """Load and save again, several checkpoints; what went wrong."""
    found: dict[str, list[str]] = {}
    for name, source in sources.items():
        trainer = Trainer(layout, seed=3)
        trainer.train(1)
        found[name] = wrong(bytecheckpoint.load(source, trainer.states()))
        steps = [id(s["step"]) for o in trainer.optimizer.chained_optimizers for s in o.optimizer.state.values()]
        if len(set(steps)) != len(steps):
            found[name].append("parameters share a step")
        bytecheckpoint.save(f"{folder}/{name}", trainer.states())
    return found
