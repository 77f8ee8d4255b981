"""Plain values: exact round trips, refusals by name, determinism, hostile bytes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import pickle
import random
import struct
import time
import types
import typing
import uuid
import zoneinfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.values.codec import (
    MAX_DEPTH,
    TensorRef,
    decode,
    encode,
    equal,
    key_of_path,
    leaves_with_paths,
    register,
)
from bytecheckpoint.representation.values.codes import Code
from bytecheckpoint.tuning import tuned


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(typing.NamedTuple):
    x: int
    y: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    derived: float = dataclasses.field(init=False, default=0.0)


class Opaque:
    def __init__(self, n: int) -> None:
        self.n = n


for _cls in (Colour, Level, Flags, Point, Config):
    register(_cls, name=f"tests.{_cls.__name__}")
register(Opaque, name="tests.Opaque", encode=lambda o: {"n": o.n, "t": torch.ones(1)}, decode=lambda d: Opaque(d["n"]))


def no_tensor(path: tuple[object, ...], tensor: torch.Tensor) -> str:
    raise AssertionError(f"unexpected tensor at {path}")


def enc(value: object) -> bytes:
    return encode(value, on_tensor=no_tensor)


def dec(blob: bytes) -> typing.Any:
    return decode(blob, on_tensor=TensorRef)


#: What the decoder may raise.
REFUSALS = (CorruptCheckpointError, IncompatibleCheckpointError)

STRUCT = np.dtype(
    {"names": ["a", "b", "c"], "formats": ["<f4", (">i2", (2, 3)), [("d", "u1"), ("e", "<M8[ns]")]],
     "offsets": [4, 8, 24], "itemsize": 40}
)  # fmt: skip

EXAMPLES: list[object] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**5000, -(10**5000),
    0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, "", "ünï\0", "\ud800", "a\udfffb", b"", b"\xff\0", bytearray(b"xy"),
    complex(-0.0, math.nan), (), (1,), [], {}, set(), frozenset(), [()], ([],), {"a": (1, [2, {3}])},
    {1: "int", "1": "str", (1, 2): "tuple", None: 0, True + 1: 1, 2.5: 0, b"k": 1, frozenset({1}): 2},
    {True: 1}, {1: 1}, {1.0: 1}, {"\udc80": 1, "b": (2,)}, {"big": 2**70, "s": "\ud8ff"}, [2**70, None, "\ud8ff"],
    {2**70, "a", 1.5, None}, {(1, 2), (3,)}, {"b", "a", "c"}, frozenset({b"x", 3}), {math.nan},
    range(3), range(2**70, 0, -3), slice(None, 3), slice(1, (2,), "x"),
    collections.OrderedDict([("z", 1), ("a", (2,))]), collections.OrderedDict([(2, 1), (1, 2)]),
    collections.defaultdict(dict, {1: {2: 3}}), collections.defaultdict(None, a=1), collections.Counter("abca"),
    collections.deque([1, (2,)], 5), collections.deque(), types.SimpleNamespace(a=1, b=(2,)),
    argparse.Namespace(lr=1e-3, dtype=torch.bfloat16, betas=(0.9, 0.95)),
    dt.datetime(2024, 2, 29, 1, 2, 3, 4), dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3.5))),
    dt.timezone(dt.timedelta(hours=1), "CET"), dt.date(2024, 1, 1), dt.time(1, 2, 3, 4, fold=1),
    dt.time(1, tzinfo=dt.UTC), dt.timedelta(-3, 5, 7), dt.timedelta.max,
    pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("bad\udc80"),
    uuid.UUID(int=5), decimal.Decimal("1.10"), decimal.Decimal("-0"), decimal.Decimal("sNaN12"),
    decimal.Decimal("1E+999999"), fractions.Fraction(-3, 10**50),
    np.float32(1.5), np.float64(math.nan), np.float16(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1 + 2j), np.datetime64("2024-01-01T00:00:00", "ns"), np.datetime64("NaT", "D"), np.timedelta64(3, "h"),
    np.str_("héllo\0"), np.str_(""), np.bytes_(b"a\0"), np.void(b"abc"), np.zeros(1, STRUCT)[0],
    np.arange(6).reshape(2, 3), np.arange(6, dtype=">i4")[::-2], np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3.5), np.zeros((0, 3), np.float16), np.array(["a", "bcd"]), np.array([b"a", b"bcd"]),
    np.array(["2024-01-01", "NaT"], "M8[25s]"), np.array([True, False]), np.zeros((2, 2), STRUCT), np.zeros((0,), "V8"),
    np.dtype("<f4"), np.dtype(STRUCT), torch.float8_e4m3fn, torch.bool, torch.device("cuda", 3), torch.device("meta"),
    torch.Size([2, 0, 3]), torch.Size([]), Colour.RED, Level.HIGH, Flags.A | Flags.B, Point(1), Config(0.1, (0.5, 0.6)),
    {Colour.RED: [Point(2, math.nan)], Point(1): 3},
]  # fmt: skip


def check_round_trip(value: object) -> None:
    """Fail unless the value comes back equal, and is encoded to the same bytes again."""
    blob = enc(value)
    back = dec(blob)
    assert equal(value, back)
    assert enc(back) == blob


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda v: type(v).__name__)
def test_round_trip_with_exact_types(value: object) -> None:
    check_round_trip(value)
    nested = {"k": [value, (value,)]}
    assert equal(dec(enc(nested)), nested)


def test_different_examples_are_not_equal() -> None:
    for i, a in enumerate(EXAMPLES):
        for j, b in enumerate(EXAMPLES):
            if i != j:
                assert not equal(a, b), (a, b)


hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()))
    | st.binary(max_size=8) | st.complex_numbers() | st.dates() | st.timedeltas() | st.uuids()
    | st.decimals(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
plain_arrays = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)) | hnp.datetime64_dtypes()
    | hnp.complex_number_dtypes(sizes=(64, 128)) | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)  # fmt: skip
values = st.recursive(
    hashables | plain_arrays | st.integers(-(2**200), 2**200) | st.datetimes(timezones=st.none() | st.timezones()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=3).map(collections.OrderedDict)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=12,
)
slow_ok = settings(suppress_health_check=list(HealthCheck))


@slow_ok
@given(values)
def test_any_nested_value_round_trips(value: object) -> None:
    check_round_trip(value)


@slow_ok
@given(st.data(), values)
def test_damaged_bytes_raise_only_our_errors(data: st.DataObject, value: object) -> None:
    blob = bytearray(enc(value))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if blob else 0):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(*REFUSALS):
        dec(bytes(blob))


@pytest.mark.parametrize("value", [EXAMPLES[37:60], EXAMPLES[60:100], EXAMPLES[100:-8], EXAMPLES[-8:]], ids=range(4))
def test_every_single_byte_flipped_or_cut(value: list[object]) -> None:
    rng = random.Random(7)
    blob = enc(value)
    for i in range(len(blob)):
        for changed in (rng.randrange(256), blob[i] ^ 1, blob[i] ^ 0x80):
            damaged = blob[:i] + bytes((changed,)) + blob[i + 1 :]
            with contextlib.suppress(*REFUSALS):
                dec(damaged)
        with pytest.raises(REFUSALS):
            dec(blob[:i])


@slow_ok
@given(st.binary(max_size=64))
def test_random_bytes_raise_only_our_errors(tail: bytes) -> None:
    for code in (*range(1, 17), *range(20, 30), *range(40, 45), *range(50, 53), 60, 61):
        with contextlib.suppress(*REFUSALS):
            dec(b"\xc1\x01" + msgspec.msgpack.encode(msgspec.msgpack.Ext(code, tail)))


def ext(code: int, content: object) -> bytes:
    return b"\xc1\x01" + msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content)))


def nested_exts(depth: int) -> bytes:
    data = b"\x90"
    for _ in range(depth):
        data = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, data)])
    return b"\xc1\x01" + data


@pytest.mark.parametrize(
    "blob",
    [
        b"", b"\xc1", b"\xc1\x00\xc0", b"\x00\x01\xc0", b"\xc1\x01", b"\xc1\x01\xc0\xc0", b"\xc1\x01\xc1",
        b"\xc1\x01\xdd\xff\xff\xff\xff", b"\xc1\x01\xdf\xff\xff\xff\xff", b"\xc1\x01\xc6\xff\xff\xff\xff",
        b"\xc1\x01\xa1\xff", b"\xc1\x01\x81\x01\x02", b"\xc1\x01\x81\x91\x01\x02", b"\xc1\x01\xd6\xff\0\0\0\0",
        b"\xc1\x01" + b"\x91" * 1_000_000 + b"\xc0", b"\xc1\x01" + b"\x91" * 400 + b"\xc0", nested_exts(500),
        b"\xc1\x01" + b"\x81\xa1a" * 400 + b"\xc0", ext(99, 0), ext(1, 5), ext(2, [[1], []]), ext(2, [[1, 1], [2, 3]]),
        ext(2, [[[]], [1]]), ext(6, [1, 1]), ext(6, [[1]]), ext(4, ["eval", [], []]), ext(8, [1, [1, 2]]),
        ext(13, [0, 1, 0]), ext(13, [0.5, 1, 1]), ext(20, [1] * 8), ext(20, [2024, 13, 1, 0, 0, 0, 0, 0, None]),
        ext(25, "../../etc/passwd"), ext(26, ["Popen", "x"]), ext(27, b"short"), ext(28, "one"), ext(29, [1, 0]),
        ext(40, "O"), ext(40, "|O8"), ext(40, "object"), ext(40, "i4,O"), ext(40, ["<f4", [-1]]),
        ext(40, ["<f4", [2**62]]),
        ext(40, {"names": ["a"], "formats": ["|O8"], "offsets": [0], "itemsize": 8}),
        ext(44, ["<f4", [2], b"1234"]), ext(44, ["<f4", [-1], b""]), ext(44, ["<f4", [2**62, 2**62], b""]),
        ext(44, ["<U0", [2**40], b""]), ext(44, ["<f4", [0, 2**62], b""]), ext(44, ["<f4", [1] * 70, b"1234"]),
        ext(44, ["<f4", [True], b"1234"]), ext(41, ["<f4", b""]), ext(50, 3), ext(51, "nonsense:0"), ext(52, ["a"]),
        ext(60, 1), ext(61, [1, 2]), ext(61, ["a"]),
    ],
    ids=repr,
)  # fmt: skip
def test_hostile_bytes_are_corrupt(blob: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        dec(blob)


def test_hostile_empty_array_allocates_nothing() -> None:
    assert dec(ext(44, ["|V2000000000", [0], b""])).shape == (0,)


def test_newer_version_and_unknown_names_are_incompatible() -> None:
    with pytest.raises(IncompatibleCheckpointError, match="version 3"):
        dec(b"\xc1\x03\xc0")
    with pytest.raises(IncompatibleCheckpointError, match=r"'some\.Class'.*register\(Class\)"):
        dec(ext(61, ["some.Class", {}]))
    with pytest.raises(IncompatibleCheckpointError, match="float3"):
        dec(ext(50, "float3"))
    with pytest.raises(IncompatibleCheckpointError, match="Nowhere/Never"):
        dec(ext(25, "Nowhere/Never"))


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = enc(EXAMPLES)
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    assert b"numpy.core" not in blob
    assert equal(dec(blob), EXAMPLES)


class SubDict(dict):  # type: ignore[type-arg]
    pass


class Seeded(dict):  # type: ignore[type-arg]
    """Its constructor needs an argument."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)


