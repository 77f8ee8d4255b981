"""Checkpoints of Megatron-Core, read as they lie: every element equals what our own adapter saved of the same state."""

from __future__ import annotations

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.formats import megatron
from bytecheckpoint.formats.dcp import read_content
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.formats.files import open_file
from bytecheckpoint.formats.foreign import ForeignColumns
from bytecheckpoint.formats.megatron import read_megatron
from bytecheckpoint.formats.megatron_buckets import (
    ModelWeight,
    OptimizerBucket,
    PlacedParameter,
    _ContentSearch,
    _Local,
)
from bytecheckpoint.formats.megatron_names import named_groups, unstacked
from bytecheckpoint.formats.rounding import rounded
from bytecheckpoint.formats.rows import RowColumns
from bytecheckpoint.representation.boxes import BoxTable, row_major
from bytecheckpoint.representation.values.codec import decode
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import export
from tests.loading.test_layouts import module_of

GOLDEN = Path(__file__).parent / "golden" / "megatron-0.19.2"
OLD = Path(__file__).parent / "golden" / "megatron-0.14.0" / "fully_sharded_model_space"
KINDS = ["fully_reshardable", "dp_reshardable"]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "fully_reshardable", tmp_path / "saved"))


def digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_equals_what_was_trained(kind: str) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    assert detect(resolve(str(GOLDEN / kind))).format == "megatron"
    with bytecheckpoint.open(GOLDEN / kind) as found:
        digests = {key: digest(found.tensors[key][...]) for key in found.tensors}
    assert digests == expected and len(expected) == 131


def test_flat_ranges_of_parts_are_read_as_megatron_itself_loads_them() -> None:
    """Version 0.14 with an optimizer of which ranks have ranges of parts; plain values are in common.pt."""
    expected = json.loads((OLD.parent / "expected.json").read_text())
    foreign = read_megatron(resolve(str(OLD)))
    assert max(np.bincount(foreign.catalog.boxes.tensor)) > 4 and not foreign.notes
    with bytecheckpoint.open(OLD) as found:
        for key, digest in expected.items():
            data = found.tensors[key][...].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert sha256(data).hexdigest() == digest, key
        assert found.tensors["optimizer/state/decoder.layers.1.mlp.linear_fc2.weight/step"][...] == 3
    extra = decode(foreign.values["extra_states"], on_tensor=TensorRef, on_unregistered=lambda name, value: value)
    assert extra["args"] == {"tensor_model_parallel_size": 2, "hidden_size": 16}


def test_flat_ranges_that_fit_no_weight_are_refused() -> None:
    content = read_content(resolve(str(OLD)))
    number = content.names.index("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight")
    shapes = content.columns.shapes
    plain, shapes[number] = shapes[number], (2, 3, 1, 192)
    with pytest.raises(ValueError, match=r"linear_fc1\.weight' of shape .* is not in parts of"):
        megatron.without_flat_ranges(content)
    shapes[number] = plain
    content.names[content.names.index("decoder.layers.mlp.linear_fc1.weight")] = "other"
    with pytest.raises(IncompatibleCheckpointError, match=r"no weight says .*exp_avg\.decoder\.layers\.mlp"):
        megatron.without_flat_ranges(content)


@pytest.mark.parametrize("fqn", ["decoder.layers.2.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"])
def test_a_changed_element_of_a_bucket_is_refused_by_its_parameter(tmp_path: Path, fqn: str) -> None:
    folder = Path(shutil.copytree(GOLDEN / "dp_reshardable", tmp_path / "saved"))
    catalog = read_megatron(resolve(str(folder))).catalog
    number = catalog.fqn.to_list().index(f"state.{fqn}.fp32")
    row = int(np.flatnonzero(catalog.boxes.tensor == number)[-1])
    with open(folder / catalog.files[catalog.file[row]].name, "r+b") as file:
        file.seek(int(catalog.byte_offset[row] + catalog.byte_length[row]) - 2)
        data = file.read(1)
        file.seek(-1, 1)
        file.write(bytes((data[0] ^ 0x80,)))  # the last bit of the fp32 element that its bf16 weight has
    with pytest.raises(CorruptCheckpointError, match=f"round to the weights of no parameter.*{re.escape(fqn)}"):
        bytecheckpoint.open(folder)


def test_rounding_is_that_of_torch() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(1)).int()
    values = bits.view(torch.float32).nan_to_num()
    for dtype in ("bfloat16", "float16", "float32"):
        expected = values.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
        assert rounded(values.numpy(), dtype) == expected


