"""Reads cut into requests: every byte once, into its place, in pieces that suit the connection."""

from __future__ import annotations

import contextlib
import random
import threading

import numpy as np
import obstore.store
import pytest

from bytecheckpoint.storage.objects.bucket import Bucket, BucketClients
from bytecheckpoint.storage.objects.storage import ObjectStorage
from bytecheckpoint.storage.ranged import RangeRequest, RequestSizes, read_in_parallel
from bytecheckpoint.storage.testing import content, write_file

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "step"),
    [(1, 1), (_MIB, 1), (4 * _MIB, 1), (4 * _MIB + 1, 2), (8 * _MIB, 2), (16 * _MIB, 4), (64 * _MIB, 4)],
)
def test_the_length_of_a_request(nbytes: int, step: int) -> None:
    assert RequestSizes(parallel=4, shortest=_MIB, longest=4 * _MIB).step(nbytes) == step * _MIB


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_asked_for_once_and_goes_to_its_place(seed: int) -> None:
    draw = random.Random(seed)
    data = content(draw.randrange(1, 40_000), seed)
    offset = draw.randrange(len(data) + 100)
    lengths = [draw.choice([0, 1, 100, 5000, 20_000]) for _ in range(draw.randrange(1, 6))]
    buffers = [np.full(length, 0xAA, np.uint8) for length in lengths]
    # As when somebody cuts the file meanwhile: nothing behind this position can be had any more.
    end = draw.choice([len(data), draw.randrange(len(data) + 1)])
    asked = np.zeros(len(data), np.int64)
    lock = threading.Lock()
    cut = RequestSizes(parallel=draw.choice([1, 3]), shortest=512, longest=4096)

    def get(piece: RangeRequest) -> int:
        start, target = piece
        assert 0 < len(target) <= 4096
        with lock:
            asked[start : start + len(target)] += 1
        count = min(max(end - start, 0), len(target))
        target[:count] = data[start : start + count]
        return count

    total = read_in_parallel(get, offset, [memoryview(b) for b in buffers], len(data), cut)
    wanted = max(min(sum(lengths), len(data) - offset), 0)
    assert (asked[offset : offset + wanted] == 1).all() and asked.sum() == wanted
    assert total == max(min(wanted, end - offset), 0)
    got = np.concatenate(buffers)
    assert np.array_equal(got[:total], data[offset : offset + total])
    assert (got[wanted:] == 0xAA).all(), "memory for what lies behind the file's end stays as it was"


@pytest.mark.parametrize(
    ("others", "nbytes", "expected"),
    [
        (0, 4, [4]), (0, 8, [8]), (0, 10, [5, 5]), (0, 32, [8] * 4), (0, 100, [16] * 6 + [4]),
        (3, 32, [8] * 4), (7, 32, [16, 16]), (15, 8, [8]), (15, 32, [16, 16]), (100, 32, [16, 16]),
    ],
)  # fmt: skip
def test_how_reads_are_cut(monkeypatch: pytest.MonkeyPatch, others: int, nbytes: int, expected: list[int]) -> None:
    """Requests are not too short, and reads at the same time share the connections; all numbers in MiB."""
    bucket = Bucket("memory", BucketClients(*[obstore.store.MemoryStore()] * 3), 1.0)
    storage = ObjectStorage("s3://bucket/step", bucket)
    data = content(nbytes * _MIB)
    write_file(storage, "model/file", data)
    reader = storage.open("model/file")
    out = np.zeros(len(data), np.uint8)
    asked: list[int] = []
    real = obstore.get

    def get(client: object, key: str, *, options: dict[str, tuple[int, int]]) -> object:
        first, stop = options["range"]
        asked.append((stop - first) // _MIB)
        return real(client, key, options=options)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr("bytecheckpoint.storage.objects.storage.obstore.get", get)
    with contextlib.ExitStack() as reads:
        for _ in range(others):
            reads.enter_context(bucket.connections.share())
        assert reader.read_into(0, [memoryview(out)]) == len(data)
    assert sorted(asked, reverse=True) == expected
    assert np.array_equal(out, data)