class Odd(dict):  # type: ignore[type-arg]
    """Holds more than its items."""

    def __init__(self, **items: object) -> None:
        super().__init__(items)
        self.lost = 1


class Slotted(dict):  # type: ignore[type-arg]
    __slots__ = ("lost",)

    def __init__(self) -> None:
        self.lost = 1


@dataclasses.dataclass
class Noted:
    n: int

    def __post_init__(self) -> None:
        self.note = "no field"


class SubStr(str):
    pass


class Unregistered(enum.IntEnum):
    ONE = 1


class Zone(dt.tzinfo):
    pass


@dataclasses.dataclass
class NeedsMore:
    a: int
    seed: dataclasses.InitVar[int]


def deep(levels: int) -> object:
    value: object = 0
    for _ in range(levels):
        value = [value]
    return value


CYCLE: list[object] = [1]
CYCLE.append({"again": (CYCLE,)})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, (i for i in ())]}, r"^a\.1: an instance of builtins\.generator .*make it a list"),
        ({"a": Seeded(1)}, r"^a: .*Seeded, a subclass of dict, cannot .*register\(Seeded, encode=dict, decode=Seeded\)"),
        ({"a": Odd(x=1)}, r"^a: .*Odd.*its attribute 'lost' is none of its items"),
        ({"a": Slotted()}, r"^a: .*Slotted.*its attribute 'lost' is none of its items"),
        ({"a": Noted(1)}, r"^a: .*Noted cannot be stored: its attribute 'note' is no field; .*register\(Noted, encode=v"),
        ({"a": {1: SubStr("x")}}, r"^a\.1: .*SubStr, a subclass of str"),
        ({"f": len}, r"^f: .*builtin_function"), (object(), r"^the value: .*builtins\.object"),
        ({"x": {SubStr("k"): 1}}, r"^x\..*SubStr"), ({(1, SubStr("k"))}, r"^\(1, .*\.1: .*SubStr"),
        ({"c": CYCLE}, r"^c\.1\.again\.0: a list that contains itself"),
        ({"d": deep(MAX_DEPTH)}, rf"^d\.0.*{MAX_DEPTH} levels"),
        ({"n": np.array([1, None])}, r"^n: .*Python objects"), (np.zeros(1, np.longdouble), "differs between machines"),
        (np.array(["a"], np.dtypes.StringDType()), "Python objects|portable"),
        (np.zeros(1, [(("t", "a"), "i4")]), "portable"), (np.rec.array([(1,)], dtype=[("a", "i4")]), "recarray"),
        (np.ma.masked_array([1]), "MaskedArray"), (np.zeros(2, "V0"), "no size"),
        ([dt.datetime(2024, 1, 1, tzinfo=Zone())], r"^0: time zones of class .*Zone"),
        ({"r": random.Random(1)}, r"getstate"), ({"g": torch.Generator()}, r"get_state"),
        ({"g": np.random.default_rng(1)}, r"bit_generator\.state"), (collections.defaultdict(lambda: 0), "defaultdict"),
        ({torch.ones(1): 1}, "a tensor cannot be a dictionary key"), ({(1, torch.ones(1))}, "a tensor cannot be"),
        (memoryview(b"x"), "make it bytes"), (NotImplemented, "NotImplementedType"), (Config, "builtins.type"),
        ({"f": lambda: 0}, r"^f: .*builtins\.function cannot be stored; save its name"), ({"m": math}, "save its name"),
        (torch.utils.data.DataLoader([0]), r"it has no position to save; wrap it in .*ResumableLoader"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        enc(value)
    assert "\n" not in str(caught.value)


def test_deepest_allowed_value_of_each_container_round_trips() -> None:
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: frozenset({v})):
        value: typing.Any = 0
        for _ in range(MAX_DEPTH):
            value = wrap(value)
        assert equal(dec(enc(value)), value)
        with pytest.raises(UsageError, match="levels deep"):
            enc([value])


