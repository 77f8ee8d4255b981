"""The writer and the reader of torch.distributed.checkpoint (DCP) that save and load by this package."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from bytecheckpoint.collectives import SingleProcess, use
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.formats.dcp import place_of, trees_of
from bytecheckpoint.frameworks.tensors.plain import is_tensor_like
from bytecheckpoint.handles import LoadReport, SaveReport
from bytecheckpoint.integrations.dcp.adapter import DCP, TensorParts
from bytecheckpoint.loading import load
from bytecheckpoint.opening import Entry
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.saving import save
from bytecheckpoint.tools.state_dicts import mapped, state_dict_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DcpReader", "DcpWriter"]

#: Methods of a planner that change what is saved. They would not be asked: the states themselves are saved.
_OF_DEFAULT = ("create_local_plan", "lookup_object", "resolve_data", "transform_object")
_OPTIONS = frozenset({"check_replicas", "incremental", "metadata", "step", "timeout"})
#: States of names without the name of a state, as `place_of` gives them.
_WITHOUT_STATE = ("extra_states", "model")


class _DcpStorage:
    """The path and the ranks of the calls of DCP: the ranks of a process group, or this process alone (`no_dist=True`).

    DCP gives neither to its storages. But the coordinator sees how many plans there are.

    Args:
        path: checkpoint, if the call does not name it by `checkpoint_id=`.
        process_group: ranks of the calls; None for all.

    Attributes:
        path: checkpoint of the next call.
    """

    _called = ""

    def __init__(self, path: str | os.PathLike[str] | None, process_group: ProcessGroup | None) -> None:
        self.path = path
        self._group = process_group
        self._alone = self._plans_together = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a call."""
        self.path = self.path if checkpoint_id is None else checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path or URL may be one of a storage of this package."""
        return True

    def _set_up(self, use_collectives: bool = True, **_: Any) -> None:
        self._alone, self._plans_together = False, use_collectives

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan of this rank as it is."""
        self._address()
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans of all ranks as they are. Only the coordinator is asked.

        Raises:
            UsageError: the ranks of the call are not those of the process group.
        """
        here = dist.get_world_size(self._group) if dist.is_initialized() else 1
        if self._plans_together:  # else each rank plans for itself, and all save together
            self._alone = len(plans) == 1
            if len(plans) not in (1, here):
                raise UsageError(
                    f"DCP has {len(plans)} ranks, and {self._called} {here}: give process_group= to both of them"
                )
        return plans

    def _address(self) -> str | os.PathLike[str]:
        if self.path is None:
            raise UsageError(f"no path: give it to {self._called}, or as checkpoint_id=")
        return self.path

    @contextlib.contextmanager
    def _world(self) -> Iterator[ProcessGroup | None]:
        """Yield the process group of the call, or run it with this process alone."""
        with use(_this_process()) if self._alone else contextlib.nullcontext():
            yield None if self._alone else self._group


@cache
def _this_process() -> SingleProcess:
    """Return the world of this process alone, which keeps its memory from call to call."""
    return SingleProcess()


class DcpWriter(_DcpStorage, StorageWriter):
    """Saves a state_dict as an ordinary checkpoint: `dcp.save(state_dict, storage_writer=Writer(path))`.

    It also serves `dcp.async_save`, and `checkpoint_id=` gives the path of each call.

    Args:
        path: folder or URL of the checkpoint.
        process_group: ranks that save, where `dcp.save` gets a process group too.
        **options: arguments of `bytecheckpoint.save`: `check_replicas`, `incremental`, `metadata`, `step`, `timeout`.

    Attributes:
        report: this rank's work in the last save, None before.

    Raises:
        UsageError: there is no such option.
    """

    _called = "Writer"

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, process_group: ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(path, process_group)
        if unknown := sorted(options.keys() - _OPTIONS):
            raise UsageError(f"Writer has no option {unknown[0]!r}; it takes {', '.join(sorted(_OPTIONS))}")
        self.report: SaveReport | None = None
        self._options = options

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save."""
        self._set_up(**kwargs)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the states of the planner, and commit them. This package divides copies among the ranks, not the plan.

        Raises:
            UsageError: the planner changes what is saved.
            CheckpointError: the save failed, on any rank.
        """
        with self._world() as group:
            handle = save(self._address(), _states_of(planner), framework=DCP, process_group=group, **self._options)
        self.report = handle.result()
        return _done([])

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the checkpoint is committed."""


