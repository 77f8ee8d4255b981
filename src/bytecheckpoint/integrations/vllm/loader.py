"""The loader that vLLM calls in each process of an engine: it opens a checkpoint of any layout and fills the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.formats.detect import as_checkpoint
from bytecheckpoint.integrations.vllm.lazy_weights import LazyWeight, WantedWeight, WeightPart
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import Layout, builtin_names, find, find_all
from bytecheckpoint.manager.run_folder import RunFolder, step_folder
from bytecheckpoint.opening import Checkpoint, Entry
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planning.part_space import stored_side
from bytecheckpoint.publishing import Follower, FollowReport
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve

__all__ = ["CheckpointLoader"]

_log = logging.getLogger("bytecheckpoint")
_OPTIONS = ("checkpoint", "layout", "state", "follow")


def checkpoint_at(path: str) -> str | None:
    """Return the address of the checkpoint at a path, or of the newest step of a run there; None if there is none."""
    storage = resolve(path)
    if storage.version(CATALOG_NAME) or as_checkpoint(storage) is not None:
        return storage.url
    newest = RunFolder(path).newest()
    return None if newest is None else step_folder(storage.url, newest.step)


def leads_to(layout: Layout, side: str, names: list[str]) -> bool:
    """Return whether a checkpoint with some names has those of a side of a layout by this layout alone."""
    try:
        stored = stored_side(layout, names)
    except UsageError:  # the same names on both sides
        return False
    return stored is not None and layout.sides[stored] != side


def _group_of_ranks() -> Any:
    """Return the process group of the engine's ranks; None for one rank."""
    group = get_world_group()
    return group.cpu_group if group.world_size > 1 else None


class CheckpointLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads the weights of a checkpoint, or of the newest step of a run, into a model of vLLM.

    `--model-loader-extra-config` takes a JSON object with

    - `checkpoint`: folder or URL of a checkpoint, or of a run; without it the model's own folder is one.
    - `layout`: layout by which the tensors get the names of Hugging Face; by default, and for "auto", the built-in one for
      the model's configuration whose other side has the checkpoint's names, if there is one.
    - `state`: name of the state that is the model, by default "model".
    - `follow`: true to follow the versions in the folder `checkpoint`: each rank keeps its part of the weights in host
      memory too, and a reload reads only what changed.

    The ranks of the engine read each byte that any of them wants once, and send each other their parts. The model's
    attribute `bytecheckpoint_report` is the `LoadReport`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options = load_config.model_loader_extra_config or {}
        if not isinstance(options, Mapping) or (unknown := sorted(options.keys() - set(_OPTIONS))):
            wrong = options if not isinstance(options, Mapping) else listed(unknown)
            raise UsageError(f"model_loader_extra_config has {wrong}: it takes {listed(_OPTIONS)}")
        self._checkpoint: str | None = options.get("checkpoint")
        self._layout: str = options.get("layout", "auto")
        self._state: str = options.get("state", "model")
        self._follow: bool = options.get("follow", False)
        # vLLM makes another loader for each reload, with the same configuration: what they share is kept there.
        self._memory: dict[str, Any] = vars(load_config).setdefault("_bytecheckpoint", {})

    def download_model(self, model_config: ModelConfig) -> None:
        """Download nothing: the weights are read where they lie."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Load the weights into a model."""
        path = self._path(model_config)
        meta = any(parameter.is_meta for parameter in model.parameters())  # they are quantised when they are copied
        wanted: dict[str, WantedWeight] | None = None if meta else {}
        checkpoint, layout = self._opened(path, model_config)
        with checkpoint:
            self._memory["tensors"] = self._shapes(checkpoint)
            loaded = model.load_weights(self._weights(checkpoint, wanted))
            dtypes = {name: entry.dtype for name, entry in self._tensors(checkpoint).items()}
        if self._follow:
            if wanted is None:
                raise UsageError("follow=true is for models whose layers do not quantise while they are loaded")
            model.bytecheckpoint_report = self._begin_to_follow(wanted, dtypes, layout, model_config)
        elif wanted:
            model.bytecheckpoint_report = bytecheckpoint.load(
                path,
                {self._state: dict(wanted)},  # to which a load adds plain values
                layout=layout,
                strict={self._state: False},
                cast=True,
                prepare_save=False,
                process_group=_group_of_ranks(),
            )
        for part in (wanted or {}).values():
            for memory, first in part.copies:
                memory.copy_(first)
        self._check_loaded(path, model, model_config, loaded)

    def _begin_to_follow(
        self,
        wanted: Mapping[str, WantedWeight],
        dtypes: Mapping[str, torch.dtype],
        layout: Sequence[Layout] | None,
        config: ModelConfig,
    ) -> FollowReport | None:
        """Load the newest version into memory that stays as it is, and copy it into the model, which may change its own."""
        kept = {name: weight.kept(dtypes[name]) for name, weight in wanted.items()}
        options = LoadOptions(strict={self._state: False})
        root = self._place(config)
        follower = Follower(root, layout=layout, options=options, process_group=_group_of_ranks())
        report = follower.update({self._state: dict(kept)})
        for name, weight in wanted.items():
            for box, memory in weight.boxes.items():
                memory.copy_(kept[name].boxes[box])
        self._memory["followed"] = follower, kept
        return report

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the weights of another checkpoint, for vLLM's `reload_weights`.

        Each part is read when vLLM copies it, or has been brought to the newest version before. vLLM keeps the old weights
        if this raises.

        Raises:
            CheckpointNotFoundError: there is none.
            IncompatibleCheckpointError: its tensors are others than those of the model.
        """
        try:
            checkpoint = self._other_checkpoint(model_config)
            if followed := self._memory.get("followed"):
                follower, kept = followed
                model.bytecheckpoint_report = follower.update({self._state: dict(kept)})
        except Exception:
            model_config.model = self._memory["model"]  # the next reload without a path is not of this one
            raise

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            with checkpoint:
                yield from self._weights(checkpoint, None)

        return weights()

    def _other_checkpoint(self, model_config: ModelConfig) -> Checkpoint:
        """Open the checkpoint of a reload."""
        checkpoint, _ = self._opened(self._path(model_config), model_config)
        known, found = self._memory.get("tensors"), self._shapes(checkpoint)
        if known is not None and known != found:
            names = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
            checkpoint.close()
            raise IncompatibleCheckpointError(
                f"{checkpoint.path} is of another model: {len(names)} tensors differ in name or shape, such as "
                f"{names[0]}: {known.get(names[0])} and {found.get(names[0])}"
            )
        return checkpoint

    def _path(self, model_config: ModelConfig) -> str:
        """Return the checkpoint to load, which rank 0 looks for.

        This is the one in the options, else the one at the model's own path, which vLLM makes the path of a reload.
        """
        first = self._memory.setdefault("model", model_config.model)
        place = self._place(model_config)
        if self._follow and model_config.model != first:
            raise UsageError(f"this engine follows the versions in {place}: reload its weights without a path")
        group = get_world_group()

        def look() -> str | Exception:
            try:
                return checkpoint_at(place) or CheckpointNotFoundError(
                    f"no checkpoint at {place}: give the address of one, or of a run, as 'checkpoint' in "
                    "model_loader_extra_config"
                )
            except Exception as error:  # noqa: BLE001  raised on all ranks
                return error

        path = look() if group.rank_in_group == 0 else None
        if group.world_size > 1:
            path = group.broadcast_object(path, src=0)
        if isinstance(path, Exception):
            raise path
        _log.info("weights of %s", path)
        return str(path)

    def _place(self, model_config: ModelConfig) -> str:
        """Return the folder of the checkpoint, or of the run."""
        first = self._memory.setdefault("model", model_config.model)
        return (self._checkpoint if model_config.model == first else None) or str(model_config.model)

    def _opened(self, path: str, model_config: ModelConfig) -> tuple[Checkpoint, Sequence[Layout] | None]:
        """Open a checkpoint under the names of Hugging Face; return it with the layouts that lead to them, if any do."""
        checkpoint = bytecheckpoint.open(path)
        try:
            if self._state not in checkpoint.states:
                held = listed(checkpoint.states)
                raise IncompatibleCheckpointError(f"{path} has no state {self._state!r}: it has {held}")
            layout = self._layout_of(checkpoint, model_config)
        except Exception:
            checkpoint.close()
            raise
        if layout is None:
            return checkpoint, None
        checkpoint.close()
        return bytecheckpoint.open(path, layout=layout), layout

    def _layout_of(self, checkpoint: Checkpoint, model_config: ModelConfig) -> Sequence[Layout] | None:
        """Return the layouts through which a checkpoint has the names of Hugging Face, with the sizes of the model."""
        described = model_config.hf_text_config.to_dict()
        config = flattened("hf", described) | {"hf5.model_type": described.get("model_type")}
        if self._layout != "auto":
            return [layout.with_sizes(config) for layout in find_all(self._layout)]
        names = list(self._tensors(checkpoint))
        found = [
            layout
            for layout in map(find, builtin_names())
            if "hf" in layout.sides and layout.is_for(config) and leads_to(layout, "hf", names)
        ]
        if len(found) > 1:
            raise IncompatibleCheckpointError(
                f"{checkpoint.path}: {listed([layout.name for layout in found])} lead to names of Hugging Face: "
                "give one as 'layout'"
            )
        return [found[0].with_sizes(config)] if found else None

    def _tensors(self, checkpoint: Checkpoint) -> dict[str, Entry]:
        """Return the tensors of the model by their names."""
        prefix = f"{self._state}/"
        return {key.removeprefix(prefix): one for key, one in checkpoint.tensors.items() if key.startswith(prefix)}

    def _shapes(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry.shape) for name, entry in self._tensors(checkpoint).items()}

    def _weights(
        self, checkpoint: Checkpoint, wanted: dict[str, WantedWeight] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._tensors(checkpoint)
        kept: Mapping[str, WantedWeight] = self._memory["followed"][1] if "followed" in self._memory else {}

        def read(part: WeightPart) -> torch.Tensor:
            if part.name in kept and (held := kept[part.name].part(part.begins, part.lengths)) is not None:
                return held
            ranges = zip(part.begins, part.lengths, strict=True)
            return tensors[part.name][tuple(slice(begin, begin + n) for begin, n in ranges)]

        for name, entry in tensors.items():
            shape = tuple(entry.shape)
            whole = WeightPart(name, shape, (0,) * len(shape), shape, tuple(range(len(shape))))
            yield name, LazyWeight(whole, entry.dtype, read, wanted)

    @staticmethod
    def _check_loaded(path: str, model: nn.Module, model_config: ModelConfig, loaded: set[str] | None) -> None:
        """Refuse a model some of whose parameters the checkpoint lacks."""
        if loaded is None or model_config.quantization is not None:
            return  # quantised layers have parameters of their own
        if missing := sorted({name for name, _ in model.named_parameters()} - loaded):
            raise IncompatibleCheckpointError(
                f"{path} lacks weights of {len(missing)} parameters of {type(model).__name__}: {listed(missing)}; "
                "a layout may lead to them (layout=)"
            )
