"""Steps that `from_pretrained` reads: a cut model with AdamW, saved without a view, with joined tensors, and with files."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, Extras
from benchmarks.state import sharded
from bytecheckpoint import HuggingFaceView
from bytecheckpoint.layouts import Layout, Rule

__all__ = ["views"]


class _Config:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text("{}")


def views(bench: Bench) -> None:
    """Measure saves to their view; extra["call"] is the seconds of the caller, ["committed"] those to the commit.

    extra["written_sum"] is the bytes of the folder.
    """
    model = torch.nn.Module()
    for name, tensor in sharded(bench.options.nbytes // 3).items():
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    model.config, model.dtype = _Config(), torch.float32  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    path = bench.folder / "step"

    def save(view: HuggingFaceView | None, *, background: bool) -> Extras:
        begin = time.perf_counter()
        states = {"model": model, "optimizer": optimizer}
        handle = bytecheckpoint.save(path, states, view=view, async_checkpoint=background)
        call = time.perf_counter() - begin
        handle.result()
        committed = time.perf_counter() - begin
        handle.viewed.result()
        files = path.rglob("*") if bench.world.rank == 0 else ()
        written = sum(file.stat().st_size for file in files if file.is_file())
        return {"call": call, "committed": committed, "written_sum": float(written)}

    base = bench.folder / "base"
    base.mkdir(exist_ok=True)
    _Config().save_pretrained(str(base))
    rules = [Rule({"model.layers.{l}.<name>": "..."}, {"layers_{l}_<name>": "..."})]
    layout = Layout("names", "hf", "own", rules=rules)
    contenders = {
        "no view": None,
        "joined": HuggingFaceView(),
        "joined, by a layout": HuggingFaceView(layout=layout, files_from=base),
        "files": HuggingFaceView(dtype="float32"),
    }
    for name, background in (("views: async save", True), ("views: save", False)):
        clear = partial(bench.clear, "step")
        arms = [Arm(arm, partial(save, view, background=background), clear) for arm, view in contenders.items()]
        bench.measure(name, nbytes, arms)
    bench.clear_all()
