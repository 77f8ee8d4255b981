from __future__ import annotations

import json
import math
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.checksums import block_bytes, block_sums
from bytecheckpoint.representation.dtypes import dtype_names, itemsize, safetensors_code
from bytecheckpoint.representation.header_reader import header_bytes_needed, parse_header
from bytecheckpoint.representation.header_writer import HeaderTemplate, build_header
from bytecheckpoint.representation.names import file_stem
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.storage_file import StoredEntry, ViewTensor, safetensors_keys
from tests.support.processes import run_program

FOLDER = Path(__file__).parents[1] / "golden/v1"
GENERATION, LATER = "0123456789abcdef01234567", "f" * 24
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
HOSTILE = [
    "", "__metadata__", "__metadata__#2", "a", "a#2", "a[0:1]", "state/a/b", 'q"\\', "\0\n", "\ud800", "\ufdd0d800",
    "ä" * 999, '"bytecheckpoint.self":"0"', '{"a":1}', "../../etc/passwd", "//values",
]  # fmt: skip


def placed(entries: list[StoredEntry]) -> list[StoredEntry]:
    """The entries with byte ranges that tile a data section."""
    result, end = [], 0
    for entry in entries:
        length = math.prod(entry.lengths) * itemsize(entry.dtype)
        result.append(replace(entry, byte_offset=end, byte_length=length))
        end += length
    return result


def whole(fqn: str, dtype: str, shape: tuple[int, ...], slot: str = "", **fields: Any) -> StoredEntry:
    return StoredEntry(TensorKey("model", fqn, slot), dtype, shape, (0,) * len(shape), shape, **fields)


def template(entries: list[StoredEntry], **options: Any) -> HeaderTemplate:
    length = sum(entry.byte_length for entry in entries)
    options = {"state": "model", "rank": 3, "world_size": 8, "generation": GENERATION, "siblings": (), **options}
    return build_header(entries, data_length=length, block_bytes=block_bytes(length), **options)


def file_of(entries: list[StoredEntry], data: bytes | None = None) -> bytes:
    header = template(entries)
    if data is None:
        data = np.random.default_rng(0).integers(0, 2, header.data_length, np.uint8).tobytes()
    return header.render(block_sums(data, header.block_bytes)) + data


@st.composite
def entry_lists(draw: st.DrawFn) -> list[StoredEntry]:
    entries = []
    for _ in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        offsets = tuple(draw(st.integers(0, n)) for n in shape)
        lengths = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
        slot = draw(st.sampled_from(["", "b", "//values"]))
        key = TensorKey(draw(ANY_TEXT), draw(ANY_TEXT | st.sampled_from(HOSTILE)), slot)
        aliases = tuple(draw(st.lists(ANY_TEXT, max_size=2)))
        dtype, requires_grad = draw(st.sampled_from(dtype_names())), draw(st.booleans())
        owner = draw(st.integers(-1, 9))
        entries.append(StoredEntry(key, dtype, shape, offsets, lengths, aliases, requires_grad, owner))
    return placed(entries)


@given(entry_lists(), ANY_TEXT)
def test_headers_round_trip_and_safetensors_reads_them(entries: list[StoredEntry], state: str) -> None:
    made = template(entries, state=state)
    sums = np.arange(made.blocks, dtype=np.uint64) + np.uint64(2**63)
    text = made.render(sums, LATER)
    assert len(text) == made.data_offset and made.data_offset % 4096 == 0
    assert header_bytes_needed(text[:8]) == header_bytes_needed(text) == made.data_offset
    assert header_bytes_needed(text[:7]) == 8
    header = parse_header(text + b"data")
    assert list(header.entries) == entries and not header.foreign
    assert (header.state, header.rank, header.world_size, header.generation) == (state, 3, 8, LATER)
    assert header.block_bytes == made.block_bytes and header.sums.tolist() == sums.tolist()
    assert (header.data_offset, header.data_length) == (made.data_offset, made.data_length)
    opened = dict(safetensors.deserialize(text + bytes(made.data_length)))
    assert len(opened) == len(entries) == len(set(safetensors_keys(entries)))


def test_a_header_lists_the_files_of_its_rank() -> None:
    siblings = ("model/rank-00003", "model/rank-00003-p001", "kind-0123456789abcdef/values-00003")
    made = template(placed([whole("w", "float32", (3,))]), siblings=siblings)
    sums = np.zeros(made.blocks, np.uint64)
    for count in (0, 4, 10**8 - 1):
        header = parse_header(made.render(sums, LATER, count))
        assert (header.files, header.siblings) == (count, siblings)
    # Files of the first writers do not say it.
    (old,) = FOLDER.glob("model/rank-00001.*")
    assert file_stem(str(old.relative_to(FOLDER))) == "model/rank-00001"
    header = parse_header(old.read_bytes())
    assert (header.files, header.siblings) == (0, ())


