"""The loader that vLLM calls in each process of an engine: it opens a checkpoint of any layout and fills the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.engines.checkpoints import EngineCheckpoints, EngineOptions, check_loaded
from bytecheckpoint.integrations.engines.lazy_weights import WantedWeight
from bytecheckpoint.layouts.layout import Layout
from bytecheckpoint.opening import Checkpoint

__all__ = ["CheckpointLoader"]


class CheckpointLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads the weights of a checkpoint, or of the newest step of a run, into a model of vLLM.

    `--model-loader-extra-config` takes a JSON object with `EngineOptions`. With `follow`, each rank keeps its part of the
    weights in host memory too, and a reload reads only what changed.

    The ranks of the engine read each byte that any of them wants once, and send each other their parts. The model's
    attribute `bytecheckpoint_report` is the `LoadReport`, and `bytecheckpoint_source` the checkpoint and its layouts.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = EngineOptions.of(load_config.model_loader_extra_config or {})
        self._samples: dict[str, torch.Tensor] = {}
        # vLLM makes another loader for each reload, with the same configuration: what they share is kept there.
        self._memory: dict[str, Any] = vars(load_config).setdefault("_bytecheckpoint", {})

    @property
    def _checkpoints(self) -> EngineCheckpoints:
        return EngineCheckpoints(self._options, get_world_group())

    def download_model(self, model_config: ModelConfig) -> None:
        """Download nothing: the weights are read where they lie."""

    def load_model(self, *args: Any, **options: Any) -> Any:
        """Load a model, and note which of its parameters vLLM packs for its kernels after that."""
        model: Any = super().load_model(*args, **options)
        model.bytecheckpoint_weights = model.bytecheckpoint_weights.unpacked(model, self._samples)
        return model

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Load the weights into a model."""
        path, checkpoints = self._path(model_config), self._checkpoints
        meta = any(parameter.is_meta for parameter in model.parameters())  # they are quantised when they are copied
        wanted: dict[str, WantedWeight] | None = None if meta else {}
        checkpoint, layouts = checkpoints.opened(path, model_config.hf_text_config)
        with checkpoint:
            self._memory["tensors"] = checkpoints.shapes(checkpoint)
            direct: set[str] = set()
            loaded = model.load_weights(checkpoints.weights(checkpoint, wanted, direct=direct))
            model.bytecheckpoint_weights = checkpoints.held(model, wanted or {}, direct)
        if self._options.follow:
            if wanted is None:
                raise UsageError("follow=true is for models whose layers do not quantise while they are loaded")
            followed = checkpoints.followed(self._place(model_config), checkpoint, layouts, wanted)
            self._memory["followed"] = followed
            model.bytecheckpoint_report = followed.update()
            followed.fill(wanted)
            path = followed.path
        elif wanted:
            model.bytecheckpoint_report = checkpoints.fill(path, wanted, layouts)
        if loaded is not None and model_config.quantization is None:  # quantised layers have parameters of their own
            check_loaded(path, model, loaded)
        self._samples = model.bytecheckpoint_weights.samples(model)
        model.bytecheckpoint_source = (path, layouts)
        checkpoints.prove(path, model, layouts)

    def get_all_weights(self, model_config: ModelConfig, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the weights of another checkpoint, for vLLM's `reload_weights`.

        Each part is read when vLLM copies it, or has been brought to the newest version before. vLLM keeps the old weights
        if this raises.

        Raises:
            CheckpointNotFoundError: there is none.
            IncompatibleCheckpointError: its tensors are others than those of the model.
        """
        kept: dict[str, WantedWeight] | None = None
        try:
            checkpoint, layouts = self._other_checkpoint(model_config)
            path = checkpoint.path
            if followed := self._memory.get("followed"):
                kept, model.bytecheckpoint_report = followed.parts, followed.update()
                path = followed.path
        except Exception:
            model_config.model = self._memory["model"]  # the next reload without a path is not of this one
            raise
        model.bytecheckpoint_source = (path, layouts)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            with checkpoint:
                yield from self._checkpoints.weights(checkpoint, None, kept)

        return weights()

    def _other_checkpoint(self, model_config: ModelConfig) -> tuple[Checkpoint, Sequence[Layout] | None]:
        """Open the checkpoint of a reload; return it with the layouts that lead to the names of the model, if any do."""
        checkpoint, layouts = self._checkpoints.opened(self._path(model_config), model_config.hf_text_config)
        self._checkpoints.check_same(checkpoint, self._memory.get("tensors"))
        return checkpoint, layouts

    def _path(self, model_config: ModelConfig) -> str:
        """Return the checkpoint to load.

        This is the one in the options, else the one at the model's own path, which vLLM makes the path of a reload.
        """
        first, place = self._memory.setdefault("model", model_config.model), self._place(model_config)
        if self._options.follow and model_config.model != first:
            raise UsageError(f"this engine follows the versions in {place}: reload its weights without a path")
        return self._checkpoints.path(place)

    def _place(self, model_config: ModelConfig) -> str:
        """Return the folder of the checkpoint, or of the run."""
        first = self._memory.setdefault("model", model_config.model)
        return (self._options.checkpoint if model_config.model == first else None) or str(model_config.model)
