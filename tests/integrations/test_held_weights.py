"""What models of inference engines hold has the fingerprint of what they have loaded, fused, cut and transposed."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.integrations.engines.checkpoints import EngineCheckpoints, EngineOptions
from bytecheckpoint.integrations.engines.held_weights import HeldWeights, engine_fingerprint
from bytecheckpoint.integrations.engines.lazy_weights import LazyWeight, WantedWeight, WeightPart
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.tools import fingerprint
from tests.support.worlds import Worlds


class EngineModel(nn.Module):
    """A model whose q and k are rows of one parameter, with a transposed output and a copy of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Parameter(torch.empty(12, 4)), nn.Parameter(torch.empty(6, 4))
        self.embedding, self.head = nn.Parameter(torch.empty(10, 4)), nn.Parameter(torch.empty(12, 4))
        self.register_buffer("scale", torch.zeros(3))

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.qk[:8].copy_(weights["q"])
            self.qk[8:].copy_(weights["k"])
            self.out.copy_(weights["out"].t())
            self.embedding.copy_(weights["embedding"])
            self.head[:10].copy_(weights["embedding"])  # two rows are padding
            self.scale.copy_(weights["scale"])


def loaded(tmp_path: Path, extra: str = "", ranks: Any = None) -> tuple[EngineModel, Path]:
    """Load a checkpoint as the loaders do; return the model and the checkpoint."""
    tensors = {"q": (8, 4), "k": (4, 4), "out": (4, 6), "embedding": (10, 4), "scale": (3,)}
    values = {name: torch.randn(shape) for name, shape in tensors.items()}
    bytecheckpoint.save(tmp_path / "step", {"model": values})
    model, wanted, direct = EngineModel(), dict[str, WantedWeight](), set[str]()

    def read(part: WeightPart) -> torch.Tensor:
        direct.add(part.name)
        return values[part.name]

    weights: Any = {
        name: LazyWeight(WeightPart.whole(name, shape), torch.float32, read, wanted) for name, shape in tensors.items()
    }
    if extra:
        weights[extra] = weights[extra] + 0.0
    model.load_weights(weights)
    held = HeldWeights.of(model, wanted, direct, "model", ranks)
    bytecheckpoint.load(tmp_path / "step", {"model": dict(wanted)}, strict=False)
    for one in wanted.values():
        for memory, first in one.copies:
            memory.copy_(first)
    model.bytecheckpoint_weights = held  # type: ignore[assignment]
    return model, tmp_path / "step"


def test_what_is_held_has_the_fingerprint_of_the_checkpoint(tmp_path: Path) -> None:
    model, step = loaded(tmp_path)
    assert engine_fingerprint(model) == fingerprint(step)
    with torch.no_grad():
        model.head[-1] += 1
    assert engine_fingerprint(model) == fingerprint(step), "padding is no part of it"
    held, model.bytecheckpoint_weights = model.bytecheckpoint_weights, None  # type: ignore[assignment]
    other = copy.deepcopy(model)  # as engines replace parameters after the load
    other.bytecheckpoint_weights = held
    assert engine_fingerprint(other) == fingerprint(step)


def test_what_an_engine_packs_in_the_same_shape_is_refused(tmp_path: Path) -> None:
    model, step = loaded(tmp_path)
    held: Any = model.bytecheckpoint_weights
    samples = held.samples(model)
    model.bytecheckpoint_weights = held.unpacked(model, samples)
    assert engine_fingerprint(model) == fingerprint(step), "nothing is packed"
    model.qk = nn.Parameter(model.qk.detach().roll(6, 0))
    model.bytecheckpoint_weights = held.unpacked(model, samples)
    with pytest.raises(IncompatibleCheckpointError, match="EngineModel does not hold k, q as the checkpoint has it"):
        engine_fingerprint(model)


@pytest.mark.parametrize("name", ["qk", "out", "embedding", "scale"])
def test_any_change_changes_it(name: str, tmp_path: Path) -> None:
    model, step = loaded(tmp_path)
    with torch.no_grad():
        getattr(model, name).view(-1)[0] += 1
        if name == "embedding":
            model.head.view(-1)[0] += 1
    assert engine_fingerprint(model) != fingerprint(step)


def test_what_is_not_held_as_it_was_saved_is_refused(tmp_path: Path) -> None:
    model, _ = loaded(tmp_path)
    model.embedding.data[3] += 1
    with pytest.raises(IncompatibleCheckpointError, match="two copies of a part of embedding differ"):
        engine_fingerprint(model)
    model, _ = loaded(tmp_path / "read", extra="out")
    with pytest.raises(IncompatibleCheckpointError, match="EngineModel does not hold out as the checkpoint has it"):
        engine_fingerprint(model)
    model, _ = loaded(tmp_path / "packed")
    model.qk = nn.Parameter(torch.empty(0))
    with pytest.raises(IncompatibleCheckpointError, match="does not hold k, q as"):
        engine_fingerprint(model)
    with pytest.raises(UsageError, match="Linear was not loaded by"):
        engine_fingerprint(nn.Linear(1, 1))


