"""Hostile files: what a pickle, a zip file or a file of torch.save can do to its reader. `corpus()` makes them all."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from typing import Any

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def zipped(data: bytes, storages: dict[str, bytes] | None = None, **members: bytes) -> bytes:
    """Return a file as torch.save writes it, around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("x/data.pkl", data)
        for name, content in members.items():
            file.writestr(f"x/{name}", content)
        for key, content in (storages or {}).items():
            file.writestr(f"x/data/{key}", content)
    return out.getvalue()


def old(data: bytes, keys: Any = (), tail: bytes = b"") -> bytes:
    """Return a file of the old format, around a pickle."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    head = b"".join(pickle.dumps(part, 2) for part in (MAGIC, PROTOCOL, system))
    return head + data + pickle.dumps(list(keys), 2) + tail


def storage(key: bytes = b"0", count: int = 4, kind: bytes = b"FloatStorage") -> bytes:
    """Return the opcodes of a storage."""
    number = b"\x8a\x09" + count.to_bytes(9, "little", signed=True)
    return b"(X\x07\0\0\0storagectorch\n" + kind + b"\n" + text(key) + b"X\x03\0\0\0cpu" + number + b"tQ"


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def ints(*values: int) -> bytes:
    return b"(" + b"".join(b"\x8a\x09" + v.to_bytes(9, "little", signed=True) for v in values) + b"t"


def tensor(ref: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return a pickle of one tensor."""
    start = b"\x8a\x09" + offset.to_bytes(9, "little", signed=True)
    return b"\x80\x02" + TENSOR + b"(" + ref + start + ints(*size) + ints(*stride) + b"\x89)tR."


def patched(data: bytes, at: int, fields: bytes) -> bytes:
    return data[:at] + fields + data[at + len(fields) :]


def pickles() -> dict[str, bytes]:
    """Return hostile pickles by name."""
    calls = {
        "os_system": b"cos\nsystem\n(S'touch /tmp/bytecheckpoint-hostile'\ntR.",
        "posix_system": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        "eval": b'cbuiltins\neval\n(S\'__import__("os").system("id")\'\ntR.',
        "exec": b"c__builtin__\nexec\n(S'import os'\ntR.",
        "inst": b"(S'id'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'id'\no.",
        "newobj": b"\x80\x02csubprocess\nPopen\n(S'id'\nt\x81.",
        "newobj_ex": b"\x80\x04\x8c\nsubprocess\x8c\x05Popen\x93)}\x8c\x04args\x8c\x02idsn\x92.".replace(
            b"sn\x92", b"s\x92"
        ),
        "open": b"cbuiltins\nopen\n(S'/etc/passwd'\ntR.",
        "import": b"cbuiltins\n__import__\n(S'antigravity'\ntR.",
        "runpy": b"crunpy\n_run_code\n(S'1'\n}tR.",
        "module_with_effects": b"cthis\ns\n.",
        "getattr_chain": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'id'\ntR.",
        "partial": b"cfunctools\npartial\n(cos\nsystem\nS'id'\ntR(tR.",
        "apply": b"coperator\nmethodcaller\n(S'system'\nS'id'\ntR(cos\n__dict__\ntR.",
        "torch_load": b"ctorch\nload\n(S'/etc/passwd'\ntR.",
        "numpy_load": b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
        "codecs": b"c_codecs\nencode\n(S'x'\nS'os'\ntR.",
        "rebuild_calls": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\nsystem\n(S'id'\nt}tR.",
        "build_setstate": b"\x80\x04\x8c\x02os\x8c\x06system\x93}\x8c\x0c__setstate__\x8c\x02os\x8c\x06system\x93sb.",
        "build_on_meaning": b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__defaults__'\n(I1\ntstb.",
        "build_slots": b"ccollections\nOrderedDict\n)R(N}S'__class__'\ncos\nsystem\nstb.",
        "ext1": b"\x80\x02\x82\x01.",
        "ext4": b"\x80\x02\x84\x01\x00\x00\x01.",
        "persistent_text": b"P../../etc/passwd\n.",
        "next_buffer": b"\x80\x05\x97.",
    }
    doubled = b"".join(bytes([0x68, k, 0x68, k, 0x86, 0x94]) for k in range(60))
    colliding = b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N" for k in range(50_000))
    bombs = {
        "deep_list": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "deep_list_in_a_long_pickle": b"\x80\x04" + b"]" * 150_000 + b"a" * 149_999 + b"." + b"N" * 1000,
        "deep_key": b"\x80\x04}N" + b"\x85" * 1_000_000 + b"Ns.",
        "deep_dict": b"\x80\x04" + b"}N" * 100_000 + b"N" + b"s" * 100_000 + b".",
        "deep_frozenset": b"\x80\x04" + b"(" * 50_000 + b"N" + b"\x91" * 50_000 + b".",
        "memo_bomb": b"\x80\x04K\x01\x94" + doubled + b".",
        "memo_bomb_of_lists": b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (k, k) for k in range(60)) + b".",
        "memo_bomb_as_key": b"\x80\x04K\x01\x94" + doubled + b"}h<Ns.",
        "memo_index": b"\x80\x02Nr\xff\xff\xff\xff.",
        "memo_index_text": b"Np99999999999999999999\n.",
        "memo_get": b"\x80\x02j\xff\xff\xff\xff.",
        "long_string": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0f" + b"x.",
        "long_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "long_bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"x.",
        "long_int": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "long_int_text": b"L" + b"9" * 1_000_000 + b"L\n.",
        "int_text": b"I" + b"9" * 60_000 + b"\n.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        "equal_hashes": b"\x80\x02}(" + colliding + b"u.",
        "string_many_times": b"\x80\x04" + text(b"x" * 1_000_000) + b"\x94](" + b"h\0" * 100_000 + b"e.",
        "big_bytearray": b"cbuiltins\nbytearray\n(\x8a\x06\0\0\0\0\0\x7ftR.",
        "many_marks": b"(" * 3_000_000 + b".",
        "cycle": b"\x80\x04]\x94h\0a.",
        "numpy_shape": b"cnumpy\nndarray\n(\x8a\x06\0\0\0\0\0\x7ftR.",
        "no_stop": b"\x80\x02]",
        "bad_opcode": b"\x80\x02\xff.",
        "protocol": b"\x80\x63N.",
        "empty": b"",
        "stack_underflow": b"\x80\x02s.",
    }  # fmt: skip
    return {**calls, **bombs}


