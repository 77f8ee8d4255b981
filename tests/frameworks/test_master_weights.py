"""Master weights: which parameters are loaded from them, and which optimizers hold them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.frameworks.optimizers.capture import capture_optimizers
from bytecheckpoint.frameworks.optimizers.master_weights import optimizer_state_name
from bytecheckpoint.frameworks.optimizers.names import ParameterNames
from bytecheckpoint.frameworks.optimizers.view import optimizer_view, placeholder_parameter
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, flat_range_shards
from bytecheckpoint.representation.shards import MASTER, LiveState, TensorKey
from tests.frameworks.fsdp1_worlds import as_rank, fill, unit
from tests.frameworks.memory import MemoryCheckpoint, detached, save

SHAPE = (5, 3)
EXACT = torch.arange(15.0).reshape(SHAPE) / 3 + 1
ROUNDED = EXACT.to(torch.bfloat16)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))


def engine_checkpoint(
    model: str = "model", optimizer: str = "optimizer", optimizer_type: str = "Engine"
) -> MemoryCheckpoint:
    """Save a low-precision engine of two ranks: the model on both, the optimizer in flat halves."""
    ranks: list[list[LiveState]] = []
    for start, count in ((0, 8), (8, 7)):
        module = Model(torch.bfloat16)
        module.weight.data.copy_(ROUNDED)
        view = optimizer_view(optimizer_type)
        whole = placeholder_parameter(SHAPE, module.weight)
        view.param_groups.append({"params": [whole], "lr": 0.5})
        view.state[whole] = {"step": torch.tensor(7.0)}
        state = capture_optimizers(optimizer, [view], ParameterNames({id(whole): ("weight", ())}))
        flats = {MASTER: EXACT, "exp_avg": EXACT * 2, "exp_avg_sq": EXACT * 3}
        state.shards += flat_range_shards(
            [
                FlatRange(TensorKey(optimizer, "weight", slot), SHAPE, start, value.flatten(), start, count)
                for slot, value in flats.items()
            ]
        )
        ranks.append(detached([*NativeFramework().capture({model: module}), state]))
    return MemoryCheckpoint(ranks)


def test_a_full_precision_model_loads_the_master_weights() -> None:
    model = Model()
    adam = torch.optim.AdamW(model.parameters())
    destination = engine_checkpoint().load({"model": model, "optimizer": adam})
    assert torch.equal(model.weight, EXACT)
    assert not destination.missing
    state = adam.state[model.weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(state["exp_avg"], EXACT * 2)
    assert TensorKey("optimizer", "weight", MASTER) in destination.recognized
    assert TensorKey("model", "weight") in destination.recognized


def test_a_low_precision_model_loads_its_own_weights() -> None:
    """Its optimizer has no use for the master weights, and rounds the moments if the caller asks for that."""
    model = Model(torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters())
    engine_checkpoint().load({"model": model})
    assert torch.equal(model.weight, ROUNDED)
    with pytest.raises(IncompatibleCheckpointError, match="optimizer/state/weight/exp_avg"):
        engine_checkpoint().load({"model": model, "optimizer": adam})
    destination = engine_checkpoint().load({"model": model, "optimizer": adam}, cast=True)
    assert torch.equal(model.weight, ROUNDED)
    assert MASTER not in adam.state[model.weight]
    assert any("master weights of 1 parameters are left out" in note for note in destination.notes)
    take_step(adam)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Fail unless the optimizer can step with its state."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_loads_the_master_weights(use_orig_params: bool) -> None:
    saved = engine_checkpoint()
    with as_rank(1, 2):
        model = unit(Model(), use_orig_params=use_orig_params)
        adam = torch.optim.AdamW(model.parameters())
        fill({"model": model, "optimizer": adam}, saved, 1)
        flat = next(p for p in model.parameters() if p.numel())
        assert torch.equal(flat.detach().reshape(-1)[:7], EXACT.flatten()[8:])
        assert set(adam.state[flat]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("state", ["model", "critic"])
def test_a_full_precision_model_loads_them_without_an_optimizer(state: str) -> None:
    """Each kind of model has an optimizer of its own in the checkpoint."""
    assert optimizer_state_name("model") == "optimizer"
    model = Model()
    engine_checkpoint(state, optimizer_state_name(state)).load({state: model})
    assert torch.equal(model.weight, EXACT)


def test_master_weights_of_another_model_with_the_same_names_are_not_loaded() -> None:
    saved = engine_checkpoint("critic", "optimizer")
    model = Model()
    destination = NativeFramework().destination({"critic": model}, saved)
    assert {shard.key.state for shard in destination.wanted} == {"critic"}


class Engine(torch.optim.SGD):
    """An optimizer that itself has a state of that name."""


def test_an_optimizer_of_the_saved_type_loads_master_weights() -> None:
    model = Model(torch.bfloat16)
    own = Engine(model.parameters(), lr=1e-3)
    engine_checkpoint().load({"model": model, "optimizer": own})
    assert torch.equal(own.state[model.weight][MASTER], EXACT)


def test_an_optimizer_with_master_weights_loads_them() -> None:
    model = Model(torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters())
    adam.state[model.weight][MASTER] = torch.zeros(SHAPE)
    engine_checkpoint().load({"model": model, "optimizer": adam})
    assert torch.equal(adam.state[model.weight][MASTER], EXACT)


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))
        self.frozen = nn.Parameter(torch.zeros(SHAPE), requires_grad=False)


@pytest.mark.parametrize("frozen", [True, False])
def test_settings_of_a_parameter_that_was_frozen(frozen: bool) -> None:
    """They are missing if the parameter is trained now."""
    trained, model = PartlyFrozen(), PartlyFrozen()
    saved = save({"model": trained, "optimizer": torch.optim.SGD([trained.weight], lr=0.5, momentum=0.9)})
    model.frozen.requires_grad = not frozen
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    destination = saved.load({"model": model, "optimizer": sgd})
    if frozen:
        assert not destination.missing
        assert sgd.param_groups[0]["lr"] == 0.5
    else:
        assert destination.missing == ["optimizer/param_groups/frozen"]