def test_tensors_are_replaced_by_names() -> None:
    t, p = torch.ones(2), torch.nn.Parameter(torch.zeros(1))
    seen: list[tuple[tuple[object, ...], torch.Tensor]] = []

    def on_tensor(path: tuple[object, ...], tensor: torch.Tensor) -> str:
        seen.append((path, tensor))
        return key_of_path(path)

    value = {
        "a": [t, {"x": t}], 0: (p, 2**80), "ns": argparse.Namespace(w=t), "o": Opaque(3), "\ud800": {"\ud801": t},
        "od": collections.OrderedDict([((1, 2), t)]), "dd": collections.defaultdict(list, {3: [t]}),
    }  # fmt: skip
    blob = encode(value, on_tensor=on_tensor)
    paths = [path for path, _ in seen]
    assert paths == [
        ("a", 0), ("a", 1, "x"), (0, 0), ("ns", "w"), ("o", "t"), ("\ud800", "\ud801"), ("od", (1, 2)), ("dd", 3, 0),
    ]  # fmt: skip
    assert all(tensor is (p if path[0] == 0 else t) for path, tensor in seen if path[0] != "o")
    back = dec(blob)
    assert back["a"] == [TensorRef("a.0"), {"x": TensorRef("a.1.x")}] and back[0] == (
        TensorRef("0.0", True, True),
        2**80,
    )
    assert back["ns"].w == TensorRef("ns.w") and back["od"][1, 2] == TensorRef("od.(1, 2)") and back["o"].n == 3
    del back["o"], value["o"]
    assert encode(back, on_tensor=no_tensor) == encode(value, on_tensor=lambda path, _: key_of_path(path))
    assert decode(blob, on_tensor=str.upper)["a"][0] == "A.0"  # type: ignore[index]

    def missing(name: str) -> object:
        raise KeyError(name)

    with pytest.raises(KeyError):
        decode(blob, on_tensor=missing)


