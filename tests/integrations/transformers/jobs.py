"""Trainings of a tiny model with Trainer, as the ranks of a world run them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bytecheckpoint.integrations.transformers import attach
from bytecheckpoint.manager import Preemption, SaveOptions
from tests.integrations.conformance import Training
from tests.support.runs import die_in_commit

SAMPLES, LENGTH, WORDS = 48, 8, 32
STEPS_PER_EPOCH = 6  # of 8 samples
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "sync_module_states": False,
        "cpu_ram_efficient_loading": False, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}  # fmt: skip


def samples(number: int = SAMPLES, seed: int = 3) -> list[dict[str, Any]]:
    """Return random texts, as Trainer's data."""
    rows = torch.randint(0, WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def model(dropout: float = 0.0) -> Any:
    """Return a tiny language model with weights that are always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=LENGTH, attention_dropout=dropout, attn_implementation="eager", use_cache=False,
        )
    )  # fmt: skip


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Return arguments of a training of two epochs that saves every four steps."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "num_train_epochs": 2, "per_device_train_batch_size": 8 // world, "save_steps": 4, "learning_rate": 1e-2,
        "dataloader_pin_memory": False, "save_strategy": "steps", **options,
    }  # fmt: skip


def prepare_rank() -> None:
    """Let accelerate look at this process as it is now; worlds run several trainings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for name, value in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), _place(), strict=True):
        os.environ.pop(name, None)
        if dist.is_initialized():
            os.environ[name] = str(value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def pretend_gpus() -> None:
    """Let accelerate take FSDP2, which it does on accelerators only, for the CPU too. FSDP1 fails: it takes no "cpu:0"."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _place() -> tuple[int, int, int, int]:
    if not dist.is_initialized():
        return 0, 0, 1, 1
    return dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size()


class Losses:
    """Notes the loss of every step, and calls functions at steps."""

    def __init__(self, at: dict[int, Callable[[], object]] | None = None) -> None:
        from transformers import TrainerCallback

        outer = self
        self.found: dict[int, float] = {}
        self.saved: list[int] = []

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if "loss" in logs:
                    outer.found[state.global_step] = logs["loss"]

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if at and state.global_step in at:
                    at[state.global_step]()

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                outer.saved.append(state.global_step)

        self.callback = Callback()


def make(
    folder: Path, at: dict[int, Callable[[], object]] | None = None, *, dropout: float = 0.0, callbacks: Any = (),
    net: Any = None, **options: Any,
) -> tuple[Any, Losses]:  # fmt: skip
    """Return a trainer and its losses."""
    from transformers import Trainer, TrainingArguments

    prepare_rank()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    losses = Losses(at)
    args = TrainingArguments(**arguments(folder, **options))
    if args.fsdp:
        pretend_gpus()
    trainer = Trainer(
        model=model(dropout) if net is None else net, args=args,
        train_dataset=samples(), eval_dataset=samples(8, seed=4), callbacks=[*callbacks, losses.callback],
    )  # fmt: skip
    return trainer, losses


def run(
    folder: Path, resume: Any = None, *, attached: Any = True, at: dict[int, Callable[[], object]] | None = None,
    **options: Any,
) -> dict[int, float]:  # fmt: skip
    """Train; return the losses. `attached`: whether, or the arguments of `attach`."""
    trainer, losses = make(folder, at, **options)
    if attached is not False:
        attach(trainer, **({} if attached is True else attached))
    trainer.train(resume_from_checkpoint=resume)
    return losses.found


def die_at_commit(folder: Path, number: int, resume: Any = None, **options: Any) -> None:
    """Train, and die when the catalog of the save with this number is about to be published."""
    die_in_commit(number, lambda: run(folder, resume, **options))


def conform(folder: str, training: Training) -> dict[int, float]:
    """Train as the conformance suite says. Files of Trainer itself go elsewhere."""
    options: dict[str, Any] = {
        "max_steps": training.steps, "dropout": 0.2 if training.dropout else 0.0, "lr_scheduler_type": "cosine",
        "save_steps": training.every, "save_strategy": "steps" if training.attached else "no",
    }  # fmt: skip
    if training.layout == "fsdp2":
        options |= FSDP2
    at = dict(training.at)
    if training.until:
        at[training.until] = lambda: setattr(trainer.control, "should_training_stop", True)
    with tempfile.TemporaryDirectory() as own:
        trainer, losses = make(Path(own), at, **options)
        if training.attached:
            attach(
                trainer, folder, keep=training.keep, preemption=Preemption() if training.preempted else None,
                save_options=SaveOptions(on_error=training.on_error),
            )  # fmt: skip
        trainer.train(resume_from_checkpoint="auto" if training.attached and training.resume else None)
    sharded = all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    assert sharded == (training.layout == "fsdp2")
    return losses.found