def _states_of(planner: SavePlanner) -> dict[str, Any]:
    """Return the nested values of each state that a planner is to save.

    Raises:
        UsageError: the planner is none of DCP, or changes what is saved.
    """
    cls = type(planner)
    if not isinstance(planner, DefaultSavePlanner):
        raise UsageError(f"{cls.__name__} is no DefaultSavePlanner, of which Writer takes the states")
    if changed := [name for name in _OF_DEFAULT if getattr(cls, name) is not getattr(DefaultSavePlanner, name)]:
        raise UsageError(
            f"{cls.__name__} has a {changed[0]} of its own, which Writer would not ask: use DefaultSavePlanner"
        )
    saved, paths = planner.state_dict, planner.mappings
    if not planner.flatten_state_dict:
        saved, paths = flatten_state_dict(saved)
    nested = {path[0] for path in paths.values() if len(path) > 1}
    return trees_of(
        [
            (*place_of(name, paths[name], nested, is_tensor=is_tensor_like(value)), value)
            for name, value in saved.items()
        ]
    )


class _Names(dict[str, Any]):
    """Metadata by name, in which other spellings of the names are found, too, and not listed.

    Args:
        found: metadata by name.
        others: other spelling -> name.
    """

    def __init__(self, found: Mapping[str, Any], others: Mapping[str, str]) -> None:
        super().__init__(found)
        self._others = others

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others

    def __missing__(self, name: str) -> Any:
        return self[self._others[name]]


class _StandIn(torch.Tensor):
    """A tensor without elements, in the place of one of the checkpoint."""


