"""What rank 0 makes of the ranks' reports before the first byte is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import bytecheckpoint
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.loading.decision import FitReport, decide_fit, recognized_bitmap, unexpected_keys
from bytecheckpoint.representation.plans import SharedChunks
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.storage import resolve

CHUNK = 1 << 20


def ranges(*rows: tuple[int, int, int]) -> bytes:
    return np.array(rows, np.int64).tobytes()


def test_what_ranks_recognize_is_joined() -> None:
    reports = [FitReport(recognized_bitmap(10, numbers)) for numbers in ([0, 9, -1], [1], [])]
    decision = decide_fit(reports, CHUNK, 2)
    recognized = np.unpackbits(np.frombuffer(decision.recognized, np.uint8), count=10)
    assert np.flatnonzero(recognized).tolist() == [0, 1, 9]
    assert not decision.hosts, "nothing is shared"


def test_what_several_ranks_want_is_shared() -> None:
    wanted = ranges(*((0, start, start + CHUNK) for start in range(0, 8 * CHUNK, CHUNK)))
    hosts = ["one", "two", "one"]
    reports = [FitReport(b"\0", wanted, host, bytes([rank])) for rank, host in enumerate(hosts)]
    decision = decide_fit(reports, CHUNK, 3)
    assert len(SharedChunks.from_columns(decision.shared)) == 8
    assert (
        decision.hosts == [0, 1, 0] and decision.handshakes == [b"\0", b"\1", b"\2"] and decision.chunks_per_round == 3
    )


def test_keys_that_no_rank_wants(tmp_path: Path) -> None:
    states = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "extra_states": {"step": 1}}
    bytecheckpoint.save(tmp_path / "s", states)
    catalog, _ = read_catalog(resolve(tmp_path / "s"))
    wanted = [i for i in range(catalog.count) if str(catalog.key(i)) == "model/a"]
    recognized = recognized_bitmap(catalog.count, wanted)
    assert unexpected_keys(catalog, ["model"], recognized) == [TensorKey("model", "b")]
    assert unexpected_keys(catalog, ["extra_states", "other"], recognized) == []
