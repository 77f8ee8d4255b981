"""Folders of DeepSpeed of several model-parallel ranks: every element, and the next loss, are those of DeepSpeed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.formats import torch_save
from bytecheckpoint.formats.deepspeed import read_deepspeed
from bytecheckpoint.formats.deepspeed_modules import module_of_layer
from bytecheckpoint.formats.deepspeed_ranks import _divisions
from bytecheckpoint.formats.rank_parts import divide_view
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.storage import resolve
from tests.formats.golden.make_deepspeed_parallel import (
    VOCABULARY,
    WIDTH,
    Embedding,
    Layer,
    Split,
    _groups,
    _loss,
    head,
)
from tests.formats.oracle import values_of

GOLDEN = Path(__file__).parent / "golden" / "deepspeed-0.19.8"
KINDS = {"pipeline": 52, "grid": 60, "tensor1": 56, "tensor3": 42, "elastic": 56, "dealt": 56}


def read(kind: str) -> dict[str, Any]:
    return values_of(GOLDEN / kind, read_deepspeed(resolve(str(GOLDEN / kind))))


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_equals_the_universal_one(kind: str) -> None:
    values = read(kind)
    expected = torch.load(GOLDEN / f"{'whole' if kind in {'elastic', 'dealt'} else kind}.expected.pt")
    state, count = values["optimizer"]["state"], 0
    for name, slots in expected.items():
        for slot, tensor in slots.items() if name in state else ():
            assert torch.equal(state[name][slot].flatten(), tensor.flatten()), (name, slot)
            count += 1
        assert torch.equal(values["model"][name].flatten().bfloat16(), slots["fp32"].flatten().bfloat16()), name
    assert count == KINDS[kind]
    groups = values["optimizer"]["param_groups"]
    assert [group.get("weight_decay") for group in groups] == ([None] * 2 if kind == "elastic" else [0.1, 0.0])
    assert {name for group in groups for name in group["params"]} == state.keys()
    assert values["extra_states"]["note"] == "hi"


class Stages(nn.Module):
    """The modules of the pipelines, in one process."""

    def __init__(self, grid: bool) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({} if grid else {"embed": Embedding(None)})
        if grid:
            self.add_module("0", nn.Embedding(VOCABULARY, WIDTH))
            self.add_module("4", nn.Linear(WIDTH, VOCABULARY))
        for number in range(1, 4):
            self.add_module(str(number), Layer(None))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embed: Any = self.tied_modules["embed"] if self.tied_modules else self.get_submodule("0")
        x = embed(tokens)
        for number in range(1, 4):
            x = self.get_submodule(str(number))(x)
        return head(embed, x) if self.tied_modules else self.get_submodule("4")(x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_loss_is_that_of_deepspeed(kind: str) -> None:
    """Plain modules and their optimizer take the folder."""
    torch.manual_seed(9)
    model: nn.Module = Stages(kind == "grid") if kind in {"pipeline", "grid"} else Split()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.01)
    strict = kind != "grid"  # nothing says there how the ranks divide frozen parameters
    bytecheckpoint.load(str(GOLDEN / kind), {"model": model, "optimizer": optimizer}, strict=strict, cast=True)
    steps = {float(optimizer.state[p]["step"]) for p in model.parameters() if p.requires_grad}
    assert steps == {2.0}
    generator = torch.Generator().manual_seed(2)
    model.bfloat16()
    if isinstance(model, Stages):
        tokens = torch.randint(VOCABULARY, (8, 5), generator=generator)[: 4 if kind == "grid" else 8]
        loss = _loss(model(tokens[:, :-1]), tokens[:, 1:])
    else:
        loss = model(torch.randn(4, WIDTH, generator=generator).bfloat16()).float().square().mean()
    assert loss.item() == pytest.approx(float((GOLDEN / f"{kind}.loss").read_text()), rel=2e-3)


def test_the_universal_form_of_several_ranks_holds_the_same() -> None:
    native, universal = read("grid"), read("universal_grid")
    assert native["optimizer"]["param_groups"] == universal["optimizer"]["param_groups"]
    for name, slots in native["optimizer"]["state"].items():
        assert all(torch.equal(value, universal["optimizer"]["state"][name][slot]) for slot, value in slots.items())
        assert torch.equal(native["model"][name], universal["model"][name].bfloat16())


def test_tensors_that_nothing_describes_are_those_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout joins them; the whole tensors are those that the patterns describe."""
    whole = read("grid")["model"]
    plain = torch_save.read_object

    def without(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        found.value.pop("universal_checkpoint_info", None)
        return found

    monkeypatch.setattr(torch_save, "read_object", without)
    foreign = read_deepspeed(resolve(str(GOLDEN / "grid")))
    assert "nothing says how 2 tensor-parallel ranks divide 0.weight" in foreign.notes[0]
    layer = "mp_rank_{t:02}:<x>."
    rules = [
        Rule({"mp_rank_{t:02}:0.weight": "v h"}, {"0.weight": "(t v) h"}),
        Rule({layer + "up": "[a: f | b: f] h"}, {"<x>.up": "[a: (t f) | b: (t f)] h"}),
        Rule({layer + "down": "h f"}, {"<x>.down": "h (t f)"}),
        Rule({layer + "norm.(weight|bias)": "h"}, {"<x>.norm.(weight|bias)": "h"}, same=("t",)),
        Rule({layer + "frozen": "h"}, {"<x>.frozen": "h"}, same=("t",)),
        Rule({"<x>.count": "h"}, {"<x>.count": "h"}),
        Rule({"mp_rank_{t:02}:4.(weight|bias)": "..."}, {"4.(weight|bias)": "..."}, same=("t",)),
    ]
    with bytecheckpoint.open(GOLDEN / "grid", layout=Layout("ranks", "files", "mine", rules=rules)) as found:
        for name in whole.keys() & {"1.up", "2.down", "3.norm.weight", "4.weight"}:
            assert torch.equal(found.tensors[f"model/{name}"][...], whole[name])
        assert torch.equal(found.tensors["model/0.weight"][...][:VOCABULARY], whole["0.weight"])


SHAPES = [(4, 3), (4, 3)]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"parameter_to_average_patterns": ["w"]}, "mean of the ranks"),
        ({"parameter_with_row_parallelism_patterns": ["(a*)*"]}, "too complex"),
        ({"parameter_with_row_parallelism_patterns": ["w["]}, "is none"),
        ({"autotp_unsupported_parameter_patterns": {"w": "no reason"}}, "no reason"),
        ({"vocabulary_parameter_patterns": ["w"]}, "original_vocab_size"),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, -1), "partition_dim": 0}]}, "no dimension"),
        ({"affine_map": {"version": 2, "params": {}}}, "version 2 of affine maps"),
        ({"affine_map": {"version": 1, "params": {"w": {"logical_shape": (8, 3), "ranks": {}}}}}, "0"),
    ],
)
def test_divisions_that_are_not_described_are_refused(info: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompatibleCheckpointError, match=message):
        _divisions(info, {"w": SHAPES}, {"w"})


