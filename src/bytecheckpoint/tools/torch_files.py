"""Write a checkpoint as torch's own programs keep theirs: a checkpoint of DCP, or one file of `torch.save`."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import secrets
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bytecheckpoint.engine.tensor_bytes import flat_bytes
from bytecheckpoint.errors import UsageError
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.storage import NewFile, Storage
from bytecheckpoint.storage.posix.files import fsync_directory
from bytecheckpoint.tools.ranks import ToolRanks
from bytecheckpoint.tools.state_dicts import mapped

__all__ = [
    "Advance", "DcpFiles", "DcpItem", "Written", "why_not_plain", "write_dcp", "write_items", "write_object",
    "write_torch_file",
]  # fmt: skip

_PIECE_BYTES = 16 << 20
_METADATA = ".metadata"
#: Where torch aligns the data of a tensor in a file, which `torch.load(mmap=True)` needs.
_ALIGNMENT = 64
#: Bytes of a local header of a zip file before the name of the member.
_LOCAL_HEADER = 30

#: An item of a file: name, offsets (None for plain values) and sizes, and its place: file, first byte, bytes.
_Placed: TypeAlias = tuple[str, tuple[int, ...] | None, tuple[int, ...], tuple[str, int, int]]
#: Function that gets the number of bytes that were written.
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """The files of an export, and their tensors.

    Attributes:
        files: names of the files.
        tensors: number of tensors; tied ones are one.
        nbytes: bytes of tensors.
    """

    files: Sequence[str]
    tensors: int
    nbytes: int


def write_dcp(view: CheckpointView, tree: Mapping[str, Any], files: DcpFiles, advance: Advance) -> Written:
    """Write a checkpoint of torch.distributed.checkpoint, as `dcp.save(tree)` does; `tree` is of `state_dict_of`.

    Large tensors become several chunks, so the memory needed does not depend on them. The metadata is written last.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    stand_ins: dict[int, tuple[torch.Tensor, Entry]] = {}

    def stand_in(entry: Entry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        stand_ins[id(tensor)] = tensor, entry
        return tensor

    flat, paths = flatten_state_dict(mapped(dict(tree), stand_in))
    blobs: dict[str, Any] = {}
    items: list[DcpItem] = []
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and id(value) in stand_ins:
            entry = stand_ins[id(value)][1]
            items.append(DcpItem(name, entry.key, entry.shape, entry.dtype))
        else:  # DCP takes a tuple for one value, also with tensors in it
            blobs[name] = mapped(value, lambda tensor: stand_ins.get(id(tensor), (None, tensor))[1], torch.Tensor)
    return write_items(view, items, blobs, files, advance, paths)


@dataclass(frozen=True, slots=True)
class DcpItem:
    """A tensor of a checkpoint of DCP, or a part of one that is a tensor of the exported checkpoint.

    Attributes:
        name: name in DCP.
        key: key in the exported checkpoint.
        shape: global shape in DCP.
        dtype: dtype in DCP.
        at: coordinates of the part in the leading dimensions, which a stack of tensors has.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: tuple[int, ...] = ()


def write_items(
    view: CheckpointView,
    items: Sequence[DcpItem],
    blobs: Mapping[str, Any],
    files: DcpFiles,
    advance: Advance,
    paths: Any = None,
    markers: Mapping[str, bytes] | None = None,
) -> Written:
    """Write a checkpoint of torch.distributed.checkpoint. Items that hold the same bytes share them.

    Args:
        view: the checkpoint.
        items: the tensors.
        blobs: plain values by name.
        files: files of this rank, which reads and writes its share of the tensors.
        advance: function that gets the number of bytes written.
        paths: planner data of DCP.
        markers: contents of further small files, by name, which are written behind the metadata.
    """
    wanted: dict[str, dict[tuple[int, torch.dtype], list[DcpItem]]] = {}  # by key; tied tensors are under the first one
    first: dict[Any, str] = {}
    for item in items:
        key = first.setdefault(view.stored_under(item.key), item.key)
        wanted.setdefault(key, {}).setdefault((len(item.at), item.dtype), []).append(item)
    keys, ranks, storage = list(wanted), files.ranks, files.storage
    own = [keys[position] for position in ranks.share([view.tensors[key].nbytes for key in keys])]
    last = {_METADATA: b"", **(markers or {})}
    published: list[str] = []

    def write() -> tuple[list[str], list[_Placed], int]:
        placed: list[_Placed] = []
        written: dict[int, tuple[str, int, int]] = {}  # by identity of the value
        for name, value in blobs.items() if ranks.rank == 0 else ():
            place = written.get(id(value)) or files.add(_saved(mapped(value, lambda entry: entry[...])))
            written[id(value)] = place
            placed.append((name, None, (), place))
        done = 0
        for key, slices, data in view.stream(own, _PIECE_BYTES):
            start, lengths = [s.start for s in slices], [s.stop - s.start for s in slices]
            for (depth, dtype), alike in wanted[key].items():
                sizes = (*[1] * depth, *lengths)
                place = files.add(_saved(data.to(dtype).reshape(sizes).contiguous()))
                placed += [(item.name, (*item.at, *start), sizes, place) for item in alike]
            done += data.nbytes
            advance(done)
        files.finish()
        return files.names, placed, done

    def finish(written: Sequence[tuple[list[str], list[_Placed], int]]) -> tuple[list[str], int]:
        placed = itertools.chain.from_iterable(placed for _, placed, _ in written)
        last[_METADATA] = _metadata(items, blobs, paths, placed)
        for name, content in last.items():
            storage.publish(name, content)
            published.append(name)
        names = [*itertools.chain.from_iterable(names for names, _, _ in written), *last]
        storage.sync(names)
        return names, sum(done for _, _, done in written)

    try:
        names, done = ranks.agree("write", write, finish)
    except BaseException:
        files.discard(published)
        raise
    return Written(names, len(wanted), done)


def _metadata(items: Iterable[DcpItem], blobs: Mapping[str, Any], paths: Any, placed: Iterable[_Placed]) -> bytes:
    """Return the metadata of DCP for items and plain values, of which all chunks are placed."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {name: dcp.BytesStorageMetadata() for name in blobs}
    for item in items:
        size = torch.Size(item.shape)
        described.setdefault(item.name, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=item.dtype), size, []))
    places: dict[Any, Any] = {}
    for name, offsets, sizes, place in placed:
        index = dcp.MetadataIndex(name)
        if offsets is not None:
            chunks = described[name].chunks
            index = dcp.MetadataIndex(name, torch.Size(offsets), len(chunks))
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[index] = _StorageInfo(*place)
    return pickle.dumps(dcp.Metadata(described, paths, places, dcp.StorageMeta()))


