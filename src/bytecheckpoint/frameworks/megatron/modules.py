"""Models of Megatron: names, boxes and values by `sharded_state_dict()`, filled where they lie."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.leaves import dtype_name, memory_of, writable
from bytecheckpoint.frameworks.masters import precise
from bytecheckpoint.frameworks.megatron.installed import (
    is_megatron_module,
    megatron_class,
    sharded_by_torch,
    unwrapped,
)
from bytecheckpoint.frameworks.megatron.layouts import Boxes, Layout, fitted, names_of, piece_of, pieces_of_factory
from bytecheckpoint.frameworks.objects import Reader, encoded
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["MegatronScan", "capture_megatron_modules", "load_megatron_modules", "scan_megatron_modules"]

# One name for each layer, whatever pipeline stage it is on, and one tensor for all of a fused gate.
_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}
_MAPPING = "dist_checkpointing.mapping"
_BYTES_IO = "__bytesio__"


@dataclass(slots=True)
class _Entry:
    """Something that is not memory of the module: where it goes back to."""

    value: Any
    model: nn.Module
    state_key: str


@dataclass(slots=True)
class MegatronScan:
    """All chunks of one kind as one namespace.

    Attributes:
        layouts: each tensor once.
        values: name -> what is not a tensor (extra states).
        copies: id of a layout -> a tensor that `sharded_state_dict()` made itself.
        by_id: id of a parameter or buffer -> its layout.
        gathered_late: id of a parameter -> the runs of its elements (first, number) that this rank has up to date, of those
            that the next forward pass gathers (overlap_param_gather).
        gathering: gathers that have begun and that nobody has waited for.
    """

    layouts: list[Layout] = field(default_factory=list)
    values: dict[str, _Entry] = field(default_factory=dict)
    copies: dict[int, _Entry] = field(default_factory=dict)
    by_id: dict[int, Layout] = field(default_factory=dict)
    gathered_late: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    gathering: list[Any] = field(default_factory=list)

    @property
    def parameters(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Id of a parameter or buffer -> (FQN, aliases)."""
        return {number: (layout.names[0], layout.names[1:]) for number, layout in self.by_id.items()}


def scan_megatron_modules(kind: str, modules: Sequence[nn.Module]) -> MegatronScan:
    """Names and tensors of `modules`: a model, or the chunks of virtual pipeline stages.

    Raises:
        UsageError: a module has no `sharded_state_dict`, or one that cannot be represented; or two chunks use one name
            for different tensors.
    """
    scan = MegatronScan()
    if sharding := sharded_by_torch({kind: list(modules)}):
        raise UsageError(
            f"{kind}: a model of Megatron is sharded by {sharding}: use Megatron's DistributedDataParallel and the "
            'distributed optimizer; or, where Megatron does not split the model, framework="fsdp"'
        )
    for module in modules:
        model, wrappers = unwrapped(kind, module)
        if not hasattr(model, "sharded_state_dict"):
            if is_megatron_module(model):
                raise UsageError(
                    f"{kind}: {type(model).__name__} holds modules of Megatron, but has no sharded_state_dict that tells "
                    "how they are split: derive it from MegatronModule"
                )
            raise UsageError(
                f"{kind}: {type(model).__name__} stands beside modules of Megatron and is none: give it a name of its own"
            )
        _scan_chunk(kind, scan, model, wrappers)
    _refuse_equal_names(kind, scan)
    return scan


def _scan_chunk(kind: str, scan: MegatronScan, model: Any, wrappers: Sequence[nn.Module]) -> None:
    metadata: dict[str, Any] = dict(_METADATA)
    for wrapper in wrappers:
        if getattr(wrapper, "dp_cp_group", None) is not None:
            metadata["dp_cp_group"] = wrapper.dp_cp_group
    owners = {id(t): t for t in (*model.parameters(), *model.buffers())}
    places = {(t.data_ptr(), t.numel()): t for t in owners.values() if t.numel()}
    storages = {t.untyped_storage().data_ptr() for t in map(memory_of, owners.values())} - {0}
    entries: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    for state_key, entry in entries.items():
        if _is(entry, "ShardedObject"):
            _add_value(kind, scan, model, state_key, entry)
            continue
        if _is(entry, "LocalNonpersistentObject"):
            continue
        if not (_is(entry, "ShardedTensor") or _is(entry, "ShardedTensorFactory")) or entry.data is None:
            raise UsageError(
                f"{kind}/{state_key}: sharded_state_dict has {_a(entry)} here, where a tensor or an object that says how "
                "it is sharded is expected"
            )
        layout = _layout(kind, state_key, entry)
        data: torch.Tensor = layout.tensor
        own = owners.get(id(data))
        if own is None:
            own = places.get((data.data_ptr(), data.numel())) if data.numel() else None
        known = scan.by_id.get(id(own))
        if known is not None:
            _tie(kind, known, layout)
            continue
        if own is not None:
            if own.shape == data.shape:
                layout.tensor = own
            scan.by_id[id(own)] = layout
        elif data.untyped_storage().data_ptr() not in storages:
            scan.copies[id(layout)] = _Entry(data, model, state_key)
        scan.layouts.append(layout)
    _add_empty_values(scan, model, entries)
    for wrapper in wrappers:
        if getattr(wrapper, "remove_forward_pre_hook_handles", None):
            _add_runs(scan.gathered_late, wrapper)
            scan.gathering += _gathering(wrapper)


