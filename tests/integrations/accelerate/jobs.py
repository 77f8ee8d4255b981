"""Trainings of a tiny model with accelerate, as the ranks of a world run them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from bytecheckpoint.integrations.accelerate import attach
from bytecheckpoint.manager import SaveOptions
from tests.integrations.conformance import Training
from tests.integrations.transformers.jobs import prepare_rank, pretend_gpus

SAMPLES = 48
STEPS_PER_EPOCH = 6  # of 8 samples

#: Loss of this rank and all its samples, by step.
Found = dict[int, tuple[float, list[int]]]


class Counter:
    """The progress that a program registers."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def model(seed: int = 1, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)).double()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that say their number."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 1.0, index % 3, index % 7], dtype=torch.float64)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same, one after the other, in another order in each epoch."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        yield from (Numbers(self.count)[int(index)] for index in order)


class StatefulStream(Stream):
    """The same, which knows its position; `read` counts what it has read."""

    read = 0

    def __init__(self, count: int = SAMPLES) -> None:
        super().__init__(count)
        self.begin = self.at = 0

    def __iter__(self) -> Any:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        begin, self.begin = self.begin, 0
        for number in range(begin, self.count):
            self.at = number + 1
            StatefulStream.read += 1
            yield Numbers(self.count)[int(order[number])]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.at = state["at"]


def shuffled(data: Any, batch: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of random order, of a data set that has none of its own."""
    return DataLoader(data, batch, shuffle=not isinstance(data, torch.utils.data.IterableDataset), **options)


def weighted(data: Any, batch: int) -> DataLoader[Any]:
    return DataLoader(data, batch, sampler=WeightedRandomSampler([1.0] * len(data), len(data), replacement=False))


def with_generator(data: Any, batch: int) -> DataLoader[Any]:
    return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(5))


class Epochs(Sampler[int]):
    """An order that depends on `set_epoch` alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()


def by_epoch(data: Any, batch: int) -> DataLoader[Any]:
    return DataLoader(data, batch, sampler=Epochs())


class Lazy(Sampler[list[int]]):
    """Batches that are drawn from the process's generators when they are asked for."""

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self) -> Any:
        rest = list(range(SAMPLES))
        for _ in range(STEPS_PER_EPOCH):
            yield [rest.pop(random.randrange(len(rest))) for _ in range(8)]


def lazy(data: Any, batch: int) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=Lazy())


class Run:
    """A training: an accelerator, and what it has prepared."""

    def __init__(
        self, folder: Path | str, *, attached: Any = True, seedable: bool = True, split: bool = False,
        stateful: bool = False, dispatch: bool | None = None, accumulation: int = 1, dropout: float = 0.2,
        batch: int | None = None, workers: int = 0, persistent: bool = False, schedule: bool = True, data: Any = None,
        seed: int = 3, fsdp: bool = False, project: dict[str, Any] | None = None,
        loader: Callable[[Any, int], Any] = shuffled,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator, PartialState
        from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration

        prepare_rank()
        world = dist.get_world_size() if dist.is_initialized() else 1
        plugin = None
        if fsdp:
            PartialState(cpu=True)
            pretend_gpus()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
            )
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, fsdp_plugin=plugin,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=seedable, split_batches=split, use_stateful_dataloader=stateful,
                dispatch_batches=dispatch,
            ),
            project_config=ProjectConfiguration(**project) if project is not None else None,
        )  # fmt: skip
        net = model(dropout=dropout)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        torch.manual_seed(seed)
        self.data = data() if isinstance(data, type) else Numbers() if data is None else data
        batch = batch or (8 if split else 8 // world // accumulation)
        # Forked as in a program; those of a rank of a world would be started anew, and import everything.
        options = {"num_workers": workers, "persistent_workers": persistent, "multiprocessing_context": "fork"}
        batches = loader(self.data, batch, **(options if workers else {}))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(net, optimizer, batches)
        self.schedule = self.accelerator.prepare(cosine) if schedule else None
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        if attached is not False:
            attach(self.accelerator, **{"root": folder, **({} if attached is True else attached)})
        random.seed(seed)
        torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))

    def train(
        self, epochs: int = 2, *, stop: int = 0, save: Callable[[int], bool] = lambda step: step % 4 == 0,
        at: Callable[[int], object] = lambda step: None, rest: int = 0,
    ) -> Found:  # fmt: skip
        """Train on; return what was found. `rest`: batches that the program skips by itself in the first epoch."""
        found: Found = {}
        ids: list[int] = []
        for epoch in range(self.loader.iteration, epochs):
            self.model.train()
            skipped = rest and epoch == self.loader.iteration
            for batch in self.accelerator.skip_first_batches(self.loader, rest) if skipped else self.loader:
                rest = 0
                ids += batch[:, 0].int().tolist()
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(batch / 10).squeeze(-1) - batch[:, 2]).pow(2).mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    if self.schedule is not None:
                        self.schedule.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.counter.step += 1
                    found[self.counter.step] = loss.item(), ids
                    ids = []
                    if save(self.counter.step):
                        self.accelerator.save_state(step=self.counter.step)
                    at(self.counter.step)
                    if self.counter.step == stop:
                        return found
        return found

    def end(self) -> None:
        """Wait for the saves; the world keeps its process group."""
        self.accelerator.bytecheckpoint.close()


def run(
    folder: Path | str,
    *,
    stop: int = 0,
    every: int = 4,
    at: Callable[[int], object] = lambda step: None,
    epochs: int = 2,
    **options: Any,
) -> Found:
    """Train, going on where the run is."""
    job = Run(folder, **options)
    if options.get("attached", True) is False:
        return job.train(epochs, save=lambda step: False)
    job.accelerator.load_state()
    found = job.train(epochs, stop=stop, at=at, save=lambda step: step % every == 0)
    job.end()
    return found


def go_on(job: Run, **options: Any) -> Found:
    """Train on behind a checkpoint of accelerate itself, which says neither the epoch nor the batch."""
    epoch, rest = divmod(job.counter.step, STEPS_PER_EPOCH)
    job.loader.set_epoch(epoch)
    return job.train(rest=0 if job.loader.use_stateful_dataloader else rest, **options)


def samples(found: Found) -> list[int]:
    """Return all samples, ascending."""
    return sorted(chain.from_iterable(ids for _, ids in found.values()))


def joined(ranks: list[Found]) -> Found:
    """Return the mean losses of all ranks, and the samples of each step."""
    return {
        step: (
            sum(found[step][0] for found in ranks) / len(ranks),
            sorted(chain.from_iterable(found[step][1] for found in ranks)),
        )
        for step in ranks[0]
    }


def conform(folder: str, training: Training) -> dict[int, float]:
    """Train as the conformance suite says; return the mean losses of all ranks."""
    options = {"keep": training.keep, "save_options": SaveOptions(on_error=training.on_error)}
    job = Run(
        folder, attached=options if training.attached else False, split=True, dropout=0.2 if training.dropout else 0.0,
        fsdp=training.layout == "fsdp2",
    )  # fmt: skip
    assert all(isinstance(weight, DTensor) for weight in job.model.parameters()) == (training.layout == "fsdp2")
    if training.attached and training.resume:
        job.accelerator.load_state()
    try:
        found = job.train(
            training.steps // STEPS_PER_EPOCH, stop=training.until,
            save=lambda step: training.attached and step % training.every == 0,
            at=lambda step: training.at.get(step, int)(),
        )  # fmt: skip
    finally:
        if training.attached:
            job.end()
    ranks: list[Found] = [found]
    if dist.is_initialized():
        ranks = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
    return {step: loss for step, (loss, _) in joined(ranks).items()}
