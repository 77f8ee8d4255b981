"""Find the checkpoint that an engine serves, and hand its tensors to the engine's models under Hugging Face's names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.formats.detect import as_checkpoint
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.integrations.engines.following import FollowedWeights
from bytecheckpoint.integrations.engines.held_weights import HeldWeights, prove_engine
from bytecheckpoint.integrations.engines.lazy_weights import LazyWeight, WantedWeight, WeightPart
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import Layout, builtin_names, find, find_all
from bytecheckpoint.manager.run_folder import RunFolder, step_folder
from bytecheckpoint.opening import Checkpoint, Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.planning.part_space import stored_side
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve

__all__ = ["EngineCheckpoints", "EngineOptions", "check_loaded"]

_log = logging.getLogger("bytecheckpoint")


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


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options in `--model-loader-extra-config` of an engine.

    Attributes:
        checkpoint: folder or URL of a checkpoint, or of a run; without it the model's own folder is one.
        layout: layout by which the tensors get the names of Hugging Face; by default, and for "auto", the built-in one for
            the model's configuration whose other side has the checkpoint's names, if there is one.
        state: name of the state that is the model.
        follow: True to follow the versions in the folder `checkpoint`.
        prove: True to compare the weights in the model after a load with the fingerprints of the checkpoint.
    """

    checkpoint: str | None = None
    layout: str = "auto"
    state: str = "model"
    follow: bool = False
    prove: bool = False

    @staticmethod
    def of(options: object) -> EngineOptions:
        """Check options that an engine was given.

        Raises:
            UsageError: `options` is no mapping, or has other names.
        """
        known = [each.name for each in fields(EngineOptions)]
        if not isinstance(options, Mapping) or (unknown := sorted(options.keys() - set(known))):
            wrong = options if not isinstance(options, Mapping) else listed(unknown)
            raise UsageError(f"model_loader_extra_config has {wrong}: it takes {listed(known)}")
        return EngineOptions(**options)


