"""Export: read back by safetensors itself, sharded, cast, in bounded memory, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bytecheckpoint
from bytecheckpoint import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    StorageError,
    UsageError,
)
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.tools import export
from tests.support.damage import flip_bit
from tests.support.layouts import coded
from tests.support.processes import run_program
from tests.tools.conftest import SHAPE


def test_one_file_from_any_layout(saved: Path, tmp_path: Path) -> None:
    report = export(saved, tmp_path / "new/hf")
    assert os.listdir(tmp_path / "new") == ["hf"] and os.listdir(tmp_path / "new/hf") == ["model.safetensors"]
    assert (report.files, report.tensors, report.cast) == (("model.safetensors",), 2, 0)
    found = load_file(tmp_path / "new/hf/model.safetensors")
    assert torch.equal(found["w"], coded(SHAPE, torch.float32)) and torch.equal(found["n"], coded(SHAPE, torch.int64))
    with safe_open(tmp_path / "new/hf/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_names_lead_through_no_wrappers(tmp_path: Path) -> None:
    """As `from_pretrained` wants them, of a file that DDP around a compiled model has written; tied tensors once."""
    weight, bias = torch.ones(2), torch.zeros(3)
    names = {"module._orig_mod.a.weight": weight, "module._orig_mod.head.weight": weight, "module.b": bias}
    torch.save({"model": names, "step": 3}, tmp_path / "ddp.pt")
    export(tmp_path / "ddp.pt", tmp_path / "hf")
    assert load_file(tmp_path / "hf/model.safetensors").keys() == {"a.weight", "b"}


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Path, torch.nn.ModuleDict]:
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(16, 16) for i in range(4)})
    model["head"] = torch.nn.Linear(16, 16, bias=False)
    model["head"].weight = model["layer0"].weight
    model.register_buffer("steps", torch.arange(3))
    model.register_buffer("nothing", torch.empty(0, 4))
    bytecheckpoint.save(tmp_path / "tied", {"model": model})
    return tmp_path / "tied", model


def test_shards_index_and_tied_tensors(tied: tuple[Path, torch.nn.ModuleDict], tmp_path: Path) -> None:
    path, model = tied
    report = export(path, tmp_path / "hf", max_shard_bytes=2000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 2 and files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        part = load_file(tmp_path / "hf" / file)
        assert all(index["weight_map"][name] == file for name in part)
        assert sum(t.nbytes for t in part.values()) <= 2000
        found |= part
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values()) == report.nbytes
    expected = model.state_dict()
    assert set(expected) - set(found) in ({"head.weight"}, {"layer0.weight"})
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


def test_cast_leaves_integers_and_reports_overflow(tmp_path: Path) -> None:
    tensors = {"f": torch.tensor([1.5, 1e6]), "d": torch.ones(2, 2, dtype=torch.float64), "i": torch.arange(3)}
    tensors["inf"] = torch.tensor([float("inf")])
    bytecheckpoint.save(tmp_path / "s", {"model": {**tensors, "note": "text"}})
    report = export(tmp_path / "s", tmp_path / "hf", dtype="float16")
    found = load_file(tmp_path / "hf/model.safetensors")
    assert {name: t.dtype for name, t in found.items()} == {
        "f": torch.float16, "d": torch.float16, "inf": torch.float16, "i": torch.int64
    }  # fmt: skip
    assert (report.cast, report.overflowed, report.skipped) == (3, ("f",), ("model/note",))
    assert torch.equal(found["d"], torch.ones(2, 2).half())
    export(tmp_path / "s", tmp_path / "bf", dtype=torch.bfloat16)
    assert load_file(tmp_path / "bf/model.safetensors")["f"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "complex64", "nonsense", torch.int32, "float4_e2m1fn_x2"])
def test_other_dtypes_are_refused(saved: Path, tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(UsageError, match="is not a dtype"):
        export(saved, tmp_path / "hf", dtype=dtype)
    assert not (tmp_path / "hf").exists()


def test_what_safetensors_cannot_hold_is_refused_first(tmp_path: Path) -> None:
    for name, dtype in [("c", torch.complex64), ("__metadata__", torch.float32), ("e8", torch.float8_e8m0fnu)]:
        bytecheckpoint.save(tmp_path / "s", {"model": {name: torch.ones(2, dtype=dtype)}})
        with pytest.raises(IncompatibleCheckpointError):
            export(tmp_path / "s", tmp_path / "hf")
        assert os.listdir(tmp_path) == ["s"]


def test_what_is_there_stays_unless_forced(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    export(saved, target)  # empty is fine
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="not empty"):
        export(saved, target, dtype="bfloat16")
    assert (target / "model.safetensors").read_bytes() == before
    (target / "config.json").write_text("{}")
    export(saved, target, max_shard_bytes=100, force=True)
    assert sorted(os.listdir(target)) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    export(saved, target, force=True)
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["hf"]
    for wrong in (saved, target / "config.json"):
        with pytest.raises(UsageError):
            export(saved, wrong, force=True)
    with pytest.raises(UsageError, match="holds model"):
        export(saved, tmp_path / "x", state="weights")
    with pytest.raises(UsageError):
        export(saved, tmp_path / "x", max_shard_bytes=0)


def test_a_damaged_block_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "s")
    file = next((tmp_path / "s/model").glob("rank-00002*"))
    flip_bit(file, -1)
    with pytest.raises(CorruptCheckpointError):
        export(tmp_path / "s", tmp_path / "hf")
    assert os.listdir(tmp_path) == ["s"]


_PEAK = """
import resource, sys, threading, torch, bytecheckpoint
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.tools import export
path, target = sys.argv[1:]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
with bytecheckpoint.open(path) as checkpoint:
    checkpoint["model/small"][...]
    before = peak()
    export(checkpoint, target, dtype="bfloat16")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    big = torch.ones(256, 512, 1024)  # 512 MiB in one tensor
    bytecheckpoint.save(tmp_path / "s", {"model": {"big": big, "small": torch.ones(3)}})
    del big
    done = run_program(_PEAK, tmp_path / "s", tmp_path / "hf", fresh=True)
    assert int(done.stdout) < 150, f"{done.stdout} MiB more than before"
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert file.get_slice("big").get_shape() == [256, 512, 1024]