def why_not_plain(value: object, classes: Sequence[type]) -> str:
    """Return why `torch.load(weights_only=True)` does not take a value and instances of some classes; "" if it does."""
    try:
        with torch.serialization.safe_globals(list(classes)):
            torch.load(io.BytesIO(_saved(value)), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:  # the latter two: it cannot be saved either
        return str(error).partition("\n")[0]
    return ""


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class DcpFiles:
    """Files `__0_0.distcp`, `__0_1.distcp`, ... of rank 0, to which items are appended.

    Args:
        storage: empty folder.
        max_bytes: bytes after which a new file begins.
        ranks: ranks that write together.

    Attributes:
        names: names of the files.
    """

    def __init__(self, storage: Storage, max_bytes: int, ranks: ToolRanks) -> None:
        self.names: list[str] = []
        self.storage, self.ranks, self._max_bytes = storage, ranks, max_bytes
        self._writer: Any = None
        self._size = 0

    def add(self, data: bytes) -> tuple[str, int, int]:
        """Append an item; return its file, offset and length."""
        if self._writer is not None and self._size + len(data) > self._max_bytes:
            self.finish()
        if self._writer is None:
            name = f"__{self.ranks.rank}_{len(self.names)}.distcp"
            # What is reserved for it is the first item: few exports fill a file of `max_bytes`.
            self._writer, self._size = self.storage.create(NewFile(name, len(data))), 0
            self.names.append(name)  # not before: `discard` leaves a file of this name that another export has made
        self._writer.write_at(self._size, [memoryview(data)])
        self._size += len(data)
        return self.names[-1], self._size - len(data), len(data)

    def finish(self) -> None:
        """Close the last file."""
        if self._writer is not None:
            self._writer.finish(self._size)
            self._writer = None

    def discard(self, others: Iterable[str]) -> None:
        """Remove all files, and others of these names."""
        if self._writer is not None:
            self._writer.abort()
        self.storage.delete([*others, *self.names])


def write_torch_file(
    view: CheckpointView, tree: Mapping[str, Any], path: str, advance: Advance, dtype: torch.dtype | None = None
) -> Written:
    """Write a file of `torch.save(tree)`; bytes are streamed into it, with their CRC32. It appears when it is complete.

    Args:
        view: the checkpoint.
        tree: states as `state_dict_of` returns them, by name.
        path: path of the file.
        advance: function that gets the number of bytes written.
        dtype: dtype to which tensors are converted; None leaves them as they are.
    """
    entries: list[Entry] = []
    known: dict[Any, torch.Tensor] = {}
    read: dict[int, torch.Tensor] = {}  # tensors among plain values, such as a learning rate, by identity

    def stand_in(entry: Entry | torch.Tensor) -> torch.Tensor:
        if isinstance(entry, torch.Tensor):
            found = entry.detach().clone(memory_format=torch.contiguous_format)
            known[found] = read[id(found)] = found
            return found
        stored = view.stored_under(entry.key)
        if stored not in known:
            entries.append(entry)
            # Nothing touches this memory.
            known[stored] = torch.empty(entry.shape, dtype=dtype or entry.dtype, device="cpu")
        return known[stored]

    done = 0
    temporary = f"{path}.exporting-{secrets.token_hex(6)}"
    outline = f"{temporary}-outline"
    try:
        with torch.serialization.skip_data():
            # A sparse file: without the bytes of tensors.
            stood_in = mapped(dict(tree), stand_in, (Entry, torch.Tensor))
            torch.save({name: _as_module_state(state) for name, state in stood_in.items()}, outline)
        pieces = view.stream([entry.key for entry in entries if entry.nbytes], _PIECE_BYTES)
        with zipfile.ZipFile(outline) as template, zipfile.ZipFile(temporary, "w", allowZip64=True) as target:
            members = {info.filename: info for info in template.infolist()}
            of_tensors = _members_of(members, list(known.values()))
            for name, info in members.items():
                member = _aligned(name, target)
                tensor = of_tensors.get(name)
                with target.open(member, "w", force_zip64=True) as file:
                    if tensor is None:
                        file.write(template.read(info))
                        continue
                    if id(tensor) in read:
                        file.write(memoryview(flat_bytes(tensor).numpy()))
                        continue
                    left = tensor.numel()
                    while left:
                        _, _, data = next(pieces)
                        file.write(memoryview(flat_bytes(data.to(tensor.dtype)).numpy()))
                        left -= data.numel()
                        done += data.nbytes
                        advance(done)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(os.path.dirname(path))
    finally:
        for leftover in (outline, temporary):
            if os.path.exists(leftover):
                os.unlink(leftover)
    return Written([os.path.basename(path)], len(known), done)


def write_object(value: object, path: str) -> None:
    """Write a file of `torch.save` of an object in memory."""
    with open(path, "wb") as file:
        file.write(_saved(value))
        os.fsync(file.fileno())


def _as_module_state(state: Any) -> Any:
    """Return named tensors as `state_dict` of a module returns them, which shows that they are a state."""
    if type(state) is not dict or not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        return state
    found = OrderedDict(state)
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    return found


def _members_of(members: Mapping[str, zipfile.ZipInfo], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensor of each member that holds one: torch numbers storages in the order in which it meets them."""
    data = [name for name in members if name.rpartition("/")[0].endswith("/data")]
    by_number = sorted(data, key=lambda name: int(name.rpartition("/")[2]))
    if [members[name].file_size for name in by_number] != [tensor.nbytes for tensor in tensors]:
        raise UsageError(f"torch {torch.__version__} numbers the tensors of a file in another way: use format='dcp'")
    return dict(zip(by_number, tensors, strict=True))


def _aligned(name: str, target: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return a member whose data begins at a multiple of 64 bytes."""
    info = zipfile.ZipInfo(name)
    zip64 = 20  # extra field that `force_zip64` adds in front of the others
    begin = target.fp.tell() + _LOCAL_HEADER + len(name.encode()) + zip64 + 4  # type: ignore[union-attr]
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info