class EngineCheckpoints:
    """The checkpoints that the ranks of an engine open.

    Args:
        options: options that the engine was given.
        group: ranks of the engine, as vLLM and SGLang have them: `world_size`, `rank_in_group`, `broadcast_object`,
            `cpu_group`.
    """

    def __init__(self, options: EngineOptions, group: Any) -> None:
        self._options, self._group = options, group
        self._tied = False  # as the model's configuration says

    @property
    def ranks(self) -> Any:
        """The process group of the engine's ranks; None for one rank."""
        return self._group.cpu_group if self._group.world_size > 1 else None

    def path(self, place: str) -> str:
        """Return the checkpoint at a place, or the newest step of a run there, for which rank 0 looks.

        Raises:
            CheckpointNotFoundError: there is none.
        """

        def look() -> str | Exception:
            try:
                return checkpoint_at(place) or CheckpointNotFoundError(
                    f"no checkpoint at {place}: give the address of one, or of a run, as 'checkpoint' in "
                    "model_loader_extra_config"
                )
            except Exception as error:  # noqa: BLE001  raised on all ranks
                return error

        path = look() if self._group.rank_in_group == 0 else None
        if self._group.world_size > 1:
            path = self._group.broadcast_object(path, src=0)
        if isinstance(path, Exception):
            raise path
        _log.info("weights of %s", path)
        return str(path)

    def opened(self, path: str, config: Any) -> tuple[Checkpoint, Sequence[Layout] | None]:
        """Open a checkpoint under the names of Hugging Face; return it with the layouts that lead to them, if any do.

        Args:
            path: the checkpoint.
            config: configuration of the model's text part.
        """
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        checkpoint = bytecheckpoint.open(path)
        try:
            if self._options.state not in checkpoint.states:
                held = listed(checkpoint.states)
                raise IncompatibleCheckpointError(f"{path} has no state {self._options.state!r}: it has {held}")
            layouts = self._layouts_of(checkpoint, config.to_dict())
        except Exception:
            checkpoint.close()
            raise
        if layouts is None:
            return checkpoint, None
        checkpoint.close()
        return bytecheckpoint.open(path, layout=layouts), layouts

    def _layouts_of(self, checkpoint: Checkpoint, described: Mapping[str, Any]) -> Sequence[Layout] | None:
        """Return the layouts through which a checkpoint has the names of Hugging Face, with the sizes of the model."""
        config = flattened("hf", described) | {"hf5.model_type": described.get("model_type")}
        if self._options.layout != "auto":
            return [layout.with_sizes(config) for layout in find_all(self._options.layout)]
        names = list(self.tensors(checkpoint))
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

    def tensors(self, checkpoint: Checkpoint) -> dict[str, Entry]:
        """Return the tensors of the model by their names; not a head that is the embedding, which some models refuse."""
        prefix = f"{self._options.state}/"
        found = {key.removeprefix(prefix): one for key, one in checkpoint.tensors.items() if key.startswith(prefix)}
        heads = [name for name in found if self._tied and name.startswith("lm_head.")]
        stored = CheckpointView.of(checkpoint).stored_under
        others = {stored(f"{prefix}{name}") for name in found.keys() - heads} if heads else set()
        return {
            name: one for name, one in found.items() if name not in heads or stored(f"{prefix}{name}") not in others
        }

    def shapes(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        """Return the shapes of these tensors."""
        return {name: tuple(entry.shape) for name, entry in self.tensors(checkpoint).items()}

    def held(self, model: torch.nn.Module, wanted: Mapping[str, WantedWeight], others: Iterable[str]) -> HeldWeights:
        """Return what a model holds that has noted what it copies; see `HeldWeights.of`."""
        return HeldWeights.of(model, wanted, others, self._options.state, self.ranks)

    def weights(
        self,
        checkpoint: Checkpoint,
        wanted: dict[str, WantedWeight] | None,
        kept: Mapping[str, WantedWeight] | None = None,
        direct: set[str] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield lazy weights.

        Args:
            checkpoint: the checkpoint, open while they are used.
            wanted: parts to be read later, to which copies are added; None to read at once what is copied.
            kept: parts that are in memory, which are not read.
            direct: set to which the names of tensors are added of which parts are read at once.
        """
        tensors = self.tensors(checkpoint)

        def read(part: WeightPart) -> torch.Tensor:
            if direct is not None:
                direct.add(part.name)
            if kept and part.name in kept and (held := kept[part.name].part(part.begins, part.lengths)) is not None:
                return held
            ranges = zip(part.begins, part.lengths, strict=True)
            return tensors[part.name][tuple(slice(begin, begin + n) for begin, n in ranges)]

        for name, entry in tensors.items():
            yield name, LazyWeight(WeightPart.whole(name, tuple(entry.shape)), entry.dtype, read, wanted)

    def fill(self, path: str, wanted: Mapping[str, WantedWeight], layouts: Sequence[Layout] | None) -> LoadReport:
        """Read all wanted parts, all ranks together, each byte once."""
        report = bytecheckpoint.load(
            path,
            {self._options.state: dict(wanted)},  # to which a load adds plain values
            layout=layouts,
            strict={self._options.state: False},
            cast=True,
            prepare_save=False,
            process_group=self.ranks,
        )
        for part in wanted.values():
            for memory, first in part.copies:
                memory.copy_(first)
        return report

    def prove(self, path: str, model: Any, layouts: Sequence[Layout] | None) -> None:
        """Compare what a model holds with a checkpoint, as `prove_engine`, if the engine's options ask for it."""
        if self._options.prove:
            prove_engine(model, path, layouts)

    def followed(
        self, place: str, checkpoint: Checkpoint, layouts: Sequence[Layout] | None, wanted: Mapping[str, WantedWeight]
    ) -> FollowedWeights:
        """Return memory of all wanted parts that follows the versions at a place, of which `checkpoint` is one."""
        dtypes = {name: entry.dtype for name, entry in self.tensors(checkpoint).items()}
        return FollowedWeights(place, layouts, self._options.state, self.ranks, wanted, dtypes)

    def check_same(self, checkpoint: Checkpoint, known: Mapping[str, tuple[int, ...]] | None) -> None:
        """Refuse a checkpoint whose tensors are others than those of the model, and close it."""
        found = self.shapes(checkpoint)
        if known is None or known == found:
            return
        names = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
        checkpoint.close()
        raise IncompatibleCheckpointError(
            f"{checkpoint.path} is of another model: {len(names)} tensors differ in name or shape, such as "
            f"{names[0]}: {known.get(names[0])} and {found.get(names[0])}"
        )


def check_loaded(path: str, model: torch.nn.Module, loaded: set[str]) -> None:
    """Refuse a model some of whose parameters the checkpoint lacks."""
    if missing := sorted({name for name, _ in model.named_parameters()} - loaded):
        raise IncompatibleCheckpointError(
            f"{path} lacks weights of {len(missing)} parameters of {type(model).__name__}: {listed(missing)}; "
            "a layout may lead to them (layout=)"
        )