def asks_with_a_copy_that_differs(folder: str) -> str:
    """Ask on a rank of two of which the second holds two copies that differ; return the error."""
    torch.manual_seed(0)
    model, _ = loaded(Path(folder), ranks=dist.group.WORLD)
    model.embedding.data[3] += dist.get_rank()
    try:
        engine_fingerprint(model)
    except IncompatibleCheckpointError as error:
        return str(error)
    return ""


def test_the_error_of_one_rank_is_raised_on_all(worlds: Worlds, tmp_path: Path) -> None:
    """The others would wait for it until their time limit."""
    found = worlds.run(2, asks_with_a_copy_that_differs, str(tmp_path))
    said = "two copies of a part of embedding differ in the engine"
    assert found == [f"rank 1: {said}", said]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_head_that_is_the_embedding_goes_to_no_engine(tmp_path: Path, tied: bool, shared: bool) -> None:
    """Files of Hugging Face lack it, and vLLM's Gemma refuses it."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "lm_head": nn.Linear(2, 4, bias=False)})
    if shared:
        model["lm_head"].weight = model["embed"].weight
    bytecheckpoint.save(tmp_path / "step", {"model": model})
    engine = EngineCheckpoints(EngineOptions(), None)
    config = SimpleNamespace(tie_word_embeddings=tied, to_dict=dict)
    checkpoint, _ = engine.opened(str(tmp_path / "step"), config)
    with checkpoint:
        names = [name for name, _ in engine.weights(checkpoint, None)]
    assert sorted(names) == ["embed.weight"] + ["lm_head.weight"] * (not (tied and shared))


def test_an_engine_proves_what_it_has_loaded(tmp_path: Path) -> None:
    engine = EngineCheckpoints(EngineOptions(prove=True), SimpleNamespace(world_size=1, rank_in_group=0))
    model, step = loaded(tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match=r"has fingerprints of 0 tensors .* which are 5: save with"):
        engine.prove(str(step), model, None)
    bytecheckpoint.configure(fingerprint=True)
    model, step = loaded(tmp_path / "summed")
    engine.prove(str(step), model, None)
    model.qk.data[9, 2].neg_()
    with pytest.raises(CorruptCheckpointError, match="after the load model/k hold other elements"):
        engine.prove(str(step), model, None)
    EngineCheckpoints(EngineOptions(), None).prove(str(step), model, None)
    model.qk.data[9, 2].neg_()
    model.scale = model.scale.double()
    with pytest.raises(IncompatibleCheckpointError, match=r"of 4 tensors .* which are 5"):
        engine.prove(str(step), model, None)


def test_an_engine_proves_what_it_has_loaded_through_a_layout(tmp_path: Path) -> None:
    """The checkpoint has q and k in one tensor and another name for the output, and no fingerprints."""
    engine = EngineCheckpoints(EngineOptions(prove=True), SimpleNamespace(world_size=1, rank_in_group=0))
    model, step = loaded(tmp_path)
    with bytecheckpoint.open(step) as checkpoint:
        whole = {name: checkpoint[f"model/{name}"][:] for name in ("q", "k", "out", "embedding", "scale")}
    heads = torch.cat([whole["q"].view(4, 2, 4), whole["k"].view(4, 1, 4)], 1).reshape(12, 4)
    own = {"q_and_k": heads, "output": whole["out"].t().contiguous()}
    bytecheckpoint.save(tmp_path / "own", {"model": own | {name: whole[name] for name in ("embedding", "scale")}})
    rules = [
        Rule({"q": "q = (g r) w", "k": "k = (g s) w"}, {"q_and_k": "(g [q: r | k: s]) w"}, r=2, s=1),
        Rule({"out": "w o"}, {"output": "o w"}),
        Rule({"embedding": "v w"}, {"embedding": "v w"}),
        Rule({"scale": "s"}, {"scale": "s"}),
    ]
    layouts = [Layout("engine", "hf", "own", rules=rules)]
    engine.prove(str(tmp_path / "own"), model, layouts)
    model.qk.data[9, 2].neg_()
    with pytest.raises(CorruptCheckpointError, match="after the load model/k hold other elements"):
        engine.prove(str(tmp_path / "own"), model, layouts)


def test_a_parameter_with_other_strides_is_seen_as_it_is(tmp_path: Path) -> None:
    """An engine may replace a parameter by one of another order in memory."""
    model, step = loaded(tmp_path)
    model.qk = nn.Parameter(model.qk.detach().t().contiguous().t())
    with pytest.raises(IncompatibleCheckpointError, match="does not hold k, q as"):
        engine_fingerprint(model)
    model.qk = nn.Parameter(model.qk.detach().contiguous())
    assert engine_fingerprint(model) == fingerprint(step)