def placed(*weights: str) -> list[PlacedParameter]:
    """Return parameters in a bucket, each as the numbers of the weights that have its content."""
    found = [[_Local(ModelWeight(n, "float32", (int(n),), ()), 0, 1, (0,)) for n in each] for each in weights]
    return [PlacedParameter(OptimizerBucket("g", "b", 0), 0, 1, each) for each in found]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (["9", "876", "876", "876", "5"], "98765"),
        (["87", "6", "5"], "765"),  # the nearest, where the buffer begins
        (["9", "876"], "98"),  # or ends
        (["0", "87", "6"], "076"),  # behind the copy of a tied embedding
        (["9", "876", "876", "5"], None),  # one of the three is in no bucket
        (["987", "87"], None),  # nothing is certain
    ],
)
def test_equal_weights_are_told_apart_by_their_order_or_refused(content: list[str], expected: str | None) -> None:
    parameters = placed(*content)
    search = _ContentSearch("here", {}.__getitem__, [], "param")
    if expected is None:
        with pytest.raises(CorruptCheckpointError, match="nothing says which state in the buckets is that of"):
            search._decide(parameters, set())
    else:
        search._decide(parameters, set())
        assert "".join(one.found[0].weight.fqn for one in parameters) == expected


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
    assert unstacked("a{}.layers.3.mlp.w") == ("a{{}}.layers.3.mlp.w", 0)
    assert unstacked("decoder.layers.2.mlp.experts.experts.linear_fc1.weight") == (
        "decoder.layers.2.mlp.experts.local_experts.{}.linear_fc1.weight", 1,
    )  # fmt: skip
    assert unstacked("layers.mlp.experts.experts.w") == ("layers.{}.mlp.experts.local_experts.{}.w", 2)


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


@pytest.mark.parametrize("text", ["", '{"author": "me"}'])
@pytest.mark.parametrize("folder", [OLD, GOLDEN / KINDS[0]], ids=["0.14", "0.19"])
def test_names_of_values_are_a_marker_too(folder: Path, text: str, tmp_path: Path) -> None:
    """Without its file the folder would be one of DCP, whose tensors hold all layers."""
    storage = resolve(str(shutil.copytree(folder, tmp_path / "saved")))
    expected = detect(storage).read(storage).catalog.keys()
    (tmp_path / "saved" / "metadata.json").unlink()
    if text:
        (tmp_path / "saved" / "metadata.json").write_text(text)
    found = detect(storage).read(storage)
    assert found.format == "megatron" and found.catalog.keys() == expected
    assert any("metadata.json of Megatron is missing" in note for note in found.notes)


