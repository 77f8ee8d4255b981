"""The command line's tools on folders and files of other programs, none of which they change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import bytecheckpoint
from bytecheckpoint.cli.main import run
from tests.layouts.models import Family
from tests.support.processes import run_program

Call = Callable[..., tuple[int, str, str]]


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of Hugging Face, two files of torch.save and a checkpoint of DCP, which the tests leave as they are."""
    folder, family = tmp_path_factory.mktemp("foreign"), Family("mixtral")
    (folder / "hf").mkdir()
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) for name, shape in family.shapes.items()}, folder / "hf/model.safetensors")
    (folder / "hf/config.json").write_text(json.dumps(family.config))
    (folder / "hf/training_args.pt").write_bytes(b"of no format")
    value = {"model": {"w": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(3)}, "step": 3}
    torch.save(value, folder / "new.pt")
    torch.save(value, folder / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save(value, checkpoint_id=folder / "dcp")
    before = listing(folder)
    yield folder
    assert listing(folder) == before


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


def as_json(cli: Call, *arguments: object) -> Any:
    code, out, err = cli(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_ls(cli: Call, folder: Path) -> None:
    found = as_json(cli, "ls", folder / "new.pt")
    assert (found["format"], found["files"], found["bytes"]) == ("torch-save", 1, (folder / "new.pt").stat().st_size)
    assert {s["state"]: (s["tensors"], s["files"], s["plain_values"]) for s in found["states"]} == {
        "model": (2, 1, True), "extra_states": (0, 0, True)
    }  # fmt: skip
    code, out, err = cli("ls", folder / "hf")
    assert code == 0 and "huggingface, of another program, " in out and "training_args.pt: not read" in err
    assert as_json(cli, "ls", folder / "dcp")["tensors"] == as_json(cli, "ls", folder / "old.pt")["tensors"] == 2
    assert cli("ls", folder)[2].endswith("(new.pt, old.pt) and checkpoints in folders ('dcp', 'hf'): give one\n")


def test_ls_of_a_bucket(cli: Call) -> None:
    """No folder is around it in which a file of its name could lie."""
    assert "fsspec+memory://empty holds no committed checkpoint" in cli("ls", "fsspec+memory://empty")[2]


@pytest.mark.parametrize("tool", ["ls", "inspect", "verify"])
def test_what_lies_there_instead_is_said(cli: Call, tool: str, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").unlink()
    code, _, err = cli(tool, tmp_path)
    assert code == 2 and err.endswith("lacks .metadata, which DCP and Megatron write last: a save was killed\n"), err


def test_inspect(cli: Call, folder: Path) -> None:
    found = as_json(cli, "inspect", folder / "new.pt", "--values", "--boxes")
    assert found["writers"] == [{"rank": 0, "files": 1, "bytes": (folder / "new.pt").stat().st_size}]
    tensors = {tensor["key"]: tensor for tensor in found["tensors"]}
    assert tensors["model/w"]["shape"] == [4, 3] and tensors["model/w"]["bytes"] == 48
    assert tensors["model/w"]["stored"][0]["file"] == "new.pt"
    assert found["values"] == [{"key": "extra_states/step", "type": "int", "value": 3}]
    names = {tensor["fqn"] for tensor in as_json(cli, "inspect", folder / "hf", "--layout", "auto")["tensors"]}
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in names
    assert "leave --layout out" in cli("inspect", folder / "hf", "--layout", "mixtral", "--boxes")[2]


_WITHOUT_TORCH = """
import sys
from bytecheckpoint.cli.main import run
assert not any([run([verb, path]) for path in sys.argv[1:] for verb in ("ls", "inspect")])
assert "torch" not in sys.modules, "torch was imported"
"""


GOLDEN = Path(__file__).parents[1] / "formats/golden"


def looks_without_torch(cli: Call, *paths: Path) -> None:
    done = run_program(_WITHOUT_TORCH, *paths, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(cli(verb, path)[1] for path in paths for verb in ("ls", "inspect"))


def test_looking_needs_no_torch(cli: Call, folder: Path, tmp_path: Path) -> None:
    formats = (
        "torch-2.4.1/dcp dcp-zstd-2.13 megatron-0.14.0/fully_sharded_model_space megatron-0.19.2/dp_reshardable "
        "megatron-0.19.2/fully_reshardable megatron-ranks-0.19.2/iter_0000002 deepspeed-0.19.8/zero1 "
        "deepspeed-0.19.8/zero3 deepspeed-0.19.8/universal1"
    )
    for rank in range(2):
        torch.save({"w": torch.ones(2), "dtype": torch.int8}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    own = [folder / name for name in ("hf", "new.pt", "old.pt", "dcp")]
    looks_without_torch(cli, *(GOLDEN / name for name in formats.split()), *own, tmp_path)


def test_looking_at_orbax_needs_no_torch(cli: Call) -> None:
    pytest.importorskip("tensorstore")  # the environment of `make test` has it
    looks_without_torch(cli, GOLDEN / "orbax-0.12.8/ocdbt")


def test_diff_and_export(cli: Call, folder: Path, tmp_path: Path) -> None:
    assert cli("diff", folder / "new.pt", folder / "old.pt")[0] == 0
    assert cli("diff", folder / "dcp", folder / "new.pt")[0] == 0
    assert cli("export", folder / "new.pt", tmp_path / "new")[0] == 0
    assert torch.equal(load_file(tmp_path / "new/model.safetensors")["w"], torch.arange(12.0).view(3, 4).t())
    assert cli("export", folder / "hf", tmp_path / "megatron", "--layout", "auto")[0] == 0
    assert cli("diff", folder / "hf", tmp_path / "megatron", "--layout", "mixtral")[0] == 0
    code, _, err = cli("diff", folder / "hf", folder / "hf", "--layout", "nothing")
    assert code == 2 and "there is no layout 'nothing'" in err
    for source in ("hf", "hf/model.safetensors"):
        code, _, err = cli("export", folder / source, folder / "hf", "--force")
        assert code == 2 and "holds the checkpoint itself" in err


def test_an_export_takes_sizes_from_the_folder_of_the_model(cli: Call, folder: Path, tmp_path: Path) -> None:
    """A vocabulary that Megatron has padded is cut to that of the model."""
    assert cli("export", folder / "hf", tmp_path / "megatron", "--layout", "mixtral")[0] == 0
    file = tmp_path / "megatron/model.safetensors"
    tensors = load_file(file)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[name] = torch.cat([tensors[name], torch.zeros(3, 16)])
    save_file(tensors, file)
    export = ("export", file.parent, tmp_path / "back", "--layout", "mixtral")
    assert "the size of 'v' does not follow" in cli(*export)[2]
    assert cli(*export, "--files-from", folder / "hf")[0] == 0
    assert (tmp_path / "back/config.json").is_file()
    assert cli("diff", folder / "hf/model.safetensors", tmp_path / "back/model.safetensors")[0] == 0


def test_verify(cli: Call, folder: Path) -> None:
    code, out, err = cli("verify", folder / "new.pt")
    assert code == 0 and "2 tensors, 60 B in 1 file: sound" in out
    assert "new.pt: the CRC32 of 2 of its parts was checked" in err
    assert as_json(cli, "verify", f"fsspec+file://{folder}/new.pt")["bytes_read"] == 60
    assert as_json(cli, "verify", folder / "old.pt")["notes"] == ["old.pt: no checksums; only its size was checked"]


def test_auto_names_the_layouts_among_which_to_choose(folder: Path, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path, text in ((tmp_path, "give one of llama, torchtitan_llama3"), (folder / "new.pt", "without config.json")):
        with pytest.raises(bytecheckpoint.errors.IncompatibleCheckpointError, match=text):
            bytecheckpoint.open(path, layout="auto")


@pytest.mark.parametrize("tool", ["rm", "gc", "repair"])
@pytest.mark.parametrize("name", ["hf", "new.pt", "dcp"])
def test_tools_that_change_checkpoints_refuse_those_of_others(cli: Call, folder: Path, tool: str, name: str) -> None:
    code, _, err = cli(tool, folder / name)
    assert code and f"is a checkpoint of another program: {tool} works on those of this package only" in err


def test_cp_refuses_checkpoints_of_others(cli: Call, folder: Path, tmp_path: Path) -> None:
    code, _, err = cli("cp", folder / "hf", tmp_path / "copy")
    assert code and "is a checkpoint of another program: cp works on those of this package only" in err
    assert not (tmp_path / "copy").exists()