def test_tensors_open_under_their_names(tmp_path: Path) -> None:
    piece = StoredEntry(TensorKey("model", "layers.0.weight"), "float32", (512, 2048), (0, 1024), (4, 8))
    entries = placed(
        [whole("w", "float32", (2, 3)), piece, whole("w", "float32", (), "step"), whole("e", "int64", (0, 7))]
    )
    data = np.arange(6 + 32 + 1, dtype=np.float32).tobytes()
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(file_of(entries, data))
    tensors = safetensors.torch.load_file(path)
    assert set(tensors) == {"w", "layers.0.weight[0:4,1024:1032]", "state/w/step", "e"}
    assert torch.equal(tensors["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tensors["layers.0.weight[0:4,1024:1032]"], torch.arange(6.0, 38.0).reshape(4, 8))
    assert torch.equal(tensors["state/w/step"], torch.tensor(38.0)) and tensors["e"].shape == (0, 7)
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt" and opened.metadata()["bytecheckpoint.generation"] == GENERATION


@pytest.mark.parametrize("dtype", dtype_names())
def test_every_dtype_is_readable_by_safetensors(dtype: str) -> None:
    for shape in ((), (3,), (2, 4), (0, 2)):
        entries = placed([whole("x", dtype, shape)])
        data = bytes(i % 2 for i in range(entries[0].byte_length))
        tensor = safetensors.torch.load(file_of(entries, data))["x"]
        if safetensors_code(dtype):
            assert tensor.dtype == getattr(torch, dtype) and tensor.shape == shape
        else:
            assert tensor.dtype == torch.uint8
        assert tensor.flatten().view(torch.uint8).numpy().tobytes() == data


def test_hostile_names_are_all_different(tmp_path: Path) -> None:
    boxed = StoredEntry(TensorKey("model", "a"), "uint8", (2,), (0,), (1,))
    slotted = [whole("a", "uint8", (1,), "b"), whole("a/b", "uint8", (1,), "c"), whole("a", "uint8", (1,), "b/c")]
    entries = placed([whole(name, "uint8", (1,)) for name in HOSTILE * 2] + [boxed, *slotted])
    path = tmp_path / "x.safetensors"
    content = file_of(entries, bytes(range(len(entries))))
    path.write_bytes(content)
    tensors = safetensors.torch.load_file(path)
    assert sorted(int(t) for t in tensors.values()) == list(range(len(entries)))
    assert list(parse_header(content).entries) == entries


def test_rendering_again_changes_only_what_it_should() -> None:
    entries = placed([whole("w", "float32", (100000,))])
    made = template(entries)
    assert made.blocks == 7
    sums = np.arange(7, dtype=np.uint64)
    assert made.render(sums) == made.render(sums, GENERATION) != made.render(sums, LATER)
    assert parse_header(made.render(sums)).generation == GENERATION
    with pytest.raises(AssertionError):
        made.render(sums[:-1])


def test_foreign_files_hold_whole_tensors_of_the_model() -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "c": torch.ones(2, dtype=torch.complex64),
        "s": torch.tensor(3, dtype=torch.int16),
        "f": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    content = safetensors.torch.save(tensors, {"who": "someone"})
    header = parse_header(content)
    assert header.foreign and header.metadata == {"who": "someone"}
    assert header.state == "model" and header.block_bytes == 0
    assert {(e.key.fqn, e.dtype, e.global_shape) for e in header.entries} == {
        (name, str(t.dtype)[6:], tuple(t.shape)) for name, t in tensors.items()
    }
    for entry in header.entries:
        start = header.data_offset + entry.byte_offset
        expected = tensors[entry.key.fqn].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[start : start + entry.byte_length] == expected
    assert len(content) == header.data_offset + header.data_length


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    entries = placed([whole("w", "float32", (2, 3), aliases=("v",)), whole("x", "complex64", ())])
    made = template(entries)
    text = made.render(np.full(made.blocks, 99, np.uint64))
    for place in range(len(text)):
        damaged = bytearray(text)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            parse_header(bytes(damaged), file="f")
    for length in range(0, len(text), 7):
        with pytest.raises(CorruptCheckpointError):
            parse_header(text[:length], file="f")


@given(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["__metadata__", "x", "dtype", "shape", "data_offsets"]), inner)
        ),
    ),
)
def test_nonsense_raises_only_our_errors(noise: bytes, value: Any) -> None:
    for body in (noise, json.dumps(value).encode(), b"[" * 50000, b'{"x":' * 50000):
        try:
            header = parse_header(struct.pack("<Q", len(body)) + body)
        except CheckpointError:
            continue
        assert header.foreign and not header.entries  # "{}" is sound


def resealed(text: bytes, old: bytes, new: bytes) -> bytes:
    """A header with `old` replaced by `new` of the same length and its own checksum made right again."""
    assert len(old) == len(new) and old in text
    changed = bytearray(text.replace(old, new, 1))
    at = changed.index(b'"bytecheckpoint.self":"') + 23
    changed[at : at + 16] = b"0" * 16
    changed[at : at + 16] = xxhash.xxh3_64_hexdigest(changed).encode()
    return bytes(changed)


