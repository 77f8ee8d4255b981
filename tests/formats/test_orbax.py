"""Checkpoints of Orbax are opened, loaded and verified through tensorstore."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.tools import adopt, export, verify

pytest.importorskip("tensorstore")  # the environment of `make test` has it

GOLDEN = Path(__file__).parent / "golden" / "orbax-0.12.8"
EXPECTED = dict(np.load(GOLDEN / "expected.npz"))


def values() -> dict[str, torch.Tensor]:
    found = {name: torch.from_numpy(EXPECTED[key]) for name, key in NAMES.items()}
    return found | {"dense.bias": found["dense.bias"].view(torch.bfloat16)}


NAMES = {"dense.kernel": "kernel", "dense.bias": "bias", "layers.0.w": "w0", "layers.1.w": "w1"}


@pytest.mark.parametrize("folder", ["ocdbt", "files", "run/5", "run/5/default"])
def test_open_and_load(folder: str) -> None:
    with bytecheckpoint.open(GOLDEN / folder) as found:
        for name, value in values().items():
            assert torch.equal(found[f"model/{name}"][...], value)
        assert torch.equal(found["model/dense.kernel"][2:5, 3:9], values()["dense.kernel"][2:5, 3:9])
        assert found["extra_states/step"] == 12 and found["extra_states/lr"] == 0.5
        assert found["opt_state/count"][...].item() == 7
        if "run" not in folder:
            assert found["extra_states/note"] == "hello" and found["extra_states/none"] is None
    live = {name: torch.zeros_like(value) for name, value in values().items()}
    bytecheckpoint.load(GOLDEN / folder, {"model": live})
    assert all(torch.equal(live[name], value) for name, value in values().items())


def test_tools(tmp_path: Path) -> None:
    report = verify(GOLDEN / "ocdbt")
    assert report.ok and any("nothing proves the bytes" in note for note in report.notes)
    with pytest.raises(UsageError, match="compressed"):
        adopt(GOLDEN / "ocdbt", tmp_path / "adopted")
    assert export(GOLDEN / "ocdbt", tmp_path / "hf").tensors == 4


def test_damage_is_named(tmp_path: Path) -> None:
    def damaged(name: str, data: bytes | None) -> Path:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        shutil.copytree(GOLDEN / "files", tmp_path / "x")
        (tmp_path / "x" / name).unlink() if data is None else (tmp_path / "x" / name).write_bytes(data)
        return tmp_path / "x"

    chunk = "params.dense.kernel/1.0"
    with pytest.raises(CorruptCheckpointError, match=r"chunks of params\.dense\.kernel are missing"):
        bytecheckpoint.open(damaged(chunk, None))
    with pytest.raises(CorruptCheckpointError, match="chunks of step are missing"):  # it would be 0
        bytecheckpoint.open(damaged("step/0", None))
    with pytest.raises(CorruptCheckpointError, match=r"_strings\.json lacks the text note"):
        bytecheckpoint.open(damaged("_strings.json", None))
    (finding,) = verify(damaged(chunk, b"\0" * 50)).findings
    assert finding.tensors == ("model/dense.kernel",) and "params.dense.kernel" in finding.message
    with bytecheckpoint.open(tmp_path / "x") as found:
        assert torch.equal(found["model/dense.kernel"][:3], values()["dense.kernel"][:3])
        with pytest.raises(CorruptCheckpointError, match=r"params\.dense\.kernel"):
            found["model/dense.kernel"][...]
    metadata = json.loads((GOLDEN / "files" / "_METADATA").read_text())
    for text in (b"{", b"[]", b'{"tree_metadata": 3}', b'{"tree_metadata": {"a": {}}}'):
        with pytest.raises(CorruptCheckpointError, match="_METADATA"):
            bytecheckpoint.open(damaged("_METADATA", text))
    entry = metadata["tree_metadata"].pop("('lr',)")
    entry["key_metadata"][0]["key"] = "../ocdbt/lr"
    metadata["tree_metadata"]["x"] = entry
    with pytest.raises(CorruptCheckpointError, match="_METADATA has the key x"):
        bytecheckpoint.open(damaged("_METADATA", json.dumps(metadata).encode()))


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(GOLDEN / "files", tmp_path / "two" / name)
    with pytest.raises(IncompatibleCheckpointError, match="several checkpoints of Orbax"):
        bytecheckpoint.open(tmp_path / "two")
    shutil.copytree(GOLDEN / "files", tmp_path / "x")
    (tmp_path / "x" / "_METADATA").unlink()
    with pytest.raises(IncompatibleCheckpointError, match="of Orbax, without"):
        bytecheckpoint.open(tmp_path / "x")