class DcpReader(_DcpStorage, StorageReader):
    """Loads a checkpoint of any layout into a state_dict: `dcp.load(state_dict, storage_reader=Reader(path))`.

    It reads checkpoints of this package, however they were saved, and those of DCP's FileSystemWriter.

    Args:
        path: folder or URL of the checkpoint.
        process_group: ranks that load, where `dcp.load` gets a process group too.
        cast: True to convert dtypes; otherwise a difference is an error.
        timeout: seconds that one step may wait for the other ranks; default `settings().timeout`.

    Attributes:
        report: this rank's work in the last load, None before.
    """

    _called = "Reader"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        process_group: ProcessGroup | None = None,
        cast: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(path, process_group)
        self.report: LoadReport | None = None
        self._cast, self._timeout = cast, timeout
        self._failure: CheckpointError | None = None
        self._tensors: dict[str, tuple[TensorKey, torch.Size]] = {}
        self._values: dict[str, Any] = {}
        self._others: dict[str, str] = {}

    def read_metadata(self) -> dcp.Metadata:
        """Describe the checkpoint in DCP's names; each tensor is one chunk."""
        self._failure = None
        try:
            with self._opened() as view:
                return self._describe(view)
        except CheckpointError as error:  # which DCP would only log
            self._failure = error
            return dcp.Metadata({})

    @contextlib.contextmanager
    def _opened(self) -> Iterator[CheckpointView]:
        """Yield the checkpoint as this rank sees it."""
        with open_checkpoint(self._address()) as checkpoint:
            rank = dist.get_rank(self._group) if dist.is_initialized() else 0
            yield CheckpointView.of(checkpoint).for_rank(rank if rank in checkpoint.ranks else None)

    def _describe(self, view: CheckpointView) -> dcp.Metadata:
        stand_ins: dict[int, tuple[torch.Tensor, Entry]] = {}

        def stand_in(entry: Entry) -> torch.Tensor:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta").as_subclass(_StandIn)
            stand_ins[id(tensor)] = tensor, entry
            return tensor

        kept = [state for state in view.states if not view.has_streams(state)]
        trees = {state: state_dict_of(view, state, param_names=True) for state in kept}
        flat, paths = flatten_state_dict({state: mapped(tree, stand_in) for state, tree in trees.items()})
        self._tensors, self._values, found = {}, {}, {}
        for name, value in flat.items():
            if id(value) in stand_ins:
                key = view.stored_under(stand_ins[id(value)][1].key)
                assert key is not None
                self._tensors[name] = key, value.shape
            else:  # a tensor in a tuple, say, has no name for DCP
                self._values[name] = mapped(value, lambda one: stand_ins[id(one)][1], _StandIn)
            found[name] = _described(value)
        without = {name.partition(".")[2]: name for name in flat if name.partition(".")[0] in _WITHOUT_STATE}
        self._others = {**without, **_flat_settings(trees, flat)}
        return dcp.Metadata(_Names(found, self._others), planner_data=paths)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load, or raise what `read_metadata` met with."""
        if self._failure is not None:
            raise self._failure
        self._set_up(**kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of the plan into the planner's tensors, each byte once for all ranks, and its plain values.

        Raises:
            CheckpointError: the load failed, on any rank.
        """
        wanted: dict[str, tuple[TensorKey, TensorParts]] = {}  # by the program's name: tied tensors have one key
        tensors: list[tuple[Any, torch.Tensor]] = []
        values: list[tuple[Any, Any]] = []
        for item in plan.items:
            fqn = item.storage_index.fqn
            name = fqn if fqn in self._tensors or fqn in self._values else self._others[fqn]
            if item.type == LoadItemType.BYTE_IO:
                values.append((item, self._values[name]))
                continue
            tensor = planner.resolve_tensor(item)
            tensors.append((item, tensor))
            if name in self._values:  # a learning rate, say, which the values hold
                part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                tensor.detach().copy_(self._values[name][part])
            else:
                key, shape = self._tensors[name]
                _, tensor_parts = wanted.setdefault(fqn, (key, TensorParts(shape, [])))
                tensor_parts.parts.append((tuple(item.storage_offsets), tensor.detach()))
        with self._world() as group:
            self.report = load(
                self._address(), {DCP: [*wanted.values()]}, framework=DCP, strict=False, cast=self._cast,
                process_group=group, timeout=self._timeout, prepare_save=False,
            )  # fmt: skip
        with contextlib.ExitStack() as stack:
            view = cache(lambda: stack.enter_context(self._opened()))  # for tensors that these values hold
            for item, value in values:
                planner.load_bytes(item, _saved(mapped(value, lambda entry: view()[entry.key][...])))
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        return _done(None)


def _described(value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    """Describe a tensor as one chunk, or a plain value."""
    if not isinstance(value, torch.Tensor):
        return dcp.BytesStorageMetadata()
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=value.dtype), value.shape, [chunk])


def _flat_settings(trees: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that flat state_dicts have for the settings of a parameter's group -> those of the group."""
    found: dict[str, str] = {}
    for state, tree in trees.items():
        groups = tree.get("param_groups", ()) if isinstance(tree, dict) else ()
        for number, group in enumerate(groups if isinstance(groups, list) else ()):
            for key in group if isinstance(group, dict) else ():
                name = f"{state}.param_groups.{number}.{key}"
                if key != "params" and name in flat:
                    found |= {f"{state}.param_groups.{fqn}.{key}": name for fqn in group.get("params", ())}
    return found


def _saved(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # noqa: TID251  planners of DCP load it with torch.load
    buffer.seek(0)
    return buffer


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