def corpus() -> dict[str, bytes]:
    """Return hostile files of torch.save by name."""
    files: dict[str, bytes] = {}
    for name, data in pickles().items():
        files[f"{name}.zip.pt"] = zipped(data)
        if len(data) < 10_000:
            files[f"{name}.old.pt"] = old(data)
    files |= _tensors() | _zips()
    return files


def _tensors() -> dict[str, bytes]:
    content = {"0": b"\0" * 16}
    cases = {
        "beyond_storage": tensor(storage(), 0, (5,), (1,)),
        "beyond_by_offset": tensor(storage(), 3, (2,), (1,)),
        "beyond_by_stride": tensor(storage(), 0, (2, 2), (3, 1)),
        "huge_shape": tensor(storage(), 0, (1 << 61, 1 << 61), (0, 0)),
        "huge_stride": tensor(storage(), 0, (2,), (1 << 62,)),
        "huge_empty": tensor(storage(), 0, (0, 1 << 61, 1 << 61), (1, 1, 1)),
        "negative_offset": tensor(storage(), -1, (1,), (1,)),
        "negative_stride": tensor(storage(), 3, (2,), (-1,)),
        "negative_size": tensor(storage(), 0, (-1,), (1,)),
        "many_dimensions": tensor(storage(), 0, (1,) * 65, (1,) * 65),
        "strides_missing": tensor(storage(), 0, (2, 2), (1,)),
        "storage_of_2_60": tensor(storage(count=1 << 60), 0, (1 << 60,), (1,)),
        "negative_storage": tensor(storage(count=-1), 0, (1,), (1,)),
        "storage_larger_than_file": tensor(storage(count=5), 0, (5,), (1,)),
        "storage_missing": tensor(storage(b"7"), 0, (1,), (1,)),
        "storage_outside": tensor(storage(b"../../etc/passwd"), 0, (1,), (1,)),
        "storage_of_no_class": tensor(storage(kind=b"EvilStorage"), 0, (1,), (1,)),
    }
    files = {f"{name}.zip.pt": zipped(data, content) for name, data in cases.items()}
    tail = struct.pack("<q", 4) + b"\0" * 16
    files |= {f"{name}.old.pt": old(data, ["0"], tail) for name, data in cases.items()}
    sound = tensor(storage(), 0, (4,), (1,))
    files["old_count_of_2_60.pt"] = old(sound, ["0"], struct.pack("<q", 1 << 60) + b"\0" * 16)
    files["old_keys_twice.pt"] = old(sound, ["0", "0"], tail)
    files["old_keys_are_calls.pt"] = old(sound, [], b"")[: -len(pickle.dumps([], 2))] + b"cos\nsystem\n(S'id'\ntR."
    return files


