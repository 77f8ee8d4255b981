"""Save the weights that Lightning's `WeightAveraging` averages, beside those in training."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.attaching import check_has
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.step_fence import fence

__all__ = ["AveragedWeights", "averaging_callback"]


def averaging_callback(trainer: Any) -> Any:
    """Return the callback of a trainer that averages weights, or None.

    Raises:
        UsageError: there are two, or the strategy shards the weights.
    """
    found = [one for one in trainer.callbacks if isinstance(one, pl.callbacks.WeightAveraging)]
    if len(found) > 1:
        raise UsageError(f"{type(found[0]).__name__} and {type(found[1]).__name__} both average the weights: pass one")
    if found and isinstance(trainer.strategy, pl.strategies.FSDPStrategy | pl.strategies.ModelParallelStrategy):
        raise UsageError(
            f"{type(found[0]).__name__} averages whole weights, and {type(trainer.strategy).__name__} shards them: use "
            "DDPStrategy, or leave the callback away"
        )
    return found[0] if found else None


class AveragedWeights:
    """The averaged weights of a fit.

    Args:
        callback: callback of Lightning that averages.
        device: device of this rank.
        stack: stack that leaves the callback as it was.

    Attributes:
        module: copy of the user's module with the averaged weights.
    """

    def __init__(self, callback: Any, device: Any, stack: ExitStack) -> None:
        check_has(callback, ("_average_model", "_swap_models"), pl.__name__, "use 2.6")
        average = callback._average_model
        self.module: Any = average.module
        # A copy in the background may still read these weights, which no optimizer steps.
        for owner, name in (average, "update_parameters"), (callback, "_swap_models"):
            _fence_before(stack, owner, name)
        if torch.distributed.is_initialized():  # they were copied before DDP made the ranks equal
            with torch.no_grad():
                for tensor in (*self.module.parameters(), *self.module.buffers()):
                    shared = tensor.to(device)
                    torch.distributed.broadcast(shared, 0)
                    tensor.copy_(shared)

    def entries(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Return the averaged weights by their names, with the other entries of the `shown` weights."""
        averaged = self.module.state_dict()
        return {name: one if isinstance(one, torch.Tensor) else shown.get(name) for name, one in averaged.items()}


def _fence_before(stack: ExitStack, owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        fence()
        return function(*arguments)

    vars(owner)[name] = call
    stack.callback(vars(owner).pop, name, None)