def test_random_states_resume_exactly() -> None:
    generator, rng, legacy = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)
    philox = np.random.Generator(np.random.Philox(4))
    state = dec(enc([generator.getstate(), rng.bit_generator.state, legacy.get_state(), philox.bit_generator.state]))
    wanted = [generator.random(), rng.random(), legacy.rand(), philox.random()]
    generator.setstate(state[0])
    rng.bit_generator.state = state[1]
    legacy.set_state(state[2])
    philox.bit_generator.state = state[3]
    assert wanted == [generator.random(), rng.random(), legacy.rand(), philox.random()]


def test_floats_are_bit_exact() -> None:
    for bits in (0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x8000000000000000, 1):
        value = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
        assert struct.pack(">d", dec(enc([value, ()]))[0]) == bits.to_bytes(8, "big")
        array = np.array([bits], np.uint64).view(np.float64)
        assert dec(enc(array)).view(np.uint64)[0] == bits


def test_same_value_same_bytes() -> None:
    numbers = list(range(1000))
    other_order = sorted(numbers, key=str)
    assert enc(set(numbers)) == enc(set(other_order))
    assert enc({"b", "a"}) == enc({"a", "b"})
    assert enc({"a": 1, "b": 2}) != enc({"b": 2, "a": 1})
    assert list(dec(enc({"b": 2, "a": 1}))) == ["b", "a"]
    dirty, clean = np.full(3 * 40, 255, np.uint8).view(STRUCT), np.zeros(3, STRUCT)
    clean["a"], clean["b"] = dirty["a"], dirty["b"]
    clean["c"]["d"], clean["c"]["e"] = dirty["c"]["d"], dirty["c"]["e"]
    assert enc(dirty) == enc(clean)


