"""Checkpoints are opened and loaded under the names of another program, through a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import find
from tests.support.layouts import Leaf
from tests.support.worlds import on_ranks

GROUPS, QUERIES, SIZE, WIDTH, INNER, LAYERS, WORDS, PADDED = 2, 3, 4, 24, 20, 2, 50, 64
CONFIG = {
    "model_type": "llama", "num_attention_heads": GROUPS * QUERIES, "num_key_value_heads": GROUPS, "head_dim": SIZE,
    "hidden_size": WIDTH, "vocab_size": WORDS, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
OWN = {
    "self_attention.linear_qkv.layer_norm_weight": (WIDTH,), "self_attention.linear_qkv.weight": (40, WIDTH),
    "self_attention.linear_proj.weight": (WIDTH, 24), "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
    "mlp.linear_fc1.weight": (2 * INNER, WIDTH), "mlp.linear_fc2.weight": (WIDTH, INNER),
}  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    """A small Llama under the names of transformers."""
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH),
    }  # fmt: skip
    for layer in range(LAYERS):
        own = {
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,), "self_attn.q_proj": (24, WIDTH),
            "self_attn.k_proj": (8, WIDTH), "self_attn.v_proj": (8, WIDTH), "self_attn.o_proj": (WIDTH, 24),
            "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def fused(found: dict[str, torch.Tensor], layers: range = range(LAYERS)) -> dict[str, torch.Tensor]:
    """The same weights under the names of Megatron-Core, made by torch."""
    pad = torch.zeros(PADDED - WORDS, WIDTH)
    made = {
        "embedding.word_embeddings.weight": torch.cat([found["model.embed_tokens.weight"], pad]),
        "decoder.final_layernorm.weight": found["model.norm.weight"],
        "output_layer.weight": torch.cat([found["lm_head.weight"], pad]),
    }
    for layer in layers:
        of = {n: found[f"model.layers.{layer}.{n}.weight"] for n in ("input_layernorm", "post_attention_layernorm")}
        q, k, v, o = (found[f"model.layers.{layer}.self_attn.{n}_proj.weight"] for n in "qkvo")
        heads = [part.view(GROUPS, -1, WIDTH) for part in (q, k, v)]
        gate, up, down = (found[f"model.layers.{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        values = (of["input_layernorm"], torch.cat(heads, 1).reshape(-1, WIDTH), o, of["post_attention_layernorm"])
        values = (*values, torch.cat([gate, up]), down)
        made |= {f"decoder.layers.{layer}.{n}": value for n, value in zip(OWN, values, strict=True)}
    return made


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with parameters of these names and shapes, which hold nothing of the values."""
    root = nn.Module()
    for name, value in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.full_like(value, 7.0)))
    return root


