"""The view for Hugging Face: `from_pretrained` reads a step's folder as it was committed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from bytecheckpoint.arguments import check_layout
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.catalogs import read_outline
from bytecheckpoint.engine.view_files import VIEW_INDEX, VIEW_KEY
from bytecheckpoint.errors import CheckpointError, StorageConflictError, UsageError, listed
from bytecheckpoint.frameworks.modules import as_modules
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.frameworks.wrappers import unwrapped, walk_modules
from bytecheckpoint.layouts import Layout, LayoutArgument
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import identity_of
from bytecheckpoint.lazy import lazy
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.planning.chained_layouts import as_stored, lay_out_through
from bytecheckpoint.planning.file_tensors import lie_whole
from bytecheckpoint.planning.part_space import LaidOut, layout_of_model, stored_side
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.dtypes import safetensors_code
from bytecheckpoint.representation.names import escape, is_uri, view_file_name
from bytecheckpoint.saving.step_view import VIEW_STEP, StepView, ViewOfSave
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.flush.job import transfer_limit
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tools.huggingface import WeightFiles, index_of
from bytecheckpoint.tools.huggingface_description import (
    configuration_files,
    files_beside,
    fitted,
)
from bytecheckpoint.tools.huggingface_layout import distribute, export_dtype, tensors_to_export
from bytecheckpoint.tools.ranks import ToolRanks

__all__ = ["HuggingFaceView"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceView(StepView):
    """Let `from_pretrained` read each step as it is: `save(..., view=HuggingFaceView())`.

    The storage files of the step get an index: tensors lie whole there, since ranks join those that are cut (FSDP, tensor
    parallelism) before they write, and no byte is written twice. Through a layout they lie there under the names of Hugging
    Face. For another dtype, and for tensors that the layout transposes or repeats, all ranks write files behind the commit,
    which takes the bytes of these tensors once more; `SaveHandle.viewed` is done when they are there.

    Attributes:
        state: name of the state that holds the model.
        layout: layout that leads to the names of Hugging Face, as for `open`; None for a model of transformers.
        dtype: dtype to which the view converts floating tensors; None leaves all as they are.
        files_from: local folder of a model on the machine of rank 0, from which each step gets all files but the weights,
            such as those of the tokenizer; the configuration of a live model of transformers goes before its own.
        max_shard_bytes: bytes of tensors per file that is written; a larger tensor has a file of its own.
    """

    state: str = "model"
    layout: LayoutArgument | None = None
    dtype: torch.dtype | str | None = None
    files_from: str | os.PathLike[str] | None = None
    max_shard_bytes: int = 5_000_000_000

    @lazy
    def _layouts(self) -> tuple[Layout, ...] | Literal["auto"] | None:
        return check_layout(self.layout)

    def _described(self) -> str:
        """Return the part of the choice that is the same on all ranks."""
        return f"HuggingFaceView({self.state!r}, {self._names}, {self.dtype}, {self.max_shard_bytes})"

    @lazy
    def _names(self) -> str:
        return identity_of(self._layouts)

    def of(self, states: Mapping[str, object], selection: NameSelection) -> ViewOfSave:
        """Return the view for one save of live objects."""
        export_dtype(self.dtype)
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes is {self.max_shard_bytes}: give a positive number of bytes")
        if self.state not in states:
            raise UsageError(f"HuggingFaceView: there is no state {self.state!r} to save, only {', '.join(states)}")
        value = states[self.state]
        if (modules := as_modules(self.state, value)) is None:
            raise UsageError(f"HuggingFaceView: {self.state!r} is a {type(value).__name__}: give a module")
        if not selection.takes_all_of(self.state):
            raise UsageError(
                f"HuggingFaceView: include= and exclude= may leave out a part of {self.state!r}, which from_pretrained "
                f"would fill at random: take '{self.state}/*' whole"
            )
        models = list(map(unwrapped, modules))
        for model in models:
            if getattr(model, "peft_config", None):
                raise UsageError(
                    f"HuggingFaceView: {self.state!r} has adapters of PEFT: export those with tools.export"
                )
            if self.layout is None and not hasattr(getattr(model, "config", None), "save_pretrained"):
                raise UsageError(
                    f"HuggingFaceView: {self.state!r} is a {type(model).__name__} and no model of transformers, so its "
                    "names are not Hugging Face's: give layout= (docs/layouts.md)"
                )
        parts = (part for model in models for part in walk_modules(model))
        found = [
            (bare, name) for _, bare, part in parts for name, value in part._parameters.items() if value is not None
        ]
        # FSDP1 has parameters in one flat one, and takes them out of their modules while it computes.
        names = [f"{bare}{name}" for bare, name in found if name != "_flat_param"]
        return _ModelView(self, models, names, _tied_names(models))


def _tied_names(models: Sequence[Any]) -> set[str] | None:
    """Return the names of parameters that from_pretrained ties to others; None if not all are models of transformers."""
    found: set[str] = set()
    for model in models:
        if not hasattr(model, "get_expanded_tied_weights_keys"):
            return None
        found.update(model.all_tied_weights_keys)
        with contextlib.suppress(ValueError):  # wrappers have changed names for which it has patterns
            found.update(model.get_expanded_tied_weights_keys(all_submodels=True))  # by the configuration as it is now
    return found


class _ModelView(ViewOfSave):
    """The view of one save.

    Args:
        wanted: the user's choice.
        models: live modules, without their wrappers.
        names: names of their parameters.
        tied: those that from_pretrained ties to others; None if that is not known.
    """

    def __init__(
        self, wanted: HuggingFaceView, models: Sequence[Any], names: Sequence[str], tied: set[str] | None
    ) -> None:
        self._wanted, self._models, self._names, self._tied = wanted, models, names, tied
        self.whole = wanted.state if export_dtype(wanted.dtype) is None else ""
        self.names = "" if wanted.layout is None else wanted._names
        # On rank 0, what `describe` has found: file of each tensor that files of the step hold, and the other tensors.
        self._held: Mapping[str, str] = {}
        self._rest: list[str] | None = None

    def shown(self, catalog: Catalog) -> Catalog:
        """Return the tensors of Hugging Face, as far as a layout leads to them and moves their elements only."""
        return as_stored(self._laid_out(_with_configuration(catalog, json.loads(self._files()["config.json"]))))

    def _files(self) -> dict[str, bytes]:
        """Return the configuration and the files beside it."""
        wanted = self._wanted
        copied = {} if wanted.files_from is None else dict(files_beside(wanted.files_from))
        configuration = configuration_files(self._models[0]) if self._models else {}
        files = fitted({**copied, **configuration}, export_dtype(wanted.dtype), quantised=False)
        if "config.json" not in files:
            raise UsageError(
                "HuggingFaceView: rank 0 has no configuration: give files_from=, a folder with config.json"
            )
        return files

    def _laid_out(self, catalog: Catalog) -> LaidOut:
        """Show a catalog that has the configuration under the names of Hugging Face."""
        layouts, state = self._wanted._layouts, self._wanted.state
        assert layouts is not None
        layouts = layout_of_model(catalog) if layouts == "auto" else layouts
        laid, last = lay_out_through(catalog, layouts), layouts[-1]  # which refuses what does not fit
        side = stored_side(last, laid.catalog.fqns(state))
        if side is not None and last.stored:  # of the names that led there
            side = 1 - side
        if side is None or not last.sides[side].startswith("hf"):
            raise UsageError(f"HuggingFaceView: layout {last.label} does not lead {state!r} to names of Hugging Face")
        return laid

    def describe(self, catalog: Catalog, named: Callable[[], Mapping[str, str]]) -> tuple[dict[str, bytes], Catalog]:
        """Return the configuration, the files beside it, and the index if all tensors lie whole."""
        wanted, state, dtype = self._wanted, self._wanted.state, export_dtype(self._wanted.dtype)
        files, self._held, self._rest = self._files(), {}, None
        if wanted.layout is not None:
            catalog = _with_configuration(catalog, json.loads(files["config.json"]))
            laid = self._laid_out(catalog.expanded())
            known = named() if dtype is None else {}
            # The ranks have followed a plan that was made for the configuration of an earlier save, perhaps.
            if not known or not lie_whole(as_stored(laid), state, known):
                return files, catalog
            self._held, self._rest = known, sorted({*laid.catalog.fqns(state)}.difference(known))
            if self._rest:
                return files, catalog
            return {**files, VIEW_INDEX: index_of(_nbytes(catalog, known), known)}, catalog
        if lacking := {*self._names}.difference(catalog.fqns(state), catalog.aliases.get(state, ())):
            # from_pretrained would take new weights for them.
            raise UsageError(f"HuggingFaceView: {state!r} holds no {listed(sorted(lacking), 3)}, names of the model")
        self._check_ties(catalog.aliases.get(state, {}))
        weights = _whole_tensors(catalog, state)
        if weights is None or dtype is not None:
            return files, catalog
        size = int(catalog.byte_length[np.isin(catalog.boxes.tensor, catalog.of_state(state))].sum())
        return {**files, VIEW_INDEX: index_of(size, weights)}, catalog

    def _check_ties(self, aliases: Mapping[str, str]) -> None:
        """Refuse parameters that are one tensor, but not by the model's own account: files hold one of them.

        Args:
            aliases: other name of a tensor -> name under which the files hold it.
        """
        if self._tied is None:
            return
        groups = {name: {name} for name in {*aliases.values()}.intersection(self._names)}
        for alias, name in aliases.items():
            groups.get(name, set()).add(alias)
        for group in groups.values():
            if len(apart := sorted(group - self._tied)) > 1:
                raise UsageError(
                    f"HuggingFaceView: {listed(apart, 3)} are one tensor, which the configuration of the model does not "
                    "say, so from_pretrained would fill all but one at random: tie them there (tie_word_embeddings=True), "
                    "or give each a tensor of its own"
                )

    def write(self, agreement: Agreement, storage: Storage, generation: str) -> None:
        """Write the files of the view, each rank its share, and the index last."""
        wanted, ranks, tier = self._wanted, ToolRanks(agreement), tier_of(storage)
        target = with_time_limits(storage if tier is None else tier.durable)

        def prepare(stack: contextlib.ExitStack, rest: list[str] | None) -> tuple[WeightFiles, list[str]]:
            source = CheckpointView.of(stack.enter_context(open_checkpoint(tier or storage, layout=wanted.layout)))
            _check_current(source.catalog, generation)
            agreement.timeout += transfer_limit(source.catalog)
            tensors, _, _ = tensors_to_export(source, wanted.state, export_dtype(wanted.dtype))
            if rest is not None:
                lacking = {*rest}
                tensors = [tensor for tensor in tensors if tensor.name in lacking]
            files = distribute(tensors, wanted.max_shard_bytes, ranks.count) if tensors else []
            for number, file in enumerate(files, 1):
                file.name = view_file_name(number, len(files), generation)
            return WeightFiles(source, files, ranks), [file.name for file in files]

        with contextlib.ExitStack() as stack:
            rest = ranks.agree(VIEW_STEP, wanted._described, self._agree)
            weights, names = ranks.all_succeed("prepare", lambda: prepare(stack, rest))

            def publish(sums: list[dict[str, Any]]) -> None:
                target.sync(names)
                _check_current(current := read_outline(target), generation)
                held = self._held, _nbytes(current, self._held)
                target.publish(VIEW_INDEX, weights.index({k: one for part in sums for k, one in part.items()}, *held))
                try:
                    _check_current(read_outline(target), generation)
                except CheckpointError:  # another save has committed meanwhile, and must not have these weights
                    target.delete([VIEW_INDEX])
                    raise

            try:
                ranks.agree("write", lambda: weights.write(target), publish)
            except BaseException:
                with contextlib.suppress(CheckpointError):
                    target.delete([file.name for file in weights.own])
                raise
            if weights.overflowed:
                _log.warning(
                    "%s: finite values are infinite in the view: %s", target.url, listed([*weights.overflowed], 5)
                )

    def _agree(self, views: list[str]) -> list[str] | None:
        """Refuse different views of ranks; return the tensors that are left to write, None for all."""
        for rank, view in enumerate(views):
            if view != views[0]:
                raise UsageError(f"rank 0 saves with view={views[0]}, rank {rank} with view={view}; give all the same")
        return self._rest


def _nbytes(catalog: Catalog, held: Mapping[str, str]) -> int:
    """Return the bytes of tensors in some files."""
    files = {*held.values()}
    return sum(file.size - file.data_offset for file in catalog.files if file.name in files)


def _whole_tensors(catalog: Catalog, state: str) -> dict[str, str] | None:
    """Return the file of each tensor of a state by its name; None if some do not lie whole in a file of the folder.

    Raises:
        UsageError: safetensors does not hold a tensor.
    """
    numbers = catalog.of_state(state)
    numbers = numbers[(catalog.slot.codes != catalog.slot.code_of(VALUES_SLOT))[numbers]]
    first = np.searchsorted(catalog.boxes.tensor, np.arange(catalog.count + 1)).tolist()
    found: dict[str, str] = {}
    whole = True
    for number in numbers.tolist():
        name, row = catalog.fqn[number], first[number]
        file = catalog.files[catalog.file[row]].name if first[number + 1] - row == 1 else ""
        if "/values-" in file:
            continue  # in an extra state
        if safetensors_code(catalog.dtype[number]) is None or name != escape(name):
            raise UsageError(f"HuggingFaceView: {name} of {catalog.dtype[number]} does not fit into safetensors")
        whole &= bool(file) and not is_uri(file) and bool((catalog.boxes.lengths[row] == catalog.shapes[number]).all())
        found[name] = file
    return found if whole else None


def _with_configuration(catalog: Catalog, config: Mapping[str, Any]) -> Catalog:
    """Return the catalog with the plain values of a model's configuration, which say the sizes of a layout."""
    layout = catalog.info["layout"]
    found = {
        key: value for key, value in flattened("hf", config).items() if isinstance(value, bool | int | float | str)
    }
    return replace(catalog, info={**catalog.info, "layout": {**layout, "config": {**layout["config"], **found}}})


def _check_current(catalog: Catalog, generation: str) -> None:
    if catalog.info.get(VIEW_KEY, {}).get("generation") != generation:
        raise StorageConflictError("another save has replaced the checkpoint before its view was written")