def _zips() -> dict[str, bytes]:
    """Return zip files whose directory lies."""
    sound = zipped(tensor(storage(), 0, (4,), (1,)), {"0": b"\0" * 16})
    end = sound.rindex(b"PK\x05\x06")
    (directory,) = struct.unpack_from("<I", sound, end + 16)
    second = sound.index(b"PK\x01\x02", directory + 4)
    names = {"dots": b"x/../../", "absolute": b"/x/data0", "backslash": b"x\\..\\a0", "no_text": b"x/\xff\xff\xff/00"}
    (header,) = struct.unpack_from("<I", sound, second + 42)
    files = {
        "overlapping": patched(sound, second + 42, struct.pack("<I", 0)),
        "outside": patched(sound, second + 42, struct.pack("<I", 1 << 30)),
        "size_outside": patched(sound, second + 20, struct.pack("<II", 1 << 30, 1 << 30)),
        "size_differs": patched(sound, second + 20, struct.pack("<II", 8, 8)),
        "stored_differs": patched(sound, second + 20, struct.pack("<II", 8, 16)),
        "zip64_missing": patched(sound, second + 20, b"\xff" * 8),
        "encrypted": patched(sound, second + 8, struct.pack("<H", 1)),
        "method": patched(sound, second + 10, struct.pack("<H", 99)),
        "header_elsewhere": patched(sound, second + 42, struct.pack("<I", header + 1)),
        "directory_outside": patched(sound, end + 16, struct.pack("<I", 0xFFFFFFF0)),
        "directory_size": patched(sound, end + 12, struct.pack("<I", 0xFFFFFFF0)),
        "count": patched(sound, end + 8, struct.pack("<HH", 60000, 60000)),
        "disks": patched(sound, end + 4, struct.pack("<H", 3)),
        "no_directory": sound[:end],
        "two_names": zipped(b"N.", {"0": b"", "1": b""}).replace(b"x/data/1", b"x/data/0"),
        "pickle_flipped": patched(sound, sound.index(b"_rebuild"), b"_rebuilt"),
        "zip64_lie": sound[:end]
        + b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 62, 1 << 61)
        + b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1) + patched(sound[end:], 8, b"\xff" * 12),
        "zip64_locator": sound[:end] + b"PK\x06\x07" + struct.pack("<IQI", 0, 1 << 60, 1) + sound[end:],
        "big_endian": zipped(b"\x80\x02N.", byteorder=b"big"),
        "byteorder_huge": zipped(b"\x80\x02N.", byteorder=b"little" * 1000),
        "no_pickle": zipped(b"N.").replace(b"data.pkl", b"data.pkx"),
    }  # fmt: skip
    for name, value in names.items():
        files[f"name_{name}"] = patched(sound, second + 46, value)
    return {f"{name}.pt": data for name, data in files.items()}


def folders() -> dict[str, dict[str, bytes]]:
    """Return hostile folders of Hugging Face by name: files by name, the first of which is the hostile one."""
    found = {name: {"model.safetensors": data} for name, data in _headers().items()}
    index, file = "model.safetensors.index.json", {"a.safetensors": safetensors({"w": _entry((4,), 0, 16)}, 16)}
    indexes = _texts() | {
        "outside": _json(weight_map={"w": "../a.safetensors"}),
        "absolute": _json(weight_map={"w": "/etc/passwd"}),
        "missing_file": _json(weight_map={"w": "b.safetensors"}),
        "missing_tensor": _json(weight_map={"v": "a.safetensors"}),
        "no_text": _json(weight_map={"w": 1}),
        "file_is_a_list": _json(weight_map={"w": ["a.safetensors"]}),
        "no_map": _json(metadata={}),
        "many_files": _json(weight_map={f"w{n}": f"{n}.safetensors" for n in range(200_000)}),
    }
    found |= {f"index_{name}": {index: data, **file} for name, data in indexes.items()}
    return found | {
        f"config_{name}": {"config.json": data, "model.safetensors": file["a.safetensors"]}
        for name, data in _texts().items()
    }