def test_metadata_of_another_program_is_no_marker(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text('{"author": "me"}')
    assert read_megatron(resolve(str(tmp_path))).format == "dcp"


def test_a_missing_file_is_named(copied: Path) -> None:
    (copied / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
        bytecheckpoint.open(copied)


def test_a_missing_file_of_common_values_is_named(tmp_path: Path) -> None:
    """Megatron-Core 0.14 keeps the hyperparameters in it, so that an optimizer would keep its own."""
    folder = shutil.copytree(GOLDEN.parent / "megatron-0.14.0" / "fully_sharded_model_space", tmp_path / "saved")
    (folder / "common.pt").rename(tmp_path / "common.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"saved lacks common\.pt"):
        read_megatron(resolve(str(folder)))
    (tmp_path / "common.pt").rename(folder / "common.pt")
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"saved lacks \.metadata, which .* last: a save was killed"):
        bytecheckpoint.open(folder)


def test_huge_stacks_are_refused_before_memory_is_taken() -> None:
    shape = (1 << 40, 4)
    columns = ForeignColumns(dtypes=["float32"], shapes=[shape])
    boxes = BoxTable.build([], [], [], 2)
    rows = RowColumns(boxes, np.zeros(0, np.int32), np.zeros(0, np.int64), row_major(boxes.lengths))
    storage = resolve(str(GOLDEN / "fully_reshardable"))
    with open_file(storage, ".metadata") as file:
        content = megatron.DcpContent(columns, rows, ["layers.weight"], {}, None, file, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no stack of tensors"):
        megatron._TorchDist(storage, content).add_tensors()


@pytest.mark.parametrize(("decayed_norms", "noted"), [(True, False), (False, False), (None, True)])
def test_norms_of_queries_and_keys_may_have_weight_decay(decayed_norms: bool | None, noted: bool) -> None:
    """The program's arguments say it (`--apply-wd-to-qk-layernorm`); without them a note tells what was assumed."""
    names = ["layers.0.q_layernorm.weight", "layers.0.linear.weight", "layers.0.linear.bias", "norm.weight"]
    shapes = {name: (4, 4) if name == names[1] else (4,) for name in names}
    args = {} if decayed_norms is None else {"apply_wd_to_qk_layernorm": decayed_norms}
    found = named_groups([{"wd_mult": 1.0}, {"wd_mult": 0.0}], shapes, {}, args)
    decayed, others = found.groups
    assert decayed["params"] == (names[:2] if decayed_norms else names[1:2])
    assert others["params"] == (names[2:] if decayed_norms else [names[0], *names[2:]])
    assert any("queries and keys" in note for note in found.notes) == noted


@pytest.mark.parametrize(
    ("said", "args"),
    [
        ({"default_config": False, "max_lr": 0.5}, {"decoupled_lr": 0.5}),
        ({"default_config": True, "max_lr": 0.1, "is_decoupled_lr": True}, {}),  # of older versions
        ({"default_config": False, "max_lr": 0.5}, {"decoupled_lr": 0.5, "use_mup": True}),
        ({"default_config": False, "max_lr": 0.5}, {}),
    ],
)
def test_embedding_and_head_may_have_a_learning_rate_of_their_own(said: dict[str, Any], args: dict[str, Any]) -> None:
    """Where nothing says that, the group may be one of other matrices."""
    names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"]
    groups = [{"default_config": True, "max_lr": 0.1}, {"max_lr": 0.1, "wd_mult": 0.0}, said]
    found = named_groups(groups, dict.fromkeys(names, (4, 4)) | {"norm.weight": (4,)}, {}, args)
    known = len(args) == 1 or "is_decoupled_lr" in said
    whole = [names[1:2], ["norm.weight"], [names[0], names[2]]] if known else [[], ["norm.weight"], []]
    assert [group["params"] for group in found.groups] == whole
    assert bool(found.undecided) != known and found.notes == found.undecided


def test_adam_beside_muon_has_the_parameters_with_its_moments() -> None:
    """Muon has a group without betas; which matrices are Adam's shows in their state only."""
    states = {"linear.weight": ["momentum_buffer"], "embedding.weight": ["exp_avg", "exp_avg_sq"]}
    groups = [{"momentum": 0.95}, {"betas": (0.9, 0.99), "step": 3}, {"betas": (0.9, 0.99), "wd_mult": 0.0, "step": 3}]
    shapes = dict.fromkeys(states, (4, 4)) | {"norm.weight": (4,)}
    found = named_groups(groups, shapes, states | {"norm.weight": ["exp_avg"]}, {})
    assert [group["params"] for group in found.groups] == [[name] for name in shapes]
    assert found.steps == {"embedding.weight": 3, "norm.weight": 3}
    assert not found.notes


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_holds_the_same(kind: str, tmp_path: Path) -> None:
    """The buckets of Megatron's default format become tensors, which it loads at any layout."""
    expected = json.loads((GOLDEN / "expected.json").read_text())
    report = export(GOLDEN / kind, tmp_path / "out", format="megatron", max_shard_bytes=50_000)
    assert len(report.files) > 4 and set(report.files) == {file.name for file in (tmp_path / "out").iterdir()}
    with bytecheckpoint.open(GOLDEN / kind) as first, bytecheckpoint.open(tmp_path / "out") as found:
        digests = {key: digest(found.tensors[key][...]) for key in found.tensors}
        assert digests.items() >= expected.items()
        for plain in ("opt_param_scheduler", "extra_states"):
            keys = [key for key in first if key.startswith(f"{plain}/") and "content_metadata" not in key]
            assert keys and all(found[key] == first[key] for key in keys)
        groups = [[{**group, "params": 0} for group in opened["optimizer/param_groups"]] for opened in (first, found)]
        assert groups[0] == groups[1]
        assert found["extra_states/content_metadata.distrib_optim_sharding_type"] == "fully_reshardable"


def test_layers_that_differ_keep_their_numbers(tmp_path: Path) -> None:
    experts = {f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight": torch.randn(2, 3) for e in range(2)}
    dense = {"decoder.layers.0.mlp.linear_fc1.weight": torch.randn(4, 3)}
    both = {f"decoder.layers.{n}.self_attention.linear_proj.weight": torch.randn(3, 3) for n in range(2)}
    model = {**experts, **dense, **both, "decoder.final_layernorm.weight": torch.ones(3)}
    bytecheckpoint.save(tmp_path / "own", {"model": model})
    export(tmp_path / "own", tmp_path / "out", format="megatron")
    names = read_content(resolve(tmp_path / "out")).names
    stack = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    assert {*dense, *both, stack, "decoder.final_layernorm.weight"} == set(names)
    with bytecheckpoint.open(tmp_path / "out") as found:
        assert all(torch.equal(found.tensors[f"model/{name}"][...], value) for name, value in experts.items())


def test_what_megatron_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Before a byte is written."""
    names = [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(2)]
    good = {name: torch.ones(2, 2) for name in names}
    cases: dict[str, tuple[dict[str, object], str]] = {
        "names": ({"model": {"model.layers.0.mlp.weight": torch.ones(2)}}, "names of 'model' are not Megatron's"),
        "objects": ({"model": good, "extra_states": {"where": Path("x")}}, "does not load 'where'"),
        "experts": (
            {"model": good | {f"decoder.layers.{n}.experts.local_experts.1.a": torch.ones(2) for n in range(2)}},
            "no stack of different experts, as 'decoder.layers.0.experts.experts.a'",
        ),
    }
    model = module_of(good)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for name, group, message in (
        ("torch", {"params": parameters}, "settings that these lack .'wd_mult'.: state= exports the model alone"),
        ("frozen", {"params": parameters[:1], "wd_mult": 1.0}, rf"or of none; {names[1]} have none"),
    ):
        optimizer = torch.optim.AdamW([group])
        optimizer.step()
        cases[name] = {"model": model, "optimizer": optimizer}, message
    for name, (states, message) in cases.items():
        bytecheckpoint.save(tmp_path / name, states)
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / name, tmp_path / "out", format="megatron")
        assert not (tmp_path / "out").exists()
    assert export(tmp_path / "torch", tmp_path / "out", format="megatron", state="model").tensors == 2
