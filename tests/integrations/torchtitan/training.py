"""A tiny Llama for torchtitan's own Trainer, its data, and what notes the losses. `load_training` imports it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torchtitan.components.checkpointer import CheckpointManager as StockManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _build_llama3_layers, model_registry
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from bytecheckpoint.dataloader import SequenceSource, TokenBufferLoader, TokenRecipe
from bytecheckpoint.integrations.torchtitan import CheckpointManager

__all__ = ["CheckpointManager", "Losses", "OwnContainer", "StockManager", "StreamLoader", "make_config"]

logger.setLevel(logging.ERROR)
WORDS, LENGTH, WIDTH = 32, 8, 16


def numbers() -> list[list[int]]:
    """Return texts of numbers that grow by the same step each."""
    found = torch.randint(1, 6, (60, 2), generator=torch.Generator().manual_seed(3)).tolist()
    return [[(first + step * place) % (WORDS - 1) + 1 for place in range(21)] for first, step in found]


def load_rows(_: str) -> Dataset:
    return Dataset.from_list([{"row": row} for row in numbers()])


def row_of(sample: dict[str, Any]) -> list[int]:
    found: list[int] = sample["row"]
    return found


text_datasets.DATASETS["numbers"] = DatasetConfig(path="", loader=load_rows, sample_processor=row_of)


class Numbers(BaseTokenizer):
    """Takes tokens for texts."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: list[int], **_: Any) -> list[int]:
        return [*text, 0]

    def decode(self, tokens: Any, **_: Any) -> str:
        return str(tokens)

    def get_vocab_size(self) -> int:
        return WORDS


class StreamLoader(BaseDataLoader):
    """A loader of torchtitan whose state is in streams."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **_: Any) -> None:
        source = SequenceSource(numbers(), "numbers")
        recipe = TokenRecipe(source, context_length=seq_len + 1, global_batch=8, tokenizer=list, document_end=0)
        self._loader = TokenBufferLoader(recipe, rank=dp_rank, ranks=dp_world_size)
        for name in ("stream_count", "shared_state", "stream_states", "choose_streams", "load_streams"):
            setattr(self, name, getattr(self._loader, name))

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            tokens = torch.as_tensor(batch["tokens"]).long()
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


class OwnContainer(OptimizersContainer):
    """A container with a state of its own."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1, **super().state_dict()}


class Losses(MetricsProcessor):
    """Notes the losses, and a random number of each step that training does not use."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[int, float] = {}
        self.random: dict[int, float] = {}

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        self.found[step], self.random[step] = global_avg_loss, torch.rand(1).item()


def make_config(
    folder: Path, *, checkpoint: Any, steps: int, batch: int, parallelism: dict[str, Any], streams: bool, workers: int,
    own_container: bool, **options: Any,
) -> Trainer.Config:  # fmt: skip
    """Return the configuration of a training."""
    spec = model_registry("debugmodel", attn_backend="varlen")
    layers = _build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, hidden_dim=16, fuse_qkv=True, attn_backend="varlen",
        rope=ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=500000, scaling="llama"),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention needs a GPU
    old = spec.model
    model = dataclasses.replace(
        old, dim=WIDTH, vocab_size=WORDS, layers=layers,
        tok_embeddings=dataclasses.replace(old.tok_embeddings, num_embeddings=WORDS, embedding_dim=WIDTH),
        norm=dataclasses.replace(old.norm, normalized_shape=WIDTH),
        lm_head=dataclasses.replace(old.lm_head, in_features=WIDTH, out_features=WORDS),
    )  # fmt: skip
    optimizer = default_adamw(lr=1e-2)
    if own_container:
        optimizer = OwnContainer.Config(param_groups=optimizer.param_groups)
    optimizer.implementation = "foreach"
    return Trainer.Config(
        model_spec=dataclasses.replace(spec, model=model), loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        dump_folder=str(folder), tokenizer=Numbers.Config(), optimizer=optimizer, checkpoint=checkpoint,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=40),
        training=TrainingConfig(
            local_batch_size=batch, seq_len=LENGTH, steps=steps, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        dataloader=StreamLoader.Config() if streams
        else text_datasets.HuggingFaceTextDataLoader.Config(dataset="numbers", num_workers=workers),
        metrics=Losses.Config(log_freq=1), debug=DebugConfig(seed=7, enable_structured_logging=False), **options,
    )  # fmt: skip
