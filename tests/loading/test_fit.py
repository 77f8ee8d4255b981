"""Whether a checkpoint fits what a rank wants: shapes, dtypes, coverage, and the length of one read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, Settings
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import listed
from bytecheckpoint.loading.catalog_exchange import Trees
from bytecheckpoint.loading.fit import Fit, fit_wanted, read_length, refuse_missing, wanted_boxes
from bytecheckpoint.loading.saved import SavedView
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.storage import resolve

MiB = 1 << 20


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Any]:
    """`fit_wanted` for a checkpoint with a float32 tensor `w` of shape [4, 6] and seven small ones."""
    state = {"w": torch.arange(24.0).view(4, 6), **{f"t{i}": torch.ones(2) for i in range(7)}}
    bytecheckpoint.save(tmp_path / "s", {"model": state})
    storage = resolve(tmp_path / "s")
    catalog, _ = read_catalog(storage)
    with FileSet(storage, catalog) as files:
        trees = Trees(catalog, files)
        view = SavedView(catalog, trees, 0)

        def run(*wanted: LiveShard, cast: bool = False) -> Fit:
            boxes = wanted_boxes(view, wanted)
            return fit_wanted(catalog, trees.rows, view.tensors, wanted, boxes, "here", MiB, cast=cast)

        yield run


def shard(
    name: str, shape: tuple[int, ...], data: torch.Tensor, offsets: tuple[int, ...] = (), dtype: str = "float32"
) -> LiveShard:
    return LiveShard(TensorKey("model", name), dtype, shape, offsets or (0,) * len(shape), tuple(data.shape), data)


def test_a_box_is_read_from_its_place(fit: Any) -> None:
    found = fit(shard("w", (4, 6), torch.zeros(2, 6), (2, 0)))
    assert found.plan.file.tolist() == [0] and not found.plan.missing.any(), "one read fills it"
    assert found.converted == [] and len(found.targets) == 1


def test_a_shape_that_differs(fit: Any) -> None:
    with pytest.raises(
        IncompatibleCheckpointError, match=r"here does not fit: model/w has shape \(4, 6\) in the check"
    ):
        fit(shard("w", (4, 5), torch.zeros(4, 5)))


def test_a_dtype_that_differs_is_cast_on_request_only(fit: Any) -> None:
    wanted = shard("w", (4, 6), torch.zeros(4, 6, dtype=torch.float64), dtype="float64")
    with pytest.raises(IncompatibleCheckpointError, match=r"model/w is float32 .* and float64 here \(cast=True"):
        fit(wanted)
    assert fit(wanted, cast=True).converted == ["model/w"]


def test_the_first_misfits_are_named_and_the_others_counted(fit: Any) -> None:
    with pytest.raises(IncompatibleCheckpointError, match=r"model/t0 .*model/t4 .*; and 2 more$") as raised:
        fit(*(shard(f"t{i}", (3,), torch.zeros(3)) for i in range(7)))
    assert "model/t5" not in str(raised.value)


def test_missing_keys_are_refused_by_name() -> None:
    refuse_missing("here", (), ())
    with pytest.raises(IncompatibleCheckpointError, match=r"here lacks a, b, which the program wants; .*strict=False"):
        refuse_missing("here", ("a", "b"), ())
    assert listed([str(i) for i in range(7)]) == "0, 1, 2, 3, 4 and 2 more"


@pytest.mark.parametrize(
    ("size", "ranks", "threads", "expected"),
    [
        (10 << 30, 1, 2, 8 * MiB),
        (32 * MiB, 1, 2, 8 * MiB),
        (16 * MiB, 1, 2, 4 * MiB),
        (16 * MiB, 4, 0, MiB),
        (0, 1, 0, MiB),
    ],
)
def test_reads_of_small_checkpoints_are_shorter(size: int, ranks: int, threads: int, expected: int) -> None:
    catalog: Any = SimpleNamespace(files=[SimpleNamespace(size=size, block_bytes=MiB)])
    assert read_length(catalog, ranks, Settings().with_changes(chunk_bytes=8 * MiB, read_threads=threads)) == expected


def test_reads_are_whole_blocks() -> None:
    catalog: Any = SimpleNamespace(files=[SimpleNamespace(size=100, block_bytes=4 * MiB)])
    assert read_length(catalog, 1, Settings().with_changes(chunk_bytes=8 * MiB)) == 4 * MiB


def test_a_conversion_that_torch_does_not_know(tmp_path: Path) -> None:
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    bytecheckpoint.save(tmp_path / "s", {"model": {"a": torch.ones(4), "w": packed}})
    destination = {"a": torch.zeros(4), "w": torch.zeros(4)}
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="model/w is float4_e2m1fn_x2"):
        bytecheckpoint.load(tmp_path / "s", {"model": destination}, cast=True)
    assert not destination["a"].any()