def test_affine_maps_come_before_patterns() -> None:
    """Rows that are dealt out, as no pattern can say; a piece that is scaled or no box is refused."""
    piece = [
        {"shape": [2, 3], "source": [6 * k, [3, 1]], "dest": [6 * (k // 2), [3, 1]], "locations": [k % 2]}
        for k in range(4)
    ]
    ranks = {rank: {"shard_shape": [4, 3], "pieces": piece[rank::2]} for rank in (0, 1)}
    info = {"affine_map": {"version": 1, "params": {"w": {"logical_shape": [8, 3], "ranks": ranks}}}}
    found = _divisions(info, {"w": SHAPES}, {"w"})["w"]
    assert [(part.rank, part.offsets, part.whole) for part in found.parts] == [
        (0, (0, 0), (0, 0)), (0, (2, 0), (4, 0)), (1, (0, 0), (2, 0)), (1, (2, 0), (6, 0)),
    ]  # fmt: skip
    for change in ({"scale": 0.5}, {"source": [1, [3, 1]]}, {"dest": [0, [1, 4]]}):
        changed = {
            "w": {
                "logical_shape": [8, 3],
                "ranks": {**ranks, 0: {"shard_shape": [4, 3], "pieces": [{**piece[0], **change}]}},
            }
        }
        with pytest.raises(IncompatibleCheckpointError, match="'w'"):
            _divisions({"affine_map": {"version": 1, "params": changed}}, {"w": SHAPES}, {"w"})


def test_a_dimension_of_a_view_is_found_in_the_tensor() -> None:
    found = divide_view([(4, 6), (2, 6)], (2, 3, 6), 1, [[2, 1]])
    assert found.shape == (6, 6)
    assert [(part.rank, part.offsets[0], part.lengths[0], part.whole[0]) for part in found.parts] == [
        (0, 0, 2, 0), (1, 0, 1, 2), (0, 2, 2, 3), (1, 1, 1, 5),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no dimension"):
        divide_view([(4, 6), (4, 6)], (5, -1), 0, [[5, 5]])


@pytest.mark.parametrize("number", range(4))
def test_a_lost_layer_is_named(tmp_path: Path, number: int) -> None:
    shutil.copytree(GOLDEN / "pipeline", tmp_path, dirs_exist_ok=True)
    (tmp_path / f"layer_0{number}-model_states.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=rf"lacks files of layers: none has ({number}\.|tied_modules)"):
        read_deepspeed(resolve(str(tmp_path)))


def test_a_layer_that_may_be_several_tied_modules_is_refused() -> None:
    held = {"weight": torch.zeros(2, 3)}
    shapes = {"tied_modules.a.weight": (2, 3), "1.weight": (5,)}
    assert module_of_layer(0, held, shapes) == "tied_modules.a"
    assert module_of_layer(1, held, shapes) == "1"
    assert module_of_layer(0, {"weight": torch.zeros(3)}, shapes) == "0"
    with pytest.raises(IncompatibleCheckpointError, match=r"\['a', 'b'\] layer 0 is"):
        module_of_layer(0, held, {**shapes, "tied_modules.b.weight": (2, 3)})


def _other_layer(folder: Path) -> None:
    torch.save({"weight": torch.ones(16, WIDTH, dtype=torch.bfloat16)}, folder / "layer_04-model_states.pt")


def _same_shape(folder: Path) -> None:
    torch.save({"weight": torch.ones(16, WIDTH, dtype=torch.bfloat16)}, folder / "layer_00-model_states.pt")


def _experts(folder: Path) -> None:
    (folder / "layer_1_expert_0_mp_rank_00_model_states.pt").write_bytes(b"")


def _other_degree(folder: Path) -> None:
    file = folder / "mp_rank_00_model_states.pt"
    value = torch.load(file, weights_only=False)
    value["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}
    torch.save(value, file)


def _other_size(folder: Path) -> None:
    file = folder / "mp_rank_01_model_states.pt"
    value = torch.load(file, weights_only=False)
    value["param_shapes"][0]["3.up"] = torch.Size([17, WIDTH])
    torch.save(value, file)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_other_layer, IncompatibleCheckpointError, r"other values of tied_modules\.embed\.weight"),
        (_same_shape, IncompatibleCheckpointError, r"which layer 'tied_modules\.embed\.weight' is"),
        (_experts, IncompatibleCheckpointError, "files of experts"),
        (_other_degree, IncompatibleCheckpointError, "which of these are one stage"),
        (_other_size, CorruptCheckpointError, r"'state\.3\.up\.fp32' have 96 of 102 elements"),
    ],
)
def test_what_cannot_be_proven_is_refused(
    tmp_path: Path, change: Callable[[Path], None], error: type[CheckpointError], message: str
) -> None:
    folder = Path(shutil.copytree(GOLDEN / "pipeline", tmp_path / "pipeline"))
    change(folder)
    with pytest.raises(error, match=message):
        read_deepspeed(resolve(str(folder)))


def test_a_universal_form_of_dealt_parameters_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "universal1", tmp_path / "universal"))
    shutil.copy(GOLDEN / "dealt" / "mp_rank_00_model_states.pt", folder)
    with pytest.raises(IncompatibleCheckpointError, match="round_robin_gradients"):
        read_deepspeed(resolve(str(folder)))
