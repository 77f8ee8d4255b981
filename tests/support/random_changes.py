"""Changes of the state at random moments behind a save in the background: the checkpoint is right, or the save fails.

What may be silent is what decision 0066 and docs/tutorial.md name: a few elements, written past torch.
"""

from __future__ import annotations

import collections
import itertools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, StateChangedError
from tests.support.late_copies import late_copies
from tests.support.modes import MODES
from tests.support.settings import using
from tests.support.worlds import Worlds

__all__ = ["FEW", "NAMED", "Counts", "Job", "add_ballast", "changes", "check_counts", "check_world", "named_slots"]

#: How often each kind of change had which outcome.
Counts = dict[str, collections.Counter[str]]


class Job(ABC):
    """A training whose state is changed behind saves.

    Attributes:
        module: the module whose state dict a change loads.
    """

    module: nn.Module

    @abstractmethod
    def states(self) -> dict[str, Any]:
        """Return the states of a checkpoint."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank, by names that are the same in another such job."""

    @abstractmethod
    def advance(self) -> None:
        """Train up to the next place where the program saves."""

    @abstractmethod
    def forward(self) -> None:
        """Run a forward and a backward pass."""

    @abstractmethod
    def step(self) -> None:
        """Let the optimizer step."""


def named_slots(state: Mapping[Any, Mapping[str, Any]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state, by the number of the parameter and the name."""
    return {
        f"{prefix}{number}.{name}": getattr(slot, "_local_tensor", slot)
        for number, slots in enumerate(state.values())
        for name, slot in slots.items()
        if isinstance(slot, torch.Tensor)
    }


def add_ballast(module: nn.Module, rows: int = 96, columns: int = 8_000) -> None:
    """Give a module a parameter of several pieces, whose copy takes a while."""
    module.register_parameter("ballast", nn.Parameter(torch.rand(rows, columns)))

    def add(module: Any, _: Any, result: Any) -> Any:
        first, *others = result if isinstance(result, tuple) else (result,)
        first = first + module.ballast.mean() * 1e-3
        return (first, *others) if isinstance(result, tuple) else first

    module.register_forward_hook(add)


def few(tensor: torch.Tensor, dice: random.Random) -> int:
    return dice.randrange(tensor.numel())


def half(tensor: torch.Tensor, dice: random.Random) -> slice:
    start = few(tensor, dice) // 2
    return slice(start, start + (tensor.numel() + 1) // 2)


def array(tensor: torch.Tensor) -> Any:
    """Return the numpy array of a tensor's memory."""
    return (tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()).numpy()


def other_of(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.rand_like(tensor.detach())
    return nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other


def load_others(module: nn.Module) -> None:
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


#: What a program does to a tensor.
_Change = Callable[[Job, torch.Tensor, random.Random], object]
NAMED: dict[str, _Change] = {
    "in place": lambda job, t, dice: t.mul_(dice.random()),
    "one element": lambda job, t, dice: t.view(-1).__setitem__(few(t, dice), dice.random()),
    "copy": lambda job, t, dice: t.copy_(torch.rand_like(t)),
    "foreach": lambda job, t, dice: torch._foreach_add_([t, next(iter(job.tensors().values()))], dice.random()),
    "load_state_dict": lambda job, t, dice: load_others(job.module),
    "data": lambda job, t, dice: t.data.fill_(dice.random()),
    "half of data": lambda job, t, dice: t.data.view(-1)[half(t, dice)].fill_(dice.random()),
    "numpy": lambda job, t, dice: array(t).fill(dice.randrange(1, 60)),
    "storage": lambda job, t, dice: t.untyped_storage().fill_(dice.randrange(1, 60)),
    "data =": lambda job, t, dice: setattr(t, "data", torch.rand_like(t)),
    "swap": lambda job, t, dice: torch.utils.swap_tensors(t, other_of(t)),
    "forward": lambda job, t, dice: job.forward(),
    "step": lambda job, t, dice: job.step(),
}
FEW: dict[str, _Change] = {
    "element of data": lambda job, t, dice: t.data.view(-1).__setitem__(few(t, dice), dice.random()),
    "element of numpy": lambda job, t, dice: array(t).reshape(-1).__setitem__(few(t, dice), dice.randrange(1, 60)),
    "byte of storage": lambda job, t, dice: t.untyped_storage().__setitem__(few(t, dice), dice.randrange(1, 60)),
    "dlpack": lambda job, t, dice: torch.from_dlpack(t.detach()).view(-1)[few(t, dice)].fill_(dice.random()),
}
#: Those in which ranks communicate: all of them do it.
_TOGETHER = ("forward", "step")


def equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Return whether all bytes are equal; the step of an optimizer may have moved to another device."""
    return found.keys() == wanted.keys() and all(
        torch.equal(one.cpu().reshape(-1).view(torch.uint8), wanted[name].cpu().reshape(-1).view(torch.uint8))
        for name, one in found.items()
    )


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class _Run:
    """The saves of one job on the ranks of a world.

    Args:
        job: the job that saves.
        other: one that loads.
        path: path of the checkpoint, which each save replaces.
        dice: dice that fall alike on all ranks.

    Attributes:
        saved: what the checkpoint holds of this rank's state; None if there is none.
    """

    def __init__(self, job: Job, other: Job, path: Path, dice: random.Random) -> None:
        self.job, self.other, self.path, self.dice = job, other, path, dice
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.saved: dict[str, torch.Tensor] | None = None

    def on_all_ranks(self, outcome: str) -> set[str]:
        """Return the outcomes of all ranks."""
        if self.size == 1:
            return {outcome}
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, outcome)
        return set(found)

    def outcome(self, kind: str) -> str:
        """Save, change random tensors at a random moment, on one rank or on all, and return what the checkpoint is."""
        job, change = self.job, (NAMED | FEW)[kind]
        job.advance()
        tensors = job.tensors()
        memory = {name: tensor.data for name, tensor in tensors.items()}
        before = copies(memory)
        only = self.dice.choice([None, *range(self.size)]) if kind not in _TOGETHER else None
        late = self.dice.choice([0, 0, 0.01])
        own = random.Random(f"{self.dice.random()} {self.rank}")
        tensor = own.choice([tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel()])
        with late_copies(late) if late else nullcontext():
            handle = bytecheckpoint.save(self.path, job.states(), **MODES["background"])
            end = time.perf_counter() + own.choice([0, own.uniform(0, 0.008 * self.size)])
            while time.perf_counter() < end:
                pass
            if only in (None, self.rank):
                with torch.enable_grad() if kind in _TOGETHER else torch.no_grad():
                    change(job, tensor, own)
            try:
                staging, found = handle.result(60).staging, "saved"
            except (StateChangedError, IncompatibleCheckpointError) as error:
                staging, found = "background", "named" if isinstance(error, StateChangedError) else "replicas"
        assert staging == "background", staging
        ended = self.on_all_ranks(found)
        assert len(ended) == 1, ended
        if found == "saved":
            self.saved = before
        if self.saved is not None:
            bytecheckpoint.load(self.path, self.other.states())
            found = {"saved": "right"}.get(found, found) if equal(self.other.tensors(), self.saved) else "silent"
            if "silent" in self.on_all_ranks(found):
                found = "silent"
        with torch.no_grad():
            for name, one in memory.items():  # the replicas of all ranks are equal again
                tensors[name].data = one
                one.copy_(before[name])
        self.saved = None if found == "silent" else self.saved
        return found


def changes(
    jobs: Iterable[Callable[[], Job]],
    folder: str | Path,
    rounds: int,
    seed: int,
    *,
    guard: bool,
    without: Collection[str] = (),
) -> Counts:
    """Return how often each kind of change had which outcome. All ranks call it.

    Args:
        jobs: functions that each make a job, and are called twice.
        folder: folder of the checkpoints.
        rounds: number of changes behind the saves of each job.
        seed: seed of the dice.
        guard: True to let accesses to the memory of tensors wait.
        without: kinds that the jobs cannot do.
    """
    dice, found = random.Random(seed), collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    kinds = [kind for kind in (*NAMED, *FEW) if kind not in without]
    dice.shuffle(kinds)
    order = itertools.cycle(kinds)
    with using(staging_guard=guard):
        for number, make in enumerate(jobs):
            run = _Run(make(), make(), Path(folder) / f"{'guarded' if guard else 'plain'}{number}", dice)
            for kind in itertools.islice(order, rounds):
                found[kind][run.outcome(kind)] += 1
    return dict(found)


def check_counts(guarded: Counts, plain: Counts) -> None:
    """Fail if a change was silent that may not be."""
    for name, counts in (("guarded", guarded), ("plain", plain)):
        print("\n", name, sum(one.total() for one in counts.values()), {kind: dict(counts[kind]) for kind in counts})
    assert not any(counts["silent"] for counts in guarded.values()), guarded
    assert not any(counts["silent"] for kind, counts in plain.items() if kind in NAMED), plain


def check_world(
    worlds: Worlds,
    size: int,
    job: Callable[[], Job],
    folder: Path,
    rounds: int,
    seed: int,
    without: Collection[str] = (),
) -> None:
    """Check changes behind the saves of a job on the ranks of a world, with and without the guard.

    Args:
        worlds: worlds of processes.
        size: number of ranks.
        job: function that makes a rank's job; importable.
        folder: folder of the checkpoints.
        rounds: number of changes, each time.
        seed: seed of the dice.
        without: kinds that the job cannot do.
    """
    print("seed", seed)
    given = {"without": without, "timeout": 60 + 20 * rounds}
    found = [worlds.run(size, changes, [job], folder, rounds, seed, guard=guard, **given) for guard in (True, False)]
    assert all(one == ranks[0] for ranks in found for one in ranks)
    check_counts(*(ranks[0] for ranks in found))