def folder_of(path: Path, found: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir(parents=True)
    save_file(found, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    return path


def assert_holds(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected[name]), name


def test_open_shows_the_other_names(tmp_path: Path) -> None:
    folder, expected = folder_of(tmp_path / "hf", weights()), fused(weights())
    with bytecheckpoint.open(folder, layout="llama") as found:
        for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
            entry = found[f"model/decoder.layers.1.{name}"]
            assert torch.equal(entry[...], expected[f"decoder.layers.1.{name}"])
            assert torch.equal(entry[3:19, 5:7], expected[f"decoder.layers.1.{name}"][3:19, 5:7])


def test_load_there_and_back(tmp_path: Path) -> None:
    module = module_of(fused(weights()))
    report = bytecheckpoint.load(folder_of(tmp_path / "hf", weights()), {"model": module}, layout="llama")
    assert not report.missing and not report.unexpected
    assert any("rotary_interleaved" in note for note in report.notes)  # this module has no configuration
    assert_holds(module, fused(weights()))
    bytecheckpoint.save(tmp_path / "own", {"model": module})
    back = module_of(weights())
    bytecheckpoint.load(tmp_path / "own", {"model": back}, layout=sized())
    assert_holds(back, weights())


def sized() -> Layout:
    """The layout of Llamas with its sizes, which this module's configuration does not say."""
    return find("llama").with_sizes(flattened("hf", CONFIG))


def test_a_dict_of_tensors_there_and_back(tmp_path: Path) -> None:
    """A state that is a dict has a tree, which refers to tensors under the names that the layout replaces."""
    bytecheckpoint.save(tmp_path / "own", {"model": fused(weights())})
    with bytecheckpoint.open(tmp_path / "own", layout=sized()) as found:
        assert {key.removeprefix("model/") for key in found} == weights().keys()
    module, tensors = module_of(weights()), {name: torch.zeros_like(value) for name, value in weights().items()}
    for destination in (module, tensors):
        report = bytecheckpoint.load(tmp_path / "own", {"model": destination}, layout=sized())
        assert not report.missing and not report.unexpected
    assert_holds(module, weights())
    assert all(torch.equal(tensors[name], value) for name, value in weights().items())


def test_objects_that_list_their_shards(tmp_path: Path) -> None:
    """Engines want boxes of some tensors, and the program that saved them is another one's."""
    bytecheckpoint.save(tmp_path / "own", {"model": fused(weights())})
    expected, model = weights(), dict[str, Any]()
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        shape, half = tuple(expected[name].shape), expected[name].shape[0] // 2
        model[name] = Leaf(shape, [((half, *(0,) * (len(shape) - 1)), (half, *shape[1:]))])
        model[name].fill(torch.zeros(shape), False)
    bytecheckpoint.load(tmp_path / "own", {"model": model}, layout=sized(), strict=False)
    for name, leaf in model.items():
        leaf.check(expected[name])


@on_ranks(2)
def test_load_onto_two_ranks(path: str) -> None:
    """Rank 0 has the first layer and rank 1 the second; both share the embeddings, cut by rows or columns."""
    rank = dist.get_rank()
    if rank == 0:
        folder_of(Path(path), weights())
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    expected = fused(weights(), range(rank, rank + 1))
    module = module_of(expected)
    shared = {"embedding.word_embeddings": Shard(0), "output_layer": Shard(1)}
    for name, placement in shared.items():
        whole = torch.full((PADDED, WIDTH), 7.0)
        module.get_submodule(name).weight = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
    bytecheckpoint.load(path, {"model": module}, layout="llama")
    assert_holds(module, expected)


@pytest.mark.parametrize("odd", [None, "auto", "copy", "other files"])
@on_ranks(2)
def test_a_rank_with_another_layout_or_other_files(path: str, odd: str | None) -> None:
    """Before, ranks with and without a layout waited for each other, and two steps of one run mixed."""
    rank, folder, value = dist.get_rank(), Path(path), torch.arange(8.0).view(4, 2)
    for name in ("hf", "other"):
        if rank == 0:
            (folder / name).mkdir(parents=True)
            save_file({"a": value}, folder / name / "model.safetensors")
    dist.barrier()
    own = Layout("own", "hf", "mine", rules=[Rule({"a": "x y"}, {"b": "y x"})])
    layout: Any = own if rank == 0 or odd == "other files" else odd
    source, states = "hf", {"model": {"b": torch.zeros(2, 4)}}
    if rank == 1 and odd == "copy":
        (folder / "link").symlink_to("hf")
        layout, source = Layout.from_text(own.to_text()), "link"
    if rank == 1 and odd == "other files":
        source = "other"
    if odd == "copy":
        bytecheckpoint.load(folder / source, states, layout=layout)
        assert torch.equal(states["model"]["b"], value.T)
        return
    text = (
        "rank 1 at .*other" if odd == "other files" else rf"rank 0 loads with layout=own \(.*rank 1 with layout={odd!r}"
    )
    with pytest.raises((IncompatibleCheckpointError, UsageError), match=text):
        bytecheckpoint.load(folder / source, states, layout=layout)


def test_names_that_fit_both_sides(tmp_path: Path) -> None:
    """As nanoGPT has the names of GPT-2, with other orders of dims: nobody guesses whose they are, a user states it."""
    file = tmp_path / "nano.layout"
    file.write_text("layout nano hf <-> nano\nrules\n<x>.weight : i o <-> <x>.weight : o i\n")
    weight = torch.arange(6.0).reshape(2, 3)
    save_file({"h.0.c_fc.weight": weight}, tmp_path / "model.safetensors")
    states = {"model": {"h.0.c_fc.weight": torch.zeros(3, 2)}}
    with pytest.raises(UsageError, match=r"fit both sides: state whose they are, as in layout='\S*nano.layout:hf' or"):
        bytecheckpoint.load(tmp_path, states, layout=file)
    bytecheckpoint.load(tmp_path / "model.safetensors", states, layout=f"{file}:hf")
    assert torch.equal(states["model"]["h.0.c_fc.weight"], weight.T)
    bytecheckpoint.save(tmp_path / "own", states)
    with bytecheckpoint.open(tmp_path / "own", layout=f"{file}:nano") as shown:
        assert torch.equal(shown.tensors["model/h.0.c_fc.weight"][...], weight)
    with pytest.raises(UsageError, match="layout nano has no side 'own': its sides are hf and nano"):
        bytecheckpoint.load(tmp_path, states, layout=f"{file}:own")


def test_tensors_with_two_names_on_both_sides(tmp_path: Path) -> None:
    """The program ties them, and the file has one of the names, the other, or both."""
    layout = Layout.from_text(
        "layout t a <-> b\nalias a head = embed\nalias b output = input\nrules\nembed : v h\n <-> input : v h\n"
        "head : v h\n <-> output : v h\n"
    )
    value = torch.arange(6.0).view(3, 2)
    for names in (["embed"], ["head"], ["embed", "head"]):
        folder = folder_of(tmp_path / "-".join(names), {name: value.clone() for name in names})
        for live in (["input"], ["input", "output"]):
            module = module_of(dict.fromkeys(live, value))
            for name in live:
                setattr(module, name, module.input)
            report = bytecheckpoint.load(folder, {"model": module}, layout=layout)
            assert torch.equal(module.input, value) and not report.unexpected


def test_a_head_that_a_tied_program_lacks_is_noted(tmp_path: Path) -> None:
    """The layout takes it for the embedding, as the configuration says; the file may say otherwise."""
    expected = fused(weights())
    folder = folder_of(tmp_path / "hf", weights(), tie_word_embeddings=True)
    for tied in (True, False):
        module = module_of({n: t for n, t in expected.items() if not (tied and n == "output_layer.weight")})
        notes = bytecheckpoint.load(folder, {"model": module}, layout="llama").notes
        assert any(note.endswith("and does not read them: lm_head.weight") for note in notes) == tied
        assert_holds(module, {n: expected[n] for n in module.state_dict()})


def test_equal_names_need_no_layout(tmp_path: Path) -> None:
    module = module_of(weights())
    bytecheckpoint.load(folder_of(tmp_path / "hf", weights()), {"model": module}, layout="auto")
    assert_holds(module, weights())


def test_layouts_of_a_program(tmp_path: Path) -> None:
    """Parts that are turned, cut and stacked, into a module whose memory is transposed."""
    value = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    torch.save({"w": value, "b": torch.arange(6.0)}, tmp_path / "m.pt")
    names = [Rule({"w": "e (f [a: 1 | b: 1]) h"}, {"experts.{e}.a": "a = h f", "experts.{e}.b": "b = f h"})]
    layout = Layout("own", "file", "own", rules=[*names, Rule({"b": "n"}, {"bias": "n"})])
    expected = {f"experts.{e}.a": value[e, 0::2].t().contiguous() for e in range(4)}
    expected |= {f"experts.{e}.b": value[e, 1::2].contiguous() for e in range(4)} | {"bias": torch.arange(6.0)}
    module = module_of(expected)
    module.experts.get_submodule("2").a.data = torch.zeros(3, 5).t()  # type: ignore[union-attr]
    bytecheckpoint.load(tmp_path / "m.pt", {"model": module}, layout=layout)
    assert_holds(module, expected)


def test_a_checkpoint_says_which_model_it_holds(tmp_path: Path) -> None:
    """It keeps the plain values of a configuration; one that does anything else is no reason to fail a save."""

    class Config:
        model_type = "llama"

        def to_dict(self) -> dict[str, Any]:
            others = {"inf": float("inf"), "huge": 2**80, "text": "x" * 5000, "list": [1, None], "none": None}
            return CONFIG | {"kinds": ["full", "sliding"], "layers": [1, 0]} | others

    class Raising(nn.Linear):
        @property
        def config(self) -> Any:
            raise RuntimeError("not configured")

    model = module_of(weights())
    model.load_state_dict(weights())
    model.config = Config()  # type: ignore[assignment]
    bytecheckpoint.save(tmp_path / "own", {"model": model, "other": Raising(2, 2)})
    with bytecheckpoint.open(tmp_path / "own", layout="llama") as found:
        config = CONFIG | {"kinds": "full sliding", "layers": "1 0"}
        assert found.info["layout"]["config"] == {f"hf.{name}": value for name, value in config.items()}
        entry = found["model/decoder.layers.1.self_attention.linear_qkv.weight"]
        assert torch.equal(entry[...], fused(weights())["decoder.layers.1.self_attention.linear_qkv.weight"])


def test_names_that_a_layout_ignores(tmp_path: Path) -> None:
    """Old files have frequencies of rotary positions, and those of DeepSeek have a layer more, which predicts."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    module = module_of(fused(weights()))
    report = bytecheckpoint.load(folder_of(tmp_path / "hf", weights() | extra), {"model": module}, layout="llama")
    assert not report.unexpected and any("ignores 1 tensors of model: model.layers.0" in note for note in report.notes)
    assert_holds(module, fused(weights()))
    more = {f"model.layers.{LAYERS}.{name}.weight": torch.ones(3) for name in ("eh_proj", "input_layernorm")}
    folder = folder_of(tmp_path / "more", weights() | more, num_hidden_layers=LAYERS)
    layout = Layout.from_text(
        "layout t hf <-> megatron\ninclude llama\nignore hf model\\.layers\\.<hf.num_hidden_layers>\\..*\n"
    )
    bytecheckpoint.load(folder, {"model": module}, layout=layout)
    with pytest.raises(IncompatibleCheckpointError, match=r"no rule fits model\.layers\.2\.eh_proj"):
        bytecheckpoint.load(folder, {"model": module}, layout="llama")
    with pytest.raises(UsageError, match=r"'x\.y' is of no side"):
        Layout.from_text("layout t hf <-> megatron\nignore hf a<x.y>\n")


def test_what_a_layout_ignores_in_the_program_stays_as_it_is(tmp_path: Path) -> None:
    layout = Layout.from_text("layout t file <-> own\nignore own bias_.*\nrules\nw : n\n <-> v : n\n")
    folder = folder_of(tmp_path / "hf", {"w": torch.arange(3.0)})
    module = module_of({"v": torch.zeros(3), "bias_1": torch.ones(2), "lost": torch.ones(2)})
    with pytest.raises(IncompatibleCheckpointError, match="no rule fits lost of the own side"):
        bytecheckpoint.load(folder, {"model": module}, layout=layout)
    del module.lost
    report = bytecheckpoint.load(folder, {"model": module}, layout=layout)
    assert not report.missing and not report.unexpected
    assert "the layout leaves 1 tensors of model as they are: bias_1" in report.notes
    assert_holds(module, {"v": torch.arange(3.0), "bias_1": torch.full((2,), 7.0)})


def test_a_load_that_is_not_strict_leaves_what_no_rule_fits(tmp_path: Path) -> None:
    """As the value head of a critic, and what its file has beside it."""
    sinks = {"model.layers.0.self_attn.sinks": torch.ones(6)}
    folder, expected = folder_of(tmp_path / "hf", weights() | sinks), fused(weights())
    del expected["output_layer.weight"]
    module = module_of(expected | {"value_head.weight": torch.zeros(1, WIDTH)})
    for strict in (True, {"model": True}):
        with pytest.raises(IncompatibleCheckpointError, match=r"no rule fits .*; a load with strict=False"):
            bytecheckpoint.load(folder, {"model": module}, layout="llama", strict=strict)
    for lenient in (False, {"model": False}):
        report = bytecheckpoint.load(folder, {"model": module}, layout="llama", strict=lenient)
        assert [*report.missing] == ["model/value_head.weight"]
        assert {"model/lm_head.weight", "model/model.layers.0.self_attn.sinks"} == {*report.unexpected}
        assert_holds(module, expected | {"value_head.weight": torch.full((1, WIDTH), 7.0)})


def test_what_a_load_does_not_select_may_have_another_shape(tmp_path: Path) -> None:
    """As the head of a model for other classes."""
    layout = Layout(
        "mine", "old", "new", rules=[Rule({"body": "a b"}, {"trunk": "b a"}), Rule({"fc": "c a"}, {"head": "c a"})]
    )
    body = torch.arange(6.0).view(2, 3)
    torch.save({"body": body, "fc": torch.ones(5, 2)}, tmp_path / "old.pt")
    model = {"trunk": torch.zeros(3, 2), "head": torch.zeros(7, 2)}
    with pytest.raises(IncompatibleCheckpointError, match=r"dim 0 of head: 7 here, but c is 5"):
        bytecheckpoint.load(tmp_path / "old.pt", {"model": model}, layout=layout)
    with pytest.raises(IncompatibleCheckpointError, match=r"holds model/fc"):
        bytecheckpoint.load(tmp_path / "old.pt", {"model": model}, layout=layout, exclude=["model/head"])
    bytecheckpoint.load(tmp_path / "old.pt", {"model": model}, layout=layout, exclude=["model/head", "model/fc"])
    assert torch.equal(model["trunk"], body.T) and not model["head"].any()
    wrong = {"trunk": torch.zeros(3, 4), "head": torch.zeros(7, 2)}
    with pytest.raises(IncompatibleCheckpointError, match=r"dim 1 of trunk: 4 here, but a is 2"):
        bytecheckpoint.load(tmp_path / "old.pt", {"model": wrong}, layout=layout, exclude=["model/head", "model/fc"])


def test_what_a_load_does_not_select_needs_no_rule(tmp_path: Path) -> None:
    """A strict load stays strict about the rest, also where it names what no rule fits on either side."""
    head, sinks = "value_head.weight", "model.layers.0.self_attn.sinks"
    folder, expected = folder_of(tmp_path / "hf", weights() | {sinks: torch.ones(6)}), fused(weights())
    module = module_of(expected | {head: torch.zeros(1, WIDTH)})
    report = bytecheckpoint.load(
        folder, {"model": module}, layout="llama", exclude=["model/value_head.*", "model/*.sinks"]
    )
    assert not report.missing and not report.unexpected
    assert_holds(module, expected | {head: torch.full((1, WIDTH), 7.0)})
    for left, named in ((sinks, "lacks model/value_head"), (head, "holds model/.*sinks")):
        with pytest.raises(IncompatibleCheckpointError, match=named):
            bytecheckpoint.load(folder, {"model": module}, layout="llama", exclude=[f"model/{left}"])
    renamed = module_of({f"net.{name}": value for name, value in (expected | {head: torch.zeros(1, WIDTH)}).items()})
    first = "net.decoder.layers.1."
    bytecheckpoint.load(
        folder, {"model": renamed}, layout="llama", rename={"model/net.": "model/"}, include=[f"model/{first}*"]
    )
    for name, value in renamed.state_dict().items():
        own = expected.get(name.removeprefix("net."))
        assert torch.equal(value, own) if own is not None and name.startswith(first) else (value == 7).all(), name


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    found = weights()
    folder = folder_of(tmp_path / "hf", found)
    module = module_of(fused(found))
    with pytest.raises(UsageError, match="there is no layout 'lama': did you mean llama"):
        bytecheckpoint.load(folder, {"model": module}, layout="lama")
    lost = folder_of(tmp_path / "lost", {n: t for n, t in found.items() if "layers.1.self_attn.k_proj" not in n})
    with pytest.raises(IncompatibleCheckpointError, match=r"layers\.1\.self_att"):
        bytecheckpoint.load(lost, {"model": module}, layout="llama")
    mixed = {n: t.half() if "layers.0.self_attn.v_proj" in n else t for n, t in found.items()}
    with pytest.raises(IncompatibleCheckpointError, match=r"linear_qkv\.weight consists of .* float"):
        bytecheckpoint.load(folder_of(tmp_path / "mixed", mixed), {"model": module}, layout="llama")
    extra = folder_of(tmp_path / "extra", {**found, "model.layers.0.self_attn.sinks": torch.ones(6)})
    with pytest.raises(IncompatibleCheckpointError, match="sinks"):
        bytecheckpoint.load(extra, {"model": module}, layout="llama")
    with pytest.raises(IncompatibleCheckpointError, match="no layout for the model_type 'llama'"):
        bytecheckpoint.load(folder, {"model": module}, layout="auto")
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(IncompatibleCheckpointError, match="lacks optimizer/param_groups/"):
        bytecheckpoint.load(folder, {"model": module, "optimizer": optimizer}, layout="llama")
    assert all((value == 7).all() for value in module.state_dict().values())
