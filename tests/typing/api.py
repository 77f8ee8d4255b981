"""Uses of the public API as a typed program writes them. `make types` checks this file; nothing runs it.

`assert_type` says what a call gives. A line with an ignore must be an error of just that kind: mypy complains about
an ignore that nothing needs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import CheckpointError, LoadReport, SaveHandle, SaveReport, Settings, tools
from bytecheckpoint.settings import StorageSettings
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import stream

model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
extra_states = {"step": 0, "rng": torch.get_rng_state()}

# ------------------------------------------------------------------------------------------------- saving, loading

# Any mapping of states, whatever mypy makes of its values: a mixed one, one of a single type, one written in place.
mixed = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra_states": extra_states}
modules_only = {"model": model}
pipeline = {"model": [model, model], "optimizer": [optimizer]}
for states in (mixed, pipeline):
    assert_type(bytecheckpoint.save("ckpt", states), SaveHandle)
    assert_type(bytecheckpoint.load("ckpt", states), LoadReport)
bytecheckpoint.save(Path("ckpt"), modules_only)
bytecheckpoint.load(Path("ckpt"), modules_only)
bytecheckpoint.save("ckpt", {"model": model, "table": (torch.ones(3), {1: "one"}, None)})
bytecheckpoint.load("ckpt", {"model": model, "table": {}})

# The paper's own calls.
bytecheckpoint.load("hdfs://demo_0/checkpoints", mixed, framework="megatron", overlap_loading=True)
bytecheckpoint.save("hdfs://demo_0/checkpoints", mixed, framework="megatron", async_checkpoint=True)

handle = bytecheckpoint.save(
    "ckpt",
    mixed,
    framework="fsdp2",
    async_checkpoint=True,
    staging="background",
    check_replicas=True,
    include=["model/*"],
    exclude=("optimizer",),
    names={"weight": model.weight},
    metadata={"run": "a", "tokens": 10},
    process_group=None,
    timeout=30,
)
assert_type(handle.path, str)
staged: Future[None] = handle.staged
committed: Future[SaveReport] = handle.committed
assert_type(committed.result(), SaveReport)
assert_type(handle.done(), bool)
assert_type(handle.result(timeout=1.5), SaveReport)
assert_type(bytecheckpoint.prepare(mixed, include=["model/*"]), Future[None])

loaded = bytecheckpoint.load("ckpt", mixed, framework="auto", strict=False, cast=True, timeout=30, prepare_save=False)
bytecheckpoint.load("ckpt", mixed, strict={"scheduler": False}, include=["model/*"], exclude=["model/head.*"])
bytecheckpoint.load("ckpt", mixed, rename={"model/base_model.model.": "model/"})
bytecheckpoint.load("ckpt", mixed, rename=lambda name: name.replace(".base_layer.", "."))
assert_type(loaded.missing, tuple[str, ...])
assert_type(loaded.unexpected, tuple[str, ...])
assert_type(loaded.cast, tuple[str, ...])
assert_type(loaded.bytes_read, int)
saved = handle.result()
assert_type(saved.phases, Mapping[str, float])
assert_type(saved.blocking_seconds, float)
assert_type(saved.plan_cached, bool)

bytecheckpoint.save("ckpt")  # type: ignore[call-arg]
bytecheckpoint.save(3, mixed)  # type: ignore[arg-type]
bytecheckpoint.save("ckpt", [model])  # type: ignore[arg-type]
bytecheckpoint.save("ckpt", {1: model})  # type: ignore[dict-item]
bytecheckpoint.save("ckpt", mixed, "megatron")  # type: ignore[call-arg]
bytecheckpoint.save("ckpt", mixed, async_checkpont=True)  # type: ignore[call-arg]
bytecheckpoint.save("ckpt", mixed, timeout="30")  # type: ignore[arg-type]
bytecheckpoint.load("ckpt", mixed, strict="yes")  # type: ignore[arg-type]
bytecheckpoint.load("ckpt", mixed, strict={"scheduler": "no"})  # type: ignore[dict-item]
bytecheckpoint.load("ckpt", mixed, include=[3])  # type: ignore[list-item]
bytecheckpoint.load("ckpt", mixed, rename=["model/"])  # type: ignore[arg-type]
bytecheckpoint.load("ckpt", (("model", model),))  # type: ignore[arg-type]
saved.bytes_written = 0  # type: ignore[misc]
loaded.missing = ()  # type: ignore[misc]
handle.result(timeout="soon")  # type: ignore[arg-type]
bytecheckpoint.lod("ckpt", mixed)  # type: ignore[attr-defined]

# ---------------------------------------------------------------------------------------- reading without loading

with bytecheckpoint.open("ckpt", rank=0) as checkpoint:
    assert_type(checkpoint, bytecheckpoint.Checkpoint)
    assert_type(list(checkpoint), list[str])
    assert_type(len(checkpoint), int)
    assert_type(checkpoint.ranks, tuple[int, ...])
    assert_type(checkpoint.states, tuple[str, ...])
    assert_type(checkpoint.info, Mapping[str, Any])
    mapping: Mapping[str, Any] = checkpoint
    entry: bytecheckpoint.Entry = checkpoint["model/weight"]
    assert_type(checkpoint["extra_states/step"], Any)  # an entry or a plain value, by the key
    assert_type(checkpoint.tensors["model/weight"][0:2], torch.Tensor)
    assert_type({name: one.shape for name, one in checkpoint.tensors.items()}, dict[str, torch.Size])
    print(checkpoint.tensors["model/weight"].shap)  # type: ignore[attr-defined]
    assert_type(entry.dtype, torch.dtype)
    assert_type(entry.nbytes, int)
    assert_type(entry.ndim, int)
    assert_type(entry[0:2, :, 3], torch.Tensor)
    assert_type(entry[...], torch.Tensor)
    assert_type(entry.chunks(max_bytes=1 << 20), Iterator[tuple[tuple[slice, ...], torch.Tensor]])
    for key, _, piece in stream(checkpoint, ["model/weight"]):
        assert_type(key, str)
        assert_type(piece, torch.Tensor)
    checkpoint["model/weight"] = model.weight  # type: ignore[index]
    del checkpoint["model/weight"]  # type: ignore[attr-defined]
    entry[0] = 1  # type: ignore[index]
    checkpoint.ranks = ()  # type: ignore[misc]
bytecheckpoint.open("ckpt", rank="0")  # type: ignore[arg-type]

# ---------------------------------------------------------------------------------------------- settings, own classes

assert_type(bytecheckpoint.settings(), Settings)
assert_type(bytecheckpoint.configure(chunk_bytes=16 << 20, writer="thread"), Settings)
assert_type(Settings(timeout=30).timeout, float)
StorageSettings(chunk_bytes="8 MiB")  # type: ignore[arg-type]
bytecheckpoint.settings().timeout = 3  # type: ignore[misc]
assert_type(bytecheckpoint.__version__, str)


@bytecheckpoint.register
@dataclass
class Progress:
    epoch: int


class Mode(enum.Enum):
    TRAIN = 1


class Opaque:
    number = 3


assert_type(Progress(3).epoch, int)  # the decorator keeps the class
assert_type(bytecheckpoint.register(Mode, name="mode"), type[Mode])
bytecheckpoint.register(Opaque, encode=lambda opaque: opaque.number, decode=lambda _: Opaque())
bytecheckpoint.register(Opaque, encode=lambda opaque: opaque.numbr)  # type: ignore[attr-defined]
bytecheckpoint.register(Opaque())  # type: ignore[arg-type]

# ------------------------------------------------------------------------------------------------------------- tools

with bytecheckpoint.open("ckpt") as opened:
    for subject in ("ckpt", Path("ckpt"), resolve("ckpt"), opened):
        assert_type(tools.verify(subject, threads=2), tools.VerifyReport)
        assert_type(tools.repair(subject, force=True), tools.RepairReport)
        assert_type(tools.compare(subject, subject, rtol=0.1), tools.CompareReport)
        assert_type(tools.export(subject, "out", state="model", dtype=torch.bfloat16), tools.ExportReport)
        assert_type(tools.remove(subject, dry_run=True), list[tools.Removal])
        assert_type(tools.collect_garbage(subject, older_than=3600.0), list[tools.Removal])
assert_type(bytecheckpoint.tools.verify("ckpt").ok, bool)
tools.verify(3)  # type: ignore[arg-type]

# ------------------------------------------------------------------------------------------------------------ errors

try:
    bytecheckpoint.load("ckpt", mixed)
except bytecheckpoint.CheckpointNotFoundError as error:
    general: CheckpointError = error
except bytecheckpoint.CorruptCheckpointError as error:
    assert_type(error.file, str)
    assert_type(error.block, int)
    assert_type(error.tensors, tuple[str, ...])
except (bytecheckpoint.StorageFullError, bytecheckpoint.StorageUnavailableError) as error:
    storage: bytecheckpoint.StorageError = error
except bytecheckpoint.CheckpointTimeoutError as error:
    timeout: TimeoutError = error
except bytecheckpoint.UsageError as error:
    usage: ValueError = error
try:
    bytecheckpoint.open("ckpt")["model/wieght"]
except bytecheckpoint.MissingKeyError as error:
    missing: KeyError = error
    incompatible: bytecheckpoint.IncompatibleCheckpointError = error