def test_decoded_arrays_are_writable_and_own_their_memory() -> None:
    array = dec(enc(np.arange(4)))
    array[0] = 7
    assert array.flags.owndata and array.flags.writeable
    empty = dec(enc(np.zeros((0, 3), np.float32)))
    assert isinstance(empty, np.ndarray) and empty.shape == (0, 3) and empty.dtype == np.float32
    assert empty.flags.writeable


def test_plain_containers_are_plain_messagepack() -> None:
    value = {"lr": 1e-3, "steps": [1, 2, None, True], "name": "x", "raw": b"\0", "nested": {"a": [{}]}}
    assert enc(value)[:2] == b"\xc1\x01"
    assert msgspec.msgpack.decode(enc(value)[2:]) == value


def test_golden_bytes_of_version_one() -> None:
    tuple_head, pair = "c101c72101" + "9301", "c70602929102" + "91a178"
    number = "c7130a92cb" + "0" * 16 + "cb3ff" + "0" * 13
    assert enc((1, {2: "x"}, 1j)).hex() == tuple_head + pair + number


@pytest.mark.parametrize(
    "value",
    [list(range(100_000)), {f"k{i}": i / 3 for i in range(50_000)}, [f"s{i}" for i in range(100_000)],
     {i: i / 3 for i in range(50_000)}, set(range(50_000))],
    ids=["ints", "dict", "strs", "int keys", "set"],
)  # fmt: skip
def test_large_plain_containers_are_fast(value: object) -> None:
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        blob = enc(value)
        dec(blob)
        best = min(best, time.process_time() - start)
    assert best < 0.1


