"""Training of Megatron-Core's GPT models, in Megatron's own way and as ordinary modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron.models import (
    LENGTH,
    RATE,
    VOCABULARY,
    Layout,
    MegatronModel,
    build_chunks,
    fill,
    initialize_parallel,
)

SEQUENCES, MICROBATCH = 12, 3


class Trainer(MegatronModel):
    """A model with its optimizer and scheduler, as a Megatron training program has them.

    Args:
        layout: how the model is spread.
        seed: number from which its values are made.
        lr: largest learning rate.
        build: function that returns the bare chunks of this rank's stage.
        **options: further settings of the optimizer.

    Attributes:
        scheduler: Megatron's, of learning rate and weight decay.
        step: number of the next step.
    """

    def __init__(
        self,
        layout: Layout,
        seed: int = 1,
        *,
        lr: float = RATE,
        build: Callable[[Layout], list[Any]] = build_chunks,
        **options: Any,
    ) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        initialize_parallel(layout)
        bare = build(layout)
        for chunk in bare:
            fill(chunk, seed)
        super().__init__(layout, bare, lr=lr, **options)
        for group in self.optimizer.param_groups:
            # Two groups that differ in both: norms and biases, and the rest.
            group["max_lr"] = group["lr"] = lr / 2 if group["wd_mult"] == 0 else lr
            group["min_lr"] = 0.0
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        config = bare[0].config
        config.finalize_model_grads_func = _finalize
        config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap or layout.buckets is not None:
            config.no_sync_func = self._of_chunks("no_sync")
        if layout.overlap:
            config.param_sync_func = self._of_chunks("start_param_sync")
        self.step = 0
        self.extra: dict[str, Any] = {"step": 0}

    def _of_chunks(self, method: str) -> Any:
        found = [getattr(chunk, method) for chunk in self.chunks]
        return found if len(found) > 1 else found[0]

    def states(self) -> dict[str, Any]:
        self.extra["step"] = self.step
        return super().states() | {"scheduler": self.scheduler, "extra_states": self.extra}

    def loaded(self) -> None:
        """Do what the program does after a load."""
        self.step = self.extra["step"]

    def passes(self, *, forward_only: bool = False) -> list[dict[str, torch.Tensor]]:
        """Run forward and backward of the next step; return the losses of the micro-batches."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows = self.local_rows()
        batches = [iter(rows.split(MICROBATCH)) for _ in self.chunks]
        outputs: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.model,
            num_microbatches=len(rows) // MICROBATCH,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH,
            forward_only=forward_only,
        )
        return outputs

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            outputs = self.passes()
            self.optimizer.step()
            self.scheduler.step(1)
            total = torch.tensor([sum(float(m["loss"]) for m in outputs), float(len(outputs))], dtype=torch.float64)
            dist.all_reduce(total)
            losses.append(float(total[0] / total[1]))
            self.step += 1
        return losses

    def local_rows(self) -> torch.Tensor:
        """Return this data-parallel rank's rows of the next step, with the token that follows each."""
        from megatron.core import parallel_state

        replicas = parallel_state.get_data_parallel_world_size()
        return tokens(self.step).chunk(replicas)[parallel_state.get_data_parallel_rank()]


def _finalize(*args: Any, **kwargs: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(*args, **kwargs)


def tokens(step: int) -> torch.Tensor:
    """The global batch of a step, SEQUENCES x (LENGTH + 1)."""
    return torch.randint(
        0, VOCABULARY - 4, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step)
    )


def _forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(batches)
    positions = torch.arange(LENGTH)[None]
    out = model(batch[:, :-1].contiguous(), positions, None, labels=batch[:, 1:].contiguous())
    return out, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def plain_run(layout: Layout, seed: int = 1) -> tuple[Any, torch.optim.AdamW]:
    """Return (model, optimizer of torch): Megatron's module is an ordinary one here."""
    initialize_parallel(layout)
    (model,) = build_chunks(layout)
    fill(model, seed)
    return model, torch.optim.AdamW(param_groups_of(dict(model.named_parameters())))


def param_groups_of(parameters: Mapping[str, Any], lr: float = RATE) -> list[dict[str, Any]]:
    """Return the param groups of Megatron's own optimizers for the trained parameters: matrices, and norms and biases."""
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    vectors = {n for n in trained if "norm" in n or n.endswith(".bias")}
    return [
        {"params": [p for n, p in trained.items() if n not in vectors], "lr": lr, "weight_decay": 0.1},
        {"params": [p for n, p in trained.items() if n in vectors], "lr": lr / 2, "weight_decay": 0.0},
    ]


def scale_at(step: int) -> float:
    """Return the scheduler's factor of the learning rate: two steps up from 0, then a cosine down to step 20."""
    return step / 2 if step <= 2 else 0.5 * (cos(pi * (step - 2) / 18) + 1)