def safetensors(header: object, length: int) -> bytes:
    """Return a file of safetensors with a header and some bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * length


def _entry(shape: object, begin: int, end: int, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _json(**content: object) -> bytes:
    return json.dumps(content).encode()


def _texts() -> dict[str, bytes]:
    """Return texts that are no JSON, or too much of it."""
    return {
        "empty": b"",
        "cut": b'{"a": {"b": 1',
        "no_utf8": b'{"a": "\xff\xfe"}',
        "list": b"[]",
        "pickle": b"cos\nsystem\n(S'id'\ntR.",
        "surrogate": b'{"\\ud800": 1}',
        "deep_list": b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        "deep_dict": b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000,
        "deep_in_python": b'{"b": NaN, "a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        "many_lists": b'{"a": [' + b"[]," * 20_000_000 + b"[]]}",
        "many_dicts": b'{"a": [' + b"{}," * 10_000_000 + b"{}]}",
        "many_numbers": b'{"b": NaN, "a": [' + b"300," * 10_000_000 + b"1]}",
        "long_number": b'{"b": NaN, "a": ' + b"9" * 10_000_000 + b"}",
    }


def _headers() -> dict[str, bytes]:
    """Return files of safetensors whose headers lie."""
    sound = {"w": _entry((4,), 0, 16)}
    cases = {
        "overlap": {**sound, "v": _entry((4,), 0, 16)},
        "gap": {**sound, "v": _entry((1,), 20, 24)},
        "outside": {"w": _entry((4,), 0, 1 << 60)},
        "negative": {"w": _entry((4,), -16, 0)},
        "backwards": {"w": _entry((4,), 16, 0)},
        "huge_offset": {"w": _entry((4,), 1 << 70, 1 << 71)},
        "offset_is_no_number": {"w": {**_entry((4,), 0, 16), "data_offsets": ["0", "16"]}},
        "offsets_missing": {"w": {"dtype": "F32", "shape": [4]}},
        "shape_of_2_60": {"w": _entry((1 << 60,), 0, 16)},
        "shape_overflows": {"w": _entry((1 << 32, 1 << 32, 1 << 32), 0, 16)},
        "shape_overflows_to_size": {"w": _entry(((1 << 62) + 1, 4), 0, 16)},
        "shape_negative": {"w": _entry((-4,), 0, 16)},
        "shape_of_floats": {"w": _entry((4.5,), 0, 16)},
        "shape_of_many": {"w": _entry((1,) * 1_000_000, 0, 4)},
        "dtype_unknown": {"w": _entry((4,), 0, 16, "os.system")},
        "dtype_is_a_list": {"w": _entry((4,), 0, 16, ["F32"])},
        "entry_is_a_number": {"w": 1},
        "entries_are_numbers": {f"w{n}": n for n in range(300_000)},
        "metadata_is_a_list": {**sound, "__metadata__": ["format", "pt"]},
        "metadata_is_deep": {**sound, "__metadata__": {"format": {"a": {}}}},
        "claims_to_be_own": {**sound, "__metadata__": {"bytecheckpoint.version": "1"}},
        "sharding": {**sound, "__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [-1]}}'}},
        "sharding_of_another": {**sound, "__metadata__": {"DCP_SHARDING_INFO": "{}"}},
        "sharding_is_deep": {**sound, "__metadata__": {"DCP_SHARDING_INFO": "[" * 100_000}},
        "sharding_overflows": {
            **sound, "__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4611686018427387903]}}'}
        },
    }  # fmt: skip
    found = {name: safetensors(header, 16) for name, header in cases.items()}
    found |= {f"header_{name}": safetensors(text, 16) for name, text in _texts().items()}
    text = json.dumps(sound).encode()
    lengths = {
        "zero": 0,
        "one": 1,
        "longer": len(text) + 17,
        "shorter": len(text) - 1,
        "2_31": 1 << 31,
        "2_63": 1 << 63,
    }
    found |= {f"length_{name}": struct.pack("<Q", n) + text + b"\0" * 16 for name, n in lengths.items()}
    return found | {"no_bytes": b"", "length_cut": b"\x10\0", "tail_missing": safetensors(sound, 15)}
