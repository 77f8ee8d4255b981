"""Modules and optimizers of one list that hold one tensor several times: virtual pipeline chunks with tied weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.ragged import ragged
from tests.support.seeds import seeded
from tests.support.settings import using

LAYERS = 2
MAKERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
}
MODES: dict[str, dict[str, bool]] = {"sync": {}, "async": {"async_checkpoint": True}}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with using(writer="thread"):
        yield


class Chunk(nn.Module):
    """Some layers of the model. The first and the last layer use the embedding; every chunk holds the buffer."""

    embed: nn.Parameter | None

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in layers})
        if 0 in layers or LAYERS - 1 in layers:
            self.embed = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "0" in self.layers:
            assert self.embed is not None
            x = self.embed[x]
        for layer in self.layers.values():
            x = torch.tanh(layer(x)) * self.scale
        if str(LAYERS - 1) in self.layers:
            assert self.embed is not None
            x = x @ self.embed.T
        return x


class Run:
    """The training of a model of `chunks` virtual stages, each with an optimizer of its own."""

    def __init__(self, chunks: int, maker: str = "adamw", seed: int = 0) -> None:
        each = LAYERS // chunks
        with seeded(seed):
            self.chunks = [Chunk(range(i * each, (i + 1) * each)) for i in range(chunks)]
        for chunk in self.chunks[1:]:
            with torch.no_grad():
                chunk.embed.copy_(self.chunks[0].embed)
        self.optimizers = [MAKERS[maker](chunk.parameters()) for chunk in self.chunks]
        for number, optimizer in enumerate(self.optimizers):
            optimizer.param_groups[0]["weight_decay"] = 0.01
            optimizer.param_groups[0]["mark"] = number

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.chunks, "optimizer": self.optimizers}

    def step(self, number: int) -> float:
        tokens = torch.randint(0, 8, (16,), generator=torch.Generator().manual_seed(number))
        x = tokens
        for chunk in self.chunks:
            chunk.zero_grad()
            x = chunk(x)
        loss = nn.functional.cross_entropy(x, tokens.flip(0))
        loss.backward()
        copies = [chunk.embed for chunk in self.chunks]
        if len(copies) == 2:  # the all-reduce of the embedding group
            summed = copies[0].grad + copies[1].grad
            copies[0].grad, copies[1].grad = summed, summed.clone()
        for chunk, optimizer in zip(self.chunks, self.optimizers, strict=True):
            optimizer.step()
            chunk.scale += 0.125
        return float(loss.detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_training_continues_exactly(before: int, after: int, maker: str, mode: str, tmp_path: Path) -> None:
    one, two = Run(before, maker), Run(after, maker, seed=1)
    for optimizer in (*one.optimizers, *two.optimizers):
        optimizer.param_groups[0]["mark"] = 0  # the groups may join
    for number in range(3):
        one.step(number)
    bytecheckpoint.save(tmp_path / "s", one.states, **MODES[mode]).result(60)
    bytecheckpoint.load(tmp_path / "s", two.states)
    assert [two.step(n) for n in range(3, 6)] == [one.step(n) for n in range(3, 6)]
    copies = [chunk.embed for chunk in two.chunks]
    assert all(torch.equal(copies[0], other) and copies[0] is not other for other in copies[1:])


@pytest.mark.parametrize("split", [False, True], ids=["replicas", "stages"])
def test_several_ranks(split: bool, tmp_path: Path) -> None:
    """Two ranks hold all chunks each (DDP), or one chunk each (a pipeline), and another layout loads them."""

    def part(run: Run, rank: int) -> dict[str, Any]:
        return {"model": [run.chunks[rank]], "optimizer": [run.optimizers[rank]]} if split else run.states

    def save(collective: Collective) -> None:
        run = Run(2)
        run.step(0)
        bytecheckpoint.save(tmp_path / "s", part(run, collective.rank))

    ThreadWorld(2).run(save, timeout=60)
    reference = Run(2)
    reference.step(0)
    loaded = Run(2, seed=1)
    bytecheckpoint.load(tmp_path / "s", loaded.states)
    bytecheckpoint.save(tmp_path / "t", loaded.states)
    assert [o.param_groups[0]["mark"] for o in loaded.optimizers] == [0, 1]

    def load(collective: Collective) -> float:
        run = Run(2, seed=2)
        bytecheckpoint.load(tmp_path / "t", part(run, collective.rank))
        other = Run(2, seed=3)
        bytecheckpoint.load(tmp_path / "t", other.states)
        assert torch.equal(run.chunks[collective.rank].embed, other.chunks[0].embed)
        return other.step(1)

    assert ThreadWorld(2).run(load, timeout=60) == [reference.step(1)] * 2
    assert loaded.step(1) == load_loss(tmp_path / "s")


def load_loss(path: Path) -> float:
    run = Run(2, seed=4)
    bytecheckpoint.load(path, run.states)
    return run.step(1)


DIFFERENCES: dict[str, Any] = {
    "model/embed is held twice": lambda run: run.chunks[1].embed.data.view(-1)[5].add_(1),
    "model/scale is held twice": lambda run: run.chunks[1].scale.fill_(7.0),
    "optimizer/state/embed/exp_avg is held twice": lambda run: (
        run.optimizers[1].state[run.chunks[1].embed]["exp_avg"].view(-1)[0].add_(1)
    ),
    "optimizer/state/embed is held twice": lambda run: (
        run.optimizers[1].state[run.chunks[1].embed].update(note="another")
    ),
    "model/embed has global shape": lambda run: setattr(run.chunks[1], "embed", nn.Parameter(torch.ones(8, 3))),
    "model/embed is float16": lambda run: run.chunks[1].half(),
}


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_differing_replicas_are_refused_by_name(what: str, background: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"async_checkpoint": True, "staging": "background"} if background else {}

    def save(_: Collective) -> None:
        run = Run(2)
        run.step(0)
        bytecheckpoint.save(tmp_path / "s", run.states, **options).result(60)  # the next save has the plan already
        DIFFERENCES[what](run)
        if "shape" in what:
            run.optimizers = run.optimizers[:1]
        with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match=re.escape(what)):
            bytecheckpoint.save(tmp_path / "t", run.states, **options).result(60)

    ThreadWorld(1).run(save, timeout=60)
    assert not list(tmp_path.glob("t/**/*.safetensors"))
    bytecheckpoint.load(tmp_path / "s", Run(2).states)


def test_a_replica_that_differs_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    def save(collective: Collective) -> None:
        run = Run(2)
        run.chunks[1].scale += collective.rank
        with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="rank 1, plan: model/scale is held twice"):
            bytecheckpoint.save(tmp_path / "s", run.states, timeout=20)

    ThreadWorld(2).run(save, timeout=60)


def test_replicas_of_one_rank_may_drift_by_rounding(tmp_path: Path) -> None:
    def save(_: Collective) -> None:
        run = Run(2)
        run.chunks[1].scale *= 1 + 1e-6
        report = bytecheckpoint.save(tmp_path / "s", run.states).result()
        assert 0 < report.replica_drift["model/scale"] < 2e-6
        assert not bytecheckpoint.save(tmp_path / "s", run.states).result().replica_drift  # known from the first save
        with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="model/scale is held twice"):
            bytecheckpoint.save(tmp_path / "s", run.states, check_replicas="full")

    ThreadWorld(1).run(save, timeout=60)


def test_nan_equals_nan_and_strides_do_not_matter(tmp_path: Path) -> None:
    run = Run(2)
    for chunk in run.chunks:
        assert chunk.embed is not None
        chunk.embed.data[0, 0] = float("nan")
    run.chunks[1].embed.data = run.chunks[1].embed.data.t().contiguous().t()
    bytecheckpoint.save(tmp_path / "s", run.states)


def test_chunks_that_hold_different_boxes_of_one_tensor(tmp_path: Path) -> None:
    """Each of four chunks has another flat range of the parameter, and so does the state of its optimizer."""

    def chunks(*, zero: bool) -> list[nn.Module]:
        made = [nn.ParameterDict({"w": nn.Parameter(ragged(rank, zero=zero))}) for rank in range(4)]
        return list(made)

    def momentum(chunks: list[nn.Module], *, step: bool) -> list[torch.optim.Optimizer]:
        optimizers: list[torch.optim.Optimizer] = []
        for chunk in chunks:
            optimizers.append(torch.optim.SGD(chunk.parameters(), lr=0.0, momentum=0.9, foreach=False))
            for parameter in chunk.parameters():
                if step:
                    optimizers[-1].state[parameter]["momentum_buffer"] = parameter.detach() * 2
        return optimizers

    one, two = chunks(zero=False), chunks(zero=True)
    bytecheckpoint.save(tmp_path / "s", {"model": one, "optimizer": momentum(one, step=True)})
    optimizers = momentum(two, step=False)
    bytecheckpoint.load(tmp_path / "s", {"model": two, "optimizer": optimizers})
    whole = torch.arange(15.0)
    with bytecheckpoint.open(tmp_path / "s") as checkpoint:
        assert torch.equal(checkpoint["model/w"][:].flatten(), whole)
    for rank, (chunk, optimizer) in enumerate(zip(two, optimizers, strict=True)):
        (parameter,) = chunk.parameters()
        assert torch.equal(parameter.detach().run, ragged(rank).run)
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"].run, 2 * ragged(rank).run)