def refused(text: bytes, old: bytes, new: bytes) -> None:
    """Check that a header is damaged with `old` replaced by `new`."""
    with pytest.raises(CorruptCheckpointError):
        parse_header(resealed(text, old, new))


def test_headers_that_contradict_themselves_are_corrupt() -> None:
    entries = placed([whole("w", "float32", (2, 3)), whole("x", "uint8", (1,))])
    made = template(entries)
    text = made.render(np.zeros(made.blocks, np.uint64))
    assert list(parse_header(resealed(text, b'rank":"3"', b'rank":"4"')).entries) == entries
    for old, new in [
        (b'"x":{', b'"y":{'),
        (b'"F32","shape":[2,3]', b'"F32","shape":[3,2]'),
        (b"[24,25]", b"[25,26]"),
        (b"[0,0],[2,3]", b"[1,0],[2,3]"),
        (b'block_bytes":"65536"', b'block_bytes":"00000"'),
        (b'block_bytes":"65536"', b'block_bytes":"-5536"'),
        (b'generation":"0', b'generation":"G'),
        (b"bytecheckpoint.entries", b"bytecheckpoint.entriez"),
    ]:
        refused(text, old, new)
    with pytest.raises(IncompatibleCheckpointError, match="version 3"):
        parse_header(resealed(text, b'version":"1"', b'version":"3"'))
    with pytest.raises(IncompatibleCheckpointError, match="float99"):
        parse_header(resealed(text, b"float32", b"float99"))


def rows_of(fqn: str, first: int, last: int) -> StoredEntry:
    return StoredEntry(TensorKey("model", fqn, ""), "float32", (6, 2), (first, 0), (last - first, 2))


def test_entries_make_up_tensors_of_another_program() -> None:
    entries = placed([rows_of("qkv", 0, 2), rows_of("qkv", 4, 6), rows_of("qkv", 2, 4), rows_of("up", 0, 6)])
    named = [ViewTensor("q", (4, 2), 2), ViewTensor("k", (2, 2), 1), ViewTensor("v", (3, 4), 1)]
    made = template(entries, named=named)
    text = made.render(np.zeros(made.blocks, np.uint64))
    header = parse_header(text)
    assert list(header.entries) == entries and header.names == ("q", "k", "v")
    data = np.arange(made.data_length // 4, dtype=np.float32)
    found = safetensors.torch.load(text + data.tobytes())
    assert {name: tuple(value.shape) for name, value in found.items()} == {"q": (4, 2), "k": (2, 2), "v": (3, 4)}
    for old, new in [
        (b'"F32","shape":[4,2]', b'"F16","shape":[4,2]'),
        (b'"F32","shape":[4,2]', b'"F32","shape":[4,3]'),
        (b"[0,32]", b"[0,31]"),
        (b"[0,32]", b"[0,48]"),
        (b"[0,32]", b"[0,40]"),
        (b"[4,0],[2,2]", b"[5,0],[2,2]"),
        (b'"v":{"dtype":"F32","shape":[3,4],"data_offsets":[48,96]}}', b"}" + b" " * 56),
        (b'version":"2"', b'version":"1"'),
    ]:
        refused(text, old, new)


def test_headers_longer_than_safetensors_allows_are_refused() -> None:
    with pytest.raises(UsageError, match="spread the tensors"):
        template(placed([whole("n" * 5000, "uint8", (1,))]), max_header_bytes=5000)


def test_fifty_thousand_entries_take_a_fraction_of_a_second() -> None:
    entries = placed(
        [whole(f"model.layers.{i}.self_attn.q_proj.weight", "float32", (4, 4), "exp_avg") for i in range(50000)]
    )
    start = time.process_time()
    made = template(entries)
    built = time.process_time() - start
    start = time.process_time()
    made.render(np.zeros(made.blocks, np.uint64), LATER)
    assert built < 1.5 and time.process_time() - start < 0.2  # about 0.25 and 0.005 on a calm machine


_READ_AT_ONCE = """
import importlib, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from bytecheckpoint.representation import header_reader, storage_file

files = [file.read_bytes() for file in Path(sys.argv[1]).glob("*/*.safetensors")]
together = threading.Barrier(32, timeout=60)
sys.setswitchinterval(1e-6)

def read(number):
    together.wait()
    return len(header_reader.parse_header(files[number % len(files)]).entries)

with ThreadPoolExecutor(32) as pool:
    for _ in range(150):  # new modules have new types, so every round is a first use
        importlib.reload(storage_file), importlib.reload(header_reader)
        assert all(pool.map(read, range(32)))
"""


def test_threads_of_a_fresh_process_read_headers_at_the_same_time() -> None:
    """msgspec (0.22) crashes in most runs of this program if `header_reader` makes no decoders at import."""
    done = run_program(_READ_AT_ONCE, FOLDER, fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]
