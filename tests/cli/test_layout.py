"""`bytecheckpoint layout`: layouts on the headers of checkpoints of this package and of Hugging Face."""

import json

import pytest
import torch
from safetensors.torch import save_file

import bytecheckpoint
from bytecheckpoint.cli.main import run
from tests.layouts.models import Family
from tests.loading.test_layouts import folder_of, weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, family = tmp_path_factory.mktemp("folders"), Family("llama")
    (folder / "hf").mkdir()
    save_file({name: torch.zeros(shape) for name, shape in family.shapes.items()}, folder / "hf/model.safetensors")
    (folder / "hf/config.json").write_text(json.dumps(family.config))
    model = {name: torch.zeros(shape) for name, shape in family.megatron.items()}
    bytecheckpoint.save(folder / "megatron", {"model": model})
    bytecheckpoint.save(
        folder / "less", {"model": {k: v for k, v in model.items() if k != "decoder.final_layernorm.weight"}}
    )
    return folder


def call(capsys, *arguments):
    code = run(["layout", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_text_alone(capsys, tmp_path):
    assert call(capsys, "check", "phi3") == (0, "phi3.layout: 17 rules, fine\n", "")
    (tmp_path / "mine.layout").write_text("layout mine a <-> b\nrules\nw : (a b\n <-> u : a\n")
    message = f"bytecheckpoint: {tmp_path}/mine.layout:3: column 9: expected ')', found the end in '(a b'\n"
    assert call(capsys, "check", tmp_path / "mine.layout") == (2, "", message)


def test_layouts_that_are_built_in(capsys):
    code, out, _ = call(capsys, "show", "--json")
    assert (
        code == 0
        and {"name": "phi3", "left": "hf", "right": "megatron", "for": "hf.model_type in phi3"}
        in json.loads(out)["layouts"]
    )
    assert "layout phi3  hf <-> megatron" in call(capsys, "show", "phi3")[1]
    assert call(capsys, "show", "phi4")[2] == "bytecheckpoint: there is no layout 'phi4': did you mean phi3?\n"


def test_headers(capsys, folders):
    code, out, _ = call(capsys, "check", "llama", "--left", folders / "hf", "--right", folders / "megatron", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["parts"] == 21 and not found["tensors"]["hf"]["unused"] and not found["tensors"]["megatron"]["derived"]
    assert "megatron.normalization = RMSNorm" in found["undecided"]
    code, out, _ = call(capsys, "check", "phi3", "--left", folders / "megatron")
    assert code == 2
    code, out, _ = call(capsys, "check", "llama", "--left", folders / "hf")
    assert code == 0 and "megatron: 15 tensors, as they would be written" in out
    code, _, message = call(capsys, "check", "llama", "--left", folders / "hf", "--right", folders / "less")
    assert code == 2 and "decoder.final_layernorm.weight is missing on the megatron side: model.norm.weight" in message
    code, _, message = call(capsys, "check", "llama", "--left", folders / "hf", "--set", "megatron.rotary_base=5")
    assert code == 2 and "hf.rope_parameters.rope_theta is 10000.0, megatron.rotary_base is 5" in message
    assert call(capsys, "check", "llama", "--left", folders / "none")[0] == 2


@pytest.mark.parametrize("setting", ["a", "a=b", "=1"])
def test_settings_that_are_none(capsys, folders, setting):
    assert "write SIDE.KEY=VALUE" in call(capsys, "check", "llama", "--left", folders / "hf", "--set", setting)[2]


def test_explain(capsys, tmp_path):
    folder = folder_of(tmp_path / "hf", weights())
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    code, out, _ = call(capsys, "explain", "llama", folder, name)
    assert code == 0 and "  k (g of 2, d of 4, h of 24) at (12 + 20 g + d, h), decoder.layout:" in out
    assert "    model.layers.1.self_attn.k_proj.weight [8, 24]\n      model.safetensors from byte " in out
    code, out, _ = call(capsys, "explain", "llama", folder, name, "--json")
    data = (folder / "model.safetensors").read_bytes()
    for part in json.loads(out)["parts"]:
        (source,) = part["stored"]
        (row,) = source["rows"]
        expected = weights()[source["tensor"]].numpy().tobytes()
        assert data[row["offset"] : row["offset"] + row["bytes"]] == expected
    code, _, err = call(capsys, "explain", "llama", folder, name.replace("qkv", "qk"))
    assert code == 2 and f"did you mean {name}?" in err
    (tmp_path / "t.layout").write_text("layout t a <-> b\nrules\nz : h\n <-> y : h\n")
    assert "no name of " in call(capsys, "explain", tmp_path / "t.layout", folder, name)[2]