def test_a_forced_export_replaces_one_file_of_weights_at_once(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files beside them too: a reader finds the old weights or the new ones."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    export(saved, tmp_path / "hf")
    removed: list[str] = []
    monkeypatch.setattr(os, "unlink", lambda path, **_: removed.append(str(path)))
    export(saved, tmp_path / "hf", files_from=tmp_path / "base", force=True)
    assert not [path for path in removed if path.endswith("hf/model.safetensors")]


def test_a_killed_forced_export_leaves_no_mixture(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(saved, tmp_path / "hf", max_shard_bytes=100)

    def replace(old: str, new: str) -> None:
        if new == str(tmp_path / "hf/model-00002-of-00002.safetensors"):
            raise OSError("killed")
        os.rename(old, new)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(StorageError, match="killed"):
        export(saved, tmp_path / "hf", max_shard_bytes=100, force=True)
    with pytest.raises(CheckpointNotFoundError, match=r"1 of the 2 files .*, and no index"):
        bytecheckpoint.load(tmp_path / "hf", {"model": {}})


def test_of_two_forced_exports_at_once_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        states = {"model": {name: torch.full((50,), float(number)) for name in "abcd"}}
        bytecheckpoint.save(tmp_path / f"own{number}", states)
    export(tmp_path / "own1", tmp_path / "hf")
    rename, amidst = os.replace, threading.Event()

    def replace(old: str, new: str) -> None:
        rename(old, new)
        if "hf" in Path(new).parts and not amidst.is_set():
            amidst.set()
            time.sleep(0.3)  # enough for the other one

    monkeypatch.setattr(os, "replace", replace)
    options: dict[str, Any] = {"max_shard_bytes": 200, "force": True}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(export, tmp_path / "own1", tmp_path / "hf", **options)
        assert amidst.wait(60)
        export(tmp_path / "own2", tmp_path / "hf", **options)
        first.result()
    found: dict[str, Any] = {"model": {}}
    bytecheckpoint.load(tmp_path / "hf", found)
    assert len({float(element) for tensor in found["model"].values() for element in tensor}) == 1


@pytest.mark.parametrize("layout", [None, Layout("mine", "hf", "mine", rules=[Rule({"w": "h"}, {"renamed": "h"})])])
def test_a_folder_of_hugging_face_keeps_its_configuration(tmp_path: Path, layout: Layout | None) -> None:
    """But for weights under other names, which it would not describe."""
    folder, out = tmp_path / "hf", tmp_path / "out"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("other weights")
    with bytecheckpoint.open(folder, layout=layout) as found:
        report = export(found, out, dtype="bfloat16")
    assert {*report.others} == (set() if layout else {"config.json", "tokenizer.json"})
    if layout is None:
        assert json.loads((out / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


def test_weights_that_are_no_longer_quantised_are_not_said_to_be(tmp_path: Path) -> None:
    quantised = tmp_path / "hf"
    quantised.mkdir()
    save_file(
        {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.full((1, 1), 2.0)},
        quantised / "model.safetensors",
    )
    (quantised / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}')
    for layout, expected in (("fp8", {"model_type"}), (None, {"model_type", "quantization_config"})):
        out = tmp_path / f"out-{layout}"
        with bytecheckpoint.open(quantised, layout=layout) as found:
            export(found, out, files_from=quantised)
        assert set(json.loads((out / "config.json").read_text())) == expected
    assert torch.equal(load_file(tmp_path / "out-fp8" / "model.safetensors")["w"], torch.full((4, 4), 2.0).bfloat16())
