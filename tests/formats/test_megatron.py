"""Checkpoints of Megatron-Core, read as they lie: every element equals what our own adapter saved of the same state."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats import megatron
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.formats.foreign import ForeignColumns, RowColumns
from bytecheckpoint.formats.megatron import read_megatron
from bytecheckpoint.representation.boxes import BoxTable, row_major
from bytecheckpoint.representation.values.codec import decode
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import resolve

GOLDEN = Path(__file__).parent / "golden" / "megatron-0.19.2"
KINDS = ["fully_reshardable"]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "fully_reshardable", tmp_path / "saved"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_equals_what_was_trained(kind: str) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    assert detect(resolve(str(GOLDEN / kind))).format == "megatron"
    with bytecheckpoint.open(GOLDEN / kind) as found:
        digests = {
            key: sha256(
                found.tensors[key][...].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for key in found.tensors
        }
    assert digests == expected and len(expected) == 131


def test_the_model_is_read_where_the_optimizer_is_not() -> None:
    found = read_megatron(resolve(str(GOLDEN / "dp_reshardable")))
    assert set(found.catalog.state.to_list()) == {"model"} and found.catalog.count == 27
    assert found.notes == ("the optimizer is left out: 6 buckets (dp_reshardable) are not read yet",)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_values_are_those_that_were_saved(kind: str) -> None:
    values = read_megatron(resolve(str(GOLDEN / kind))).values
    extra, scheduler, optimizer = (
        decode(values[state], on_tensor=TensorRef, on_unregistered=lambda name, value: value)
        for state in ("extra_states", "opt_param_scheduler", "optimizer")
    )
    assert (extra["iteration"], extra["checkpoint_version"]) == (3, 3.0)
    assert extra["args"] == {"tensor_model_parallel_size": 2, "hidden_size": 16}
    assert scheduler["num_steps"] == 3
    groups = optimizer["param_groups"]
    assert [(len(group["params"]), group["weight_decay"], group["betas"]) for group in groups] == [
        (17, 0.1, (0.9, 0.999)), (9, 0.0, (0.9, 0.999)),
    ]  # fmt: skip
    assert not any(group.keys() & {"step", "is_expert_parallel"} for group in groups)


def test_experts_and_layers_become_tensors_of_their_own() -> None:
    """Names that carry braces or numbers are kept; a stack of two dimensions is taken apart in both."""
    assert megatron._unstacked("a{}.layers.3.mlp.w") == ("a{{}}.layers.3.mlp.w", 0)
    assert megatron._unstacked("decoder.layers.2.mlp.experts.experts.linear_fc1.weight") == (
        "decoder.layers.2.mlp.experts.local_experts.{}.linear_fc1.weight", 1,
    )  # fmt: skip
    assert megatron._unstacked("layers.mlp.experts.experts.w") == ("layers.{}.mlp.experts.local_experts.{}.w", 2)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("{", CorruptCheckpointError, r"metadata\.json is damaged"),
        ('{"sharded_backend": "zarr"}', IncompatibleCheckpointError, "'zarr' of Megatron is not read"),
        (" " * 2_000_000, IncompatibleCheckpointError, r"metadata\.json has 2000000 bytes"),
    ],
)
def test_a_wrong_marker_is_refused(copied: Path, text: str, error: type[CheckpointError], match: str) -> None:
    (copied / "metadata.json").write_text(text)
    with pytest.raises(error, match=match):
        read_megatron(resolve(str(copied)))


def test_metadata_of_another_program_is_no_marker(copied: Path) -> None:
    (copied / "metadata.json").write_text('{"author": "me"}')
    assert read_megatron(resolve(str(copied))).format == "dcp"


def test_a_missing_file_is_named(copied: Path) -> None:
    (copied / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
        bytecheckpoint.open(copied)


def test_huge_stacks_are_refused_before_memory_is_taken() -> None:
    shape = (1 << 40, 4)
    columns = ForeignColumns(dtypes=["float32"], shapes=[shape])
    boxes = BoxTable.build([], [], [], 2)
    rows = RowColumns(boxes, np.zeros(0, np.int32), np.zeros(0, np.int64), row_major(boxes.lengths))
    content = megatron.DcpContent(columns, rows, np.zeros(0, np.int64), ["layers.weight"], {}, {}, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no stack of tensors"):
        megatron._TorchDist(resolve(str(GOLDEN)), content)._add_tensors()
