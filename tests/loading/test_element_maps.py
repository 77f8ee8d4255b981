"""Elements change on their way through a layout: block scales of fp8, mxfp4 and nvfp4, rows of int8, and norms plus one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts import Layout
from tests.loading.test_layouts import CONFIG, assert_holds, fused, module_of, weights
from tests.support.tiny_model import trained
from tests.support.worlds import on_ranks

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def in_blocks(weight: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in blocks of fp8, its scales, and the values that both say."""
    rows, columns = weight.shape
    spread = torch.zeros(-(-rows // size) * size, -(-columns // size) * size)
    spread[:rows, :columns] = weight
    tiles = spread.view(spread.shape[0] // size, size, -1, size)
    scale = tiles.abs().amax((1, 3)) / 448
    whole = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
    quantised = (weight / whole).to(torch.float8_e4m3fn)
    return quantised, scale, quantised.float() * whole


@pytest.mark.parametrize("options", [{}, {"cast": True}, {"cast": True, "strict": False}])
def test_scales_are_not_forgotten_without_a_layout(tmp_path: Path, options: dict[str, bool]) -> None:
    quantised, scale, meant = in_blocks(torch.randn(256, 128))
    path = saved(tmp_path / "hf", {"w": quantised, "w_scale_inv": scale})
    live = {"w": torch.zeros(256, 128)}
    with pytest.raises(IncompatibleCheckpointError, match=r"with scales in w_scale_inv, .*layout='fp8'"):
        bytecheckpoint.load(path, {"model": dict(live)}, **(options or {"strict": False}))
    assert not live["w"].any()
    rows = saved(tmp_path / "rows", {"w.weight": torch.ones(2, 2, dtype=torch.int8), "w.SCB": torch.ones(2)})
    with pytest.raises(IncompatibleCheckpointError, match=r"with scales in w\.SCB"):
        bytecheckpoint.load(rows, {"model": {"w.weight": torch.zeros(2, 2)}}, **(options or {"strict": False}))
    bytecheckpoint.load(path, {"model": live}, layout="fp8", cast=True)
    assert torch.equal(live["w"], meant)
    bytecheckpoint.load(saved(tmp_path / "plain", {"w": quantised}), {"model": live}, cast=True)
    assert torch.equal(live["w"], quantised.float()), "it has no scales"


def unpacked(stored: torch.Tensor) -> torch.Tensor:
    """The values of bytes with two elements of 4 bits, one after the other."""
    values = [[E2M1[byte & 15], E2M1[byte >> 4]] for byte in stored.reshape(-1).tolist()]
    return torch.tensor(values).view(*stored.shape[:-1], -1)


def saved(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return path


def quantised_llama() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A Llama in small blocks of fp8 as it is stored, and as it is meant."""
    stored, meant = {}, {}
    for name, weight in weights().items():
        stored[name] = meant[name] = weight
        if "proj" in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = in_blocks(weight, 7)
    return stored, meant


def blocks_of(size: int) -> Layout:
    text = (Path(bytecheckpoint.__file__).parent / "layouts/builtin/llama.layout").read_text()
    line = f"scales hf <w>_scale_inv : o i of <w> : (o a) (i b) with a = {size}, b = {size} -> blocks\n"
    decoder = (Path(bytecheckpoint.__file__).parent / "layouts/builtin/decoder.layout").read_text()
    body = "\n".join(x for x in decoder.splitlines() if not x.startswith(("layout", "scales")))
    return Layout.from_text(text.splitlines()[0] + "\n" + line + body)


@on_ranks(2)
def test_blocks_of_fp8_onto_two_ranks(path: str) -> None:
    """Blocks cross the shards, the heads and the fused parts; the results are rounded once, to the dtype of each rank."""
    stored, meant = quantised_llama()
    rank = dist.get_rank()
    if rank == 0:
        saved(Path(path), stored, **CONFIG, dtype="float32")
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    expected = fused(meant)
    module = module_of(expected)
    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        cut = distribute_tensor(parameter.data, mesh, [Shard(parameter.ndim - 1)])
        setattr(module.get_submodule(owner), last, nn.Parameter(cut))
    bytecheckpoint.load(path, {"model": module}, layout=blocks_of(7))
    assert_holds(module, expected)
    low = module_of(fused(meant)).bfloat16()
    bytecheckpoint.load(path, {"model": low}, layout=blocks_of(7), cast=True)
    assert_holds(low, {name: value.bfloat16() for name, value in expected.items()})
    assert not isinstance(next(low.parameters()), DTensor)


def test_names_stay_and_blocks_go(tmp_path: Path) -> None:
    """The layout `fp8` is for a program with the same names; a shape that is no multiple of 128 has smaller last blocks."""
    weight, scale, meant = in_blocks(torch.randn(300, 130))
    folder = saved(tmp_path / "hf", {"a.weight": weight, "a.weight_scale_inv": scale, "b": torch.ones(3)})
    module = module_of({"a.weight": meant.bfloat16(), "b": torch.ones(3)})
    report = bytecheckpoint.load(folder, {"model": module}, layout="fp8")
    assert not report.unexpected
    assert_holds(module, {"a.weight": meant.bfloat16(), "b": torch.ones(3)})
    with bytecheckpoint.open(folder, layout="fp8") as found:
        assert found["model/a.weight"].dtype == torch.bfloat16
        assert torch.equal(found["model/a.weight"][100:290, 3:129], meant.bfloat16()[100:290, 3:129])


def test_experts_of_gpt_oss_as_they_are_published(tmp_path: Path) -> None:
    """Blocks of mxfp4 become the experts of Megatron, gate and up apart, and of torchtitan, as transformers' own order of
    bytes says."""
    name, experts, inner, width = "model.layers.0.mlp.experts", 2, 6, 64
    tensors = {f"{name}.gate_up_proj_blocks": torch.randint(0, 256, (experts, 2 * inner, width // 32, 16)).byte()}
    tensors[f"{name}.down_proj_blocks"] = torch.randint(0, 256, (experts, width, 2, 16)).byte()
    expected, titan = {}, {}
    for kind, last in (("gate_up_proj", 1), ("down_proj", 2)):
        blocks = tensors[f"{name}.{kind}_blocks"]
        scales = torch.randint(120, 130, blocks.shape[:3]).byte()
        tensors[f"{name}.{kind}_scales"] = scales
        # As _convert_moe_packed_tensors of transformers: two elements in turn, blocks one after the other.
        whole = (unpacked(blocks) * 2.0 ** (scales.float() - 127)[..., None]).flatten(2)
        titan[f"layers.0.moe.routed_experts.inner_experts.mlp{last}_weight_{'EGD' if last == 1 else 'EDF'}"] = (
            whole.bfloat16()
        )
        if last == 1:
            whole = torch.cat([whole[:, 0::2], whole[:, 1::2]], 1)
        for e in range(experts):
            expected[f"decoder.layers.0.mlp.experts.linear_fc{last}.weight{e}"] = whole[e].bfloat16()
    quantised = {"quant_method": "mxfp4"}
    folder = saved(tmp_path / "hf", tensors, model_type="gpt_oss", quantization_config=quantised)
    for layout, wanted in (("gpt_oss", expected), ("torchtitan_gpt_oss", titan)):
        module = module_of(wanted)
        bytecheckpoint.load(folder, {"model": module}, layout=layout)
        assert_holds(module, wanted)


@given(st.data())
def test_any_box_of_any_operation(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Boxes of quantised tensors equal those of the whole, whatever rule they go through."""
    draw = data.draw
    rows, groups, seed = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 99))
    torch.manual_seed(seed)
    kind = draw(st.sampled_from(["mxfp4", "nvfp4", "rows", "blocks"]))
    if kind == "mxfp4":
        tensors = {"w_blocks": torch.randint(0, 256, (2 * rows, groups, 4), dtype=torch.uint8)}
        tensors["w_scales"] = torch.randint(117, 137, (2 * rows, groups), dtype=torch.uint8)
        factor = 2.0 ** (tensors["w_scales"].double() - 127)
        whole = (unpacked(tensors["w_blocks"]) * factor[..., None]).reshape(2 * rows, -1)
        lines, left = ["<w>_scales : o g of <w>_blocks : o g b -> mxfp4"], "w_blocks : (o [x: 1 | y: 1]) g b"
        right = "[x: o | y: o] (g b)"
    elif kind == "nvfp4":
        tensors = {"w": torch.randint(0, 256, (2 * rows, 4 * groups), dtype=torch.uint8)}
        tensors["w_scale"] = torch.rand(2 * rows, groups).to(torch.float8_e4m3fn)
        tensors["w_scale_2"] = torch.rand(())
        factor = tensors["w_scale"].float().repeat_interleave(8, 1) * tensors["w_scale_2"]
        whole = unpacked(tensors["w"]) * factor
        lines = [
            "<w>_scale : o g of <w> : o (g b) with b = 8 -> nvfp4",
            "<w>_scale_2 : of <w> : o i -> nvfp4",
        ]
        left, right = "w : (o [x: 1 | y: 1]) i", "[x: o | y: o] i"
    else:
        tensors = {"w": torch.randint(-128, 128, (2 * rows, 5 * groups), dtype=torch.int8)}
        size = (1, 5 * groups) if kind == "rows" else (3, 2)
        shape = [-(-n // block) for n, block in zip(tensors["w"].shape, size, strict=True)]
        tensors["w_scale"] = torch.rand(shape[:1] if kind == "rows" else shape)
        spread = tensors["w_scale"] if kind == "blocks" else tensors["w_scale"][:, None]
        spread = spread.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
        whole = tensors["w"] * spread[: 2 * rows, : 5 * groups]
        axes = "o of <w> : o i" if kind == "rows" else "o i of <w> : (o a) (i b) with a = 3, b = 2"
        lines, left, right = [f"<w>_scale : {axes} -> {kind}"], "w : (o [x: 1 | y: 1]) i", "[x: o | y: o] i"
    text = "layout t a <-> b\n" + "".join(f"scales a {line}\n" for line in lines) + f"rules\n{left}\n <-> v : {right}\n"
    expected = torch.cat([whole[0::2], whole[1::2]])
    folder = saved(tmp_path_factory.mktemp("quantised"), tensors, dtype="float32")
    low = [draw(st.integers(0, n - 1)) for n in expected.shape]
    high = [draw(st.integers(a + 1, n)) for a, n in zip(low, expected.shape, strict=True)]
    if kind in ("mxfp4", "nvfp4"):
        low[1], high[1] = low[1] // 2 * 2, -(-high[1] // 2) * 2
    box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    with bytecheckpoint.open(folder, layout=Layout.from_text(text)) as found:
        np.testing.assert_allclose(found["model/v"][box], expected[box], rtol=1e-6)


def test_norms_plus_one(tmp_path: Path) -> None:
    """Weights and master weights are shifted, other state is not; the way back subtracts."""
    layout = Layout.from_text("layout t a <-> b\nrules\nn : h\n <-> m : h\n add 1\n")
    model = nn.Module()
    model.n = nn.Parameter(torch.tensor([0.25, -1.0, 3.0]))
    optimizer = torch.optim.AdamW(model.parameters())
    (model.n**2).sum().backward()
    optimizer.step()
    bytecheckpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    other = nn.Module()
    other.m = nn.Parameter(torch.zeros(3))
    mine = torch.optim.AdamW(other.parameters())
    bytecheckpoint.load(tmp_path / "a", {"model": other, "optimizer": mine}, layout=layout)
    assert torch.equal(other.m, model.n + 1)
    assert torch.equal(mine.state[other.m]["exp_avg"], optimizer.state[model.n]["exp_avg"])
    bytecheckpoint.save(tmp_path / "b", {"model": other})
    bytecheckpoint.load(tmp_path / "b", {"model": model}, layout=layout)
    assert torch.equal(model.n, other.m - 1)


BLOCKS = """layout t a <-> b
scales a <w>_scale : o i of <w> : (o a) (i b) with a = 2, b = 2 -> blocks
rules
w : o i
    <-> v : o i
"""


def test_means(tmp_path: Path) -> None:
    """Norms of ranks that have drifted apart, as numbers in names and as dims of a tensor; nothing undoes a mean."""
    torch.manual_seed(1)
    ranks = [torch.randn(6).bfloat16() for _ in range(3)]
    stacked, plain = torch.randn(2, 5, 3, 4), torch.randn(6)
    found = {f"rank{k}.norm": value for k, value in enumerate(ranks)} | {"stacked": stacked, "plain": plain}
    layout = Layout.from_text(
        "layout t a <-> b\nrules\nrank{t}.norm : (h g)\n <-> norm : g h\n mean t\n with g = 2, t = 3\n"
        "stacked : s h t w\n <-> w : w h\n mean s t\nplain : n\n <-> n : n\n"
    )
    expected = {
        "norm": (sum(r.float() for r in ranks) / 3).bfloat16().view(3, 2).t(), "w": stacked.mean((0, 2)).t(), "n": plain,
    }  # fmt: skip
    with bytecheckpoint.open(saved(tmp_path / "a", found), layout=layout) as opened:
        for name, value in expected.items():
            torch.testing.assert_close(opened[f"model/{name}"][...], value)
        torch.testing.assert_close(opened["model/w"][1:3, 2:4], expected["w"][1:3, 2:4])
    module = module_of(expected)
    bytecheckpoint.load(tmp_path / "a", {"model": module}, layout=layout)
    for name, live in module.state_dict().items():
        torch.testing.assert_close(live, expected[name])
    optimizer = trained(module)
    bytecheckpoint.save(tmp_path / "b", {"model": module, "optimizer": optimizer})
    with pytest.raises(
        IncompatibleCheckpointError, match="is a mean along 't' in the checkpoint, which nothing undoes"
    ):
        bytecheckpoint.load(tmp_path / "b", {"model": module_of(found)}, layout=layout)
    back = module_of(found)
    bytecheckpoint.save(tmp_path / "c", {"model": back, "optimizer": trained(back)})
    states = {"model": module, "optimizer": optimizer}
    with pytest.raises(IncompatibleCheckpointError, match=r"'exp_avg(_sq)?' of parameters of which text takes a mean"):
        bytecheckpoint.load(tmp_path / "c", states, layout=layout)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": (4, 4), "w_scale": (2, 3)}, r"text:2: w_scale .* but w .* .4, 4. in blocks of 2 x 2, which need .2, 2."),
        ({"w": (4, 4), "w_scale": (2,)}, r"w_scale has shape \[2\], but w has shape \[4, 4\]"),
        ({"w": (4, 4)}, "w is stored as float8_e4m3fn, and no `scales` line of text finds its scales"),
        ({"v_scale": (2, 2), "w": (4, 4)}, "v_scale holds scales of v, which is missing"),
        ({"w": (4, 4, 1), "w_scale": (2, 2)}, r"w has 3 dimensions, but '\(o a\) \(i b\)' has 2"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str) -> None:
    kinds = {n: torch.ones(s).to(torch.float32 if "scale" in n else torch.float8_e4m3fn) for n, s in tensors.items()}
    folder = saved(tmp_path / "hf", kinds)
    with pytest.raises(IncompatibleCheckpointError, match=message):
        bytecheckpoint.open(folder, layout=Layout.from_text(BLOCKS))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("<w>_s : o of <w> : o i -> mxfp8", "'mxfp8' is no operation: write blocks, rows, mxfp4, nvfp4"),
        ("<w>_s : k of <w> : o i -> rows", "'k' of the scales stands in no axis of 'o i'"),
        ("<w>_s : o of <w> : (o a) i -> blocks", r"'\(o a\)' is no axis of scaled tensors"),
        ("<w>_s : o of x : o i -> rows", "'<w>_s' and 'x' do not have the same numbers and texts"),
        ("<w>_s : o of (o i) -> rows", "expected 'scales SIDE NAME : AXES of NAME : AXES"),
    ],
)
def test_lines_of_scales_that_are_wrong(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"text:2: {message}"):
        Layout.from_text(f"layout t a <-> b\nscales a {line}\nrules\nw : o i\n <-> v : o i\n")


def test_what_cannot_hold_the_values_is_refused(tmp_path: Path) -> None:
    layout = Layout.from_text(BLOCKS)
    folder = saved(tmp_path / "hf", {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale": torch.ones(2, 2)})
    with pytest.raises(
        IncompatibleCheckpointError, match=r"model/v is float8_e4m3fn here, but its elements are scaled"
    ):
        bytecheckpoint.load(
            folder, {"model": module_of({"v": torch.ones(4, 4).to(torch.float8_e4m3fn)})}, layout=layout, cast=True
        )
    packed = Layout.from_text(
        "layout t a <-> b\nscales a <w>_s : o of <w> : o i -> nvfp4\nrules\nw : o i\n <-> v : o i\n"
    )
    folder = saved(tmp_path / "odd", {"w": torch.ones(2, 3, dtype=torch.uint8), "w_s": torch.ones(2)})
    with bytecheckpoint.open(folder, layout=packed) as found:
        assert torch.equal(found["model/v"][:, 2:4].float(), torch.tensor([[0.5, 0.0], [0.5, 0.0]]))
        with pytest.raises(IncompatibleCheckpointError, match="between the two elements of a byte"):
            found["model/v"][:, 1:4]
