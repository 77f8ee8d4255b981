"""Folders of weights, read as they lie: every byte equals what safetensors and torch load."""

from __future__ import annotations

import json
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from bytecheckpoint import load
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.formats.huggingface import read_huggingface
from bytecheckpoint.storage import resolve
from tests.formats.oracle import assert_same, read_tensors
from tests.support.programs import forked

WEIGHTS = {
    "embed.weight": torch.arange(60.0).view(10, 6),
    "layers.0.weight": torch.randn(6, 6).bfloat16(),
    "layers.1.weight": torch.arange(36, dtype=torch.int8).view(6, 6),
    "scale": torch.tensor(2.0),
    "empty": torch.empty(0, 4),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
}


def found_in(folder: Path) -> dict[str, torch.Tensor]:
    foreign = read_huggingface(resolve(str(folder)))
    return {name.removeprefix("model/"): tensor for name, tensor in read_tensors(folder, foreign).items()}


def split(folder: Path, save: Any, suffix: str, stem: str) -> None:
    """Write the weights into two files with an index, as `save_pretrained` does."""
    names = list(WEIGHTS)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        save({name: WEIGHTS[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same(folder: Path, format: str = "huggingface") -> None:
    found = found_in(folder)
    assert_same(dict(sorted(found.items())), dict(sorted(WEIGHTS.items())))
    assert detect(resolve(str(folder))).format == format


def test_names_of_another_framework_are_advised_to_look_for_a_layout(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(IncompatibleCheckpointError, match=r'lacks .* layout="auto" loads the same model'):
        load(tmp_path, {"model": {"decoder.weight": torch.ones(4, 4)}})
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(IncompatibleCheckpointError, match=r"optimizer\.pt: not read, since the weights lie beside"):
        load(tmp_path, {"model": {"weight": torch.ones(4, 4)}, "optimizer": {"lr": 0.1}})


def test_other_models_and_optimizers_of_accelerate_are_named(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "pytorch_model_1.bin", "optimizer.bin"):
        torch.save({"weight": torch.ones(2)}, tmp_path / name)
    assert (
        "optimizer.bin, pytorch_model_1.bin: not read"
        in detect(resolve(str(tmp_path))).read(resolve(str(tmp_path))).notes[0]
    )
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")  # `pytorch_model.bin` has the same once more
    assert "pytorch_model.bin" not in read_huggingface(resolve(str(tmp_path))).notes[0]


def test_one_file(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    same(tmp_path)
    assert read_huggingface(resolve(str(tmp_path))).catalog.info["config"]["model_type"] == "llama"


def test_a_configuration_with_numbers_that_json_lacks(tmp_path):
    """Python writes them: older folders of Mamba 2 have such a limit."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "x": "NaN"}')
    config = read_huggingface(resolve(str(tmp_path))).facts["config"]
    assert config == {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}], "x": "NaN"}
    (tmp_path / "config.json").write_text('{"model_type": Infinity,}')
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is damaged: it cannot be read"):
        read_huggingface(resolve(str(tmp_path)))


def test_a_tensor_of_very_many_dimensions(tmp_path):
    shape = [1] * 200_000
    head = json.dumps({"w": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"0")
    begun = time.process_time()
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.* length <= 64"):
        read_huggingface(resolve(str(tmp_path)))
    assert time.process_time() - begun < 1.0


def test_several_files(tmp_path):
    split(tmp_path, save_file, "safetensors", "model")
    same(tmp_path)


def test_several_files_of_torch(tmp_path):
    split(tmp_path, torch.save, "bin", "pytorch_model")
    same(tmp_path)


def test_one_file_of_torch(tmp_path):
    torch.save({**WEIGHTS, "tied": WEIGHTS["embed.weight"]}, tmp_path / "pytorch_model.bin")
    found = found_in(tmp_path)
    assert_same(found.pop("tied"), WEIGHTS["embed.weight"])
    assert_same(dict(sorted(found.items())), dict(sorted(WEIGHTS.items())))


def test_tied_tensors_of_save_model(tmp_path):
    model = torch.nn.Module()
    model.embed, model.head = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
    model.head.weight = model.embed.weight
    save_model(model, str(tmp_path / "model.safetensors"))
    foreign = read_huggingface(resolve(str(tmp_path)))
    assert sorted(found_in(tmp_path)) == ["embed.weight", "head.weight"] and foreign.catalog.count == 1


def test_a_file_by_name(tmp_path):
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    save_file(WEIGHTS, tmp_path / "b.safetensors")
    torch.save(WEIGHTS, tmp_path / "c.pt")
    storage = resolve(str(tmp_path))
    for name in ("b.safetensors", "c.pt"):
        foreign = detect(storage, name).read(storage)
        assert [file.name for file in foreign.catalog.files] == [name]
        assert_same(read_tensors(tmp_path, foreign)["model/embed.weight"], WEIGHTS["embed.weight"])
    with pytest.raises(IncompatibleCheckpointError, match=r"another file have the tensor .* give one of the files"):
        detect(storage).read(storage)


RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, init_device_mesh, distribute_tensor
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(70.0).view(7, 10)
value = {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "columns": distribute_tensor(whole, mesh, [Shard(1)])}
writer = dcp.HuggingFaceStorageWriter(folder + "/hf", save_distributed=True, enable_consolidation=False)
dcp.save(value, storage_writer=writer)
dist.destroy_process_group()
"""


def test_safetensors_of_dcp(tmp_path):
    ranks = [subprocess.Popen(forked("-c", RANKS, rank, tmp_path)) for rank in range(2)]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    folder = tmp_path / "hf"
    found, whole = found_in(folder), torch.arange(70.0).view(7, 10)
    assert torch.equal(found["rows"], whole) and torch.equal(found["columns"], whole)
    foreign = read_huggingface(resolve(str(folder)))
    assert foreign.catalog.info["guessed_shapes"] == ["columns", "rows"] and "tail" in foreign.notes[0]
    # A lost file in front shows, and a lost tail does if a file says the whole shape.
    files = sorted(folder.glob("*.safetensors"))
    first = files[0].read_bytes()
    files[0].unlink()
    with pytest.raises(IncompatibleCheckpointError, match=r"the parts of .* have \d+ of 70 elements"):
        read_huggingface(resolve(str(folder)))
    files[0].write_bytes(first)
    files[1].unlink()
    sharding = {name: {"saved_offsets": [0, 0], "global_shape": [7, 10]} for name in ("rows", "columns")}
    save_file(load_file(files[0]), files[0], metadata={"DCP_SHARDING_INFO": json.dumps(sharding)})
    with pytest.raises(IncompatibleCheckpointError, match=r"the parts of .* have \d+ of 70 elements"):
        read_huggingface(resolve(str(folder)))


def test_what_lies_around_the_weights(tmp_path: Path) -> None:
    """Other safetensors are named in a note; pointers of Git LFS and the folder around a cached revision are refused."""
    split(tmp_path, save_file, "safetensors", "model")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (note,) = read_huggingface(resolve(str(tmp_path))).notes
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors: not read" in note
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    with pytest.raises(IncompatibleCheckpointError, match=r"index\.json is a pointer of Git LFS"):
        found_in(tmp_path)
    (tmp_path / "repository" / "blobs").mkdir(parents=True)
    (tmp_path / "repository" / "blobs" / f"{1:064x}").write_bytes(b"")
    with pytest.raises(IncompatibleCheckpointError, match="give one of the folders in its 'snapshots'"):
        detect(resolve(str(tmp_path / "repository")))


def edited_index(folder: Path, **edits: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in edits.items():
        index["weight_map"][name.replace("_", ".")] = file
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edits", "error", "text"),
    [
        ({"other": "model-00001-of-00002.safetensors"}, CheckpointNotFoundError, "names 'other'"),
        ({"scale": "model-00001-of-00002.safetensors"}, CheckpointNotFoundError, "names 'scale'"),
        ({"scale": "../model.safetensors"}, CheckpointNotFoundError, "lacks the file"),
        ({"scale": "/etc/passwd"}, CheckpointNotFoundError, "lacks the file"),
        ({"scale": None}, CorruptCheckpointError, "cannot be read"),
    ],
)
def test_an_index_that_lies(tmp_path, edits, error, text):
    split(tmp_path, save_file, "safetensors", "model")
    edited_index(tmp_path, **edits)
    with pytest.raises(error, match=text):
        found_in(tmp_path)


@pytest.mark.parametrize("length", [-1, 100, 7, 0])
def test_a_file_that_was_cut_short(tmp_path, length):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:length])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        found_in(tmp_path)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "has no files"),
        (["notes.txt"], "no checkpoint of a known format"),
        (["metadata.parquet"], "of this package"),
        (["latest", "global_step1/mp_rank_00_model_states.pt"], "give the folder of one step"),
        (["zero_pp_rank_0_mp_rank_00_model_states.pt"], "DeepSpeed"),
        (["latest_checkpointed_iteration.txt"], "one step"),
        (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "Orbax"),
        (["model.gguf"], "another framework"),
        (["a.pt", "b.pt"], "files of torch.save .* give one"),
        (
            ["actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt"],
            r"has checkpoints in folders \('actor'\): give one",
        ),
        (
            ["checkpoint-3/optimizer.pt", "checkpoint-6/optimizer.pt"],
            "folders .'checkpoint-3', 'checkpoint-6'.: give one",
        ),
        (
            ["checkpoint-3/model.safetensors", "checkpoint-3/training_args.bin"],
            "in folders .'checkpoint-3'.: give one",
        ),
        (["a/model.safetensors"], r"has checkpoints in folders \('a'\): give one"),
        (
            ["rng.pt", "x.pt", "optimizer_0/.metadata", "model_0/.metadata"],
            "rng.pt, x.pt. and .*.'model_0', 'optimizer_0'",
        ),
        (["pytorch_model_fsdp_0/.metadata", "scheduler.bin", "sampler.bin"], r"in folders \('pytorch_model_fsdp_0'\)"),
        (["x.safetensors.index.json", "y.safetensors.index.json"], "several indexes"),
    ],
)
def test_other_folders_are_refused_by_name(tmp_path, files, text):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=text) as caught:
        detect(resolve(str(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_files_of_which_one_lacks_without_an_index(tmp_path):
    split(tmp_path, save_file, "safetensors", "model")
    (tmp_path / "model.safetensors.index.json").unlink()
    same(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="has 1 of the 2 files"):
        found_in(tmp_path)


def test_files_without_weights(tmp_path):
    def refused(text: str) -> None:
        with pytest.raises(IncompatibleCheckpointError, match=text):
            load(tmp_path, {"model": torch.nn.Linear(2, 2)})

    save_file({}, tmp_path / "model.safetensors")
    refused("has no tensors")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    refused("git lfs pull")


def test_what_is_no_tensor_is_noted(tmp_path):
    torch.save({"weight": torch.ones(2), "more": {"bias": torch.ones(2)}, "step": 3}, tmp_path / "pytorch_model.bin")
    assert read_huggingface(resolve(str(tmp_path))).notes == [
        "pytorch_model.bin: more, step not read, since only plain tensors are"
    ]


def test_one_torch_file_and_dcp_are_found(tmp_path):
    import torch.distributed.checkpoint as dcp

    torch.save(WEIGHTS, tmp_path / "last.ckpt")
    storage = resolve(str(tmp_path))
    assert detect(storage).format == "torch-save" and detect(storage).read(storage).catalog.count == 6
    dcp.save(dict(WEIGHTS), checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    storage = resolve(str(tmp_path / "dcp"))
    assert detect(storage).format == "dcp" and detect(storage).read(storage).catalog.count == 6