def _gathering(wrapper: Any) -> Iterator[Any]:
    """What waits for the gathers of parameters that have begun."""
    for group in (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups):
        if group.param_gather_handle is not None:
            yield group.param_gather_handle


def _add_runs(found: dict[int, list[tuple[int, int]]], wrapper: Any) -> None:
    """What the distributed optimizer of this rank steps: an equal share of each bucket."""
    for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for parameter, (first, last, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // size
            low = max(first, bucket.offset + rank * share)
            count = min(last, bucket.offset + (rank + 1) * share) - low
            runs = found.setdefault(id(parameter), [])
            if count > 0:
                runs.append((low - first, count))


def _layout(kind: str, state_key: str, entry: Any) -> Layout:
    where = f"{kind}/{state_key}"
    data: torch.Tensor = entry.data
    copy = isinstance(entry.replica_id, tuple) and bool(entry.replica_id) and entry.replica_id[0] != 0
    if _is(entry, "ShardedTensor"):
        if entry.flattened_range is not None:
            raise UsageError(f"{where}: sharded_state_dict flattens the tensor, which is not supported for modules")
        piece = piece_of(where, state_key, entry)
        return Layout(piece.names, data, [piece], copy)
    # On no memory: what it makes says where it lies in the parameter.
    like = torch.empty(data.shape, dtype=data.dtype, device="meta")
    made = entry.build_fn(entry.key, like, entry.replica_id, entry.flattened_range)
    parts = [part for part in _flat(made) if _is(part, "ShardedTensor")]
    pieces = pieces_of_factory(where, state_key, entry, parts, like)
    prepended = parts[0].global_offset[: parts[0].prepend_axis_num]
    names, _ = names_of(state_key, entry.key, tuple(prepended))
    return Layout(names, data, pieces, copy)


def _flat(made: Any) -> Iterator[Any]:
    if isinstance(made, dict):
        made = list(made.values())
    if not isinstance(made, list | tuple):
        yield made
        return
    for item in made:
        yield from _flat(item)


def _tie(kind: str, known: Layout, again: Layout) -> None:
    """The same parameter a second time, under other names."""
    if len(known.pieces) != len(again.pieces):
        raise UsageError(
            f"{kind}/{known.names[0]} and {kind}/{again.names[0]} are one tensor that is split in two ways"
        )
    known.names = tuple(dict.fromkeys((*known.names, *again.names)))
    for piece, other in zip(known.pieces, again.pieces, strict=True):
        piece.names = tuple(dict.fromkeys((*piece.names, *other.names)))


def _add_value(kind: str, scan: MegatronScan, model: nn.Module, state_key: str, entry: Any) -> None:
    names, absorbed = names_of(state_key, entry.key, tuple(entry.global_offset) if entry.global_shape != (1,) else ())
    name = names[0]
    if not absorbed and entry.global_shape != (1,):
        name += f"[{', '.join(map(str, entry.global_offset))}]"
    if name in scan.values:
        raise UsageError(f"{kind}/{name} stands in two modules of the list: chunks must not share names")
    scan.values[name] = _Entry(entry.data, model, state_key)


def _add_empty_values(scan: MegatronScan, model: nn.Module, state_keys: Collection[str]) -> None:
    """Extra states that are None and that Megatron leaves out: the state_dict of the module alone has them."""
    for name, module in model.named_modules():
        key = f"{name}._extra_state" if name else "_extra_state"
        known = key in state_keys or key in scan.values or any(map(str.isdecimal, name.split(".")))
        if not known and type(module).get_extra_state is not nn.Module.get_extra_state:
            value = module.get_extra_state()
            if value is None:
                scan.values[key] = _Entry(None, model, key)


def _refuse_equal_names(kind: str, scan: MegatronScan) -> None:
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for layout in scan.layouts:
        for piece in layout.pieces:
            box = (piece.names[0], piece.offsets)
            if box in seen and not layout.copy:
                raise UsageError(f"{kind}/{piece.names[0]} names two different tensors: chunks must not share names")
            seen.add(box)


def capture_megatron_modules(kind: str, scan: MegatronScan) -> LiveState:
    """The shards and values of a scanned kind."""
    state = LiveState(kind, merged=True)
    trained, frozen = Boxes(), Boxes()
    for layout in scan.layouts:
        if layout.copy:
            continue  # another stage holds it, and may cut it elsewhere
        tensor = layout.tensor
        boxes = trained if tensor.requires_grad else frozen
        runs = scan.gathered_late.get(id(tensor))
        for piece in layout.pieces:
            key = piece.key(kind)
            if runs is None:
                boxes.add(piece, key, tensor)
                continue
            flat = tensor.detach().view(-1)
            for first, count in runs:
                boxes.add(piece, key, flat[first : first + count], first)
    state.shards += trained.shards()
    for shard in state.shards:
        shard.requires_grad = True
    state.shards += frozen.shards()
    if scan.values:
        values = {name: _stored(entry.value) for name, entry in scan.values.items()}
        state.tree = encoded(kind, values, state.shards)
    return state


def load_megatron_modules(
    kind: str, scan: MegatronScan, saved: SavedStates, into: Destination, masters: str | None, stepped: Collection[int]
) -> None:
    """Plan the load of a scanned kind, in place.

    Args:
        kind: name of the state.
        scan: of its modules.
        saved: the checkpoint.
        into: receives the plan.
        masters: the kind that holds master weights of these modules; None: nothing says so.
        stepped: ids of parameters of which an optimizer here has master weights, so that theirs are exact.
    """
    for handle in scan.gathering:
        handle.wait()  # else it would write old values over those that are loaded
    arrived: list[tuple[_Entry, Callable[[], Any]]] = []
    for layout in scan.layouts:
        tensor = layout.tensor
        made = scan.copies.get(id(layout))
        target = tensor if made is None else torch.empty_like(tensor)
        for piece in layout.pieces:
            found = saved.find(kind, piece.names)
            if found is None:
                into.missing.append(str(piece.key(kind)))
                continue
            into.claimed.add(found.key)
            for name in piece.names:
                if (other := saved.find(kind, (name,))) is not None:
                    into.claimed.add(other.key)
            found = precise(saved, found, piece.names, dtype_name(target.dtype), masters)
            shards = [piece.shard(found.key, target)]
            if piece.resizes:
                shards = fitted(shards, found.global_shape)
            for shard in shards:
                shard.converts = id(tensor) in stepped
                if (step := writable(shard)) is not None:
                    into.finish.append(step)
            into.wanted += shards
        if made is not None:
            arrived.append((made, partial(_itself, target)))
    if scan.values:
        arrived += _values(kind, scan, saved, into)
    if arrived:
        into.finish.append(partial(_hand_back, arrived))


def _hand_back(arrived: Sequence[tuple[_Entry, Callable[[], Any]]]) -> None:
    """Give each model what is no memory of it, all at once: each call goes through the whole model."""
    models = {id(entry.model): entry.model for entry, _ in arrived}
    for model in models.values():
        values = {entry.state_key: build() for entry, build in arrived if entry.model is model}
        model.load_state_dict(values, strict=False)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _values(
    kind: str, scan: MegatronScan, saved: SavedStates, into: Destination
) -> Iterator[tuple[_Entry, Callable[[], Any]]]:
    # What is None here takes no value.
    wanted = {name: entry for name, entry in scan.values.items() if entry.value is not None}
    if not wanted:
        return
    reader = Reader(kind, saved, into)
    found: dict[str, Any] = {}
    # A value lies with the tensors of its layer.
    for blob in saved.trees_about(kind, [name for layout in scan.layouts for name in layout.names]):
        tree = reader.read(blob)
        if isinstance(tree, dict):
            found = {**tree, **found}
        if wanted.keys() <= found.keys():
            break
    reader.want()
    for name, entry in wanted.items():
        if name in found:
            yield entry, partial(_built, reader, found[name])
        else:
            into.missing.append(str(TensorKey(kind, name)))


def _built(reader: Reader, value: object) -> Any:
    built = reader.build(value, None)
    if isinstance(built, dict) and built.keys() == {_BYTES_IO}:
        return io.BytesIO(built[_BYTES_IO])
    return built


def _stored(value: Any) -> Any:
    # What Transformer Engine keeps its scaling factors in.
    return {_BYTES_IO: value.getvalue()} if type(value) is io.BytesIO else value


def _is(entry: object, name: str) -> bool:
    kind = megatron_class(_MAPPING, name)
    return kind is not None and isinstance(entry, kind)


def _a(entry: object) -> str:
    return "nothing" if entry is None else f"a {type(entry).__name__}"