def test_registered_class_rules() -> None:
    assert dec(ext(61, ["tests.Config", {"lr": 1.0}])) == Config(1.0)
    with pytest.raises(IncompatibleCheckpointError, match="no field gone"):
        dec(ext(61, ["tests.Config", {"lr": 1.0, "gone": 1}]))
    with pytest.raises(IncompatibleCheckpointError, match=r"tests\.Colour"):
        dec(ext(61, ["tests.Colour", "GREEN"]))
    original = Config(1.0)
    object.__setattr__(original, "derived", 9.0)
    assert dec(enc(original)).derived == 9.0


def test_leaves_and_keys_of_paths() -> None:
    value = {"a": [1, {}, (2, ())], 3: {"x": {4}}, "o": collections.OrderedDict(z=None), "n": np.zeros(1)}
    found = list(leaves_with_paths(value))
    assert [path for path, _ in found] == [
        ("a", 0), ("a", 1), ("a", 2, 0), ("a", 2, 1), (3, "x"), ("o", "z"), ("n",),
    ]  # fmt: skip
    assert found[4][1] == {4} and list(leaves_with_paths(5)) == [((), 5)] and list(leaves_with_paths([])) == [((), [])]
    assert key_of_path((3, "x.y", (1, "a"), None)) == "3.x.y.(1, 'a').None" and key_of_path(()) == ""
    assert key_of_path((10**5000,)).startswith("0x") and key_of_path(((10**5000,),)) == "<tuple>"
    with pytest.raises(UsageError, match="cycle"):
        list(leaves_with_paths(CYCLE))


def test_equal_looks_at_types_signs_and_tensors() -> None:
    for a, b in ((1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({1: 2}, {True: 2}), ({"a": 1}, {"a": True})):
        assert not equal(a, b)
    nan = torch.tensor([1.0, math.nan])
    assert equal(nan, nan.clone()) and not equal(nan, nan.double()) and not equal(nan, torch.tensor([2.0, math.nan]))
    assert not equal(torch.tensor([0.0]), torch.tensor([-0.0])) and equal({"b": 1, "a": 2}, {"a": 2, "b": 1})
    assert equal(torch.tensor([1j]), torch.tensor([1j])) and equal({math.nan: 1}, {float("nan"): 1})
    assert not equal(collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1))


def test_the_specification_lists_every_code() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "format-values.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert sorted(int(code) for row in rows for code in row.split(",")) == sorted(Code)


@pytest.mark.parametrize("value", ["é" * 600, b"x" * 1000, [b"x" * 1000], np.zeros(1000), {1: "é" * 600}], ids=type)
def test_too_many_bytes_are_refused_by_name(value: object) -> None:
    # The real limit is 4 GiB, where msgspec itself refuses native values and the slow path words the error.
    with tuned(max_value_bytes=1000), pytest.raises(UsageError, match=r"^k(\.|:).*store a tensor"):
        enc({"k": (value,)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((wrong,), "takes a class") for wrong in (3, "x", None, lambda: 1)),
        *(((Unregistered, name), "non-empty str") for name in (3, "", b"x")),
        ((Unregistered, None, 1, 2), "functions"),
        ((SubDict, "tests.Colour", dict, SubDict), "already belongs to"),
        ((Seeded,), "encode and decode"),
        ((SubDict, None, dict), "both"),
        ((torch.nn.Parameter, None, str, torch.nn.Parameter), "as such"),
        ((NeedsMore,), "'seed'"),
    ],
)
def test_a_wrong_registration_is_refused(arguments: tuple[typing.Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register(**dict(zip(("cls", "name", "encode", "decode"), arguments, strict=False)))
