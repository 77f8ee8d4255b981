"""The figure of the demo: the loss curve of three resumed jobs, over that of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl

mpl.use("Agg")  # no display needed
from matplotlib import pyplot as plt

COLOURS = ("tab:blue", "tab:orange", "tab:green")
LABELS = {"plain": "1 rank", "fsdp2": "FSDP2", "tp2_fsdp2": "TP 2 × FSDP 2"}


class Curve(Protocol):
    layout: str
    ranks: int
    resumed_from: int
    losses: dict[int, float]


def draw(reference: Curve, runs: Sequence[Curve], killed_at: int, tolerance: float, path: Path) -> None:
    """Write the figure.

    Args:
        reference: the uninterrupted run.
        runs: the job's runs, each resumed from a checkpoint of the one before.
        killed_at: step whose save was killed.
        tolerance: largest allowed difference of two losses.
        path: path of the PNG.
    """
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained")
    top.plot(*zip(*reference.losses.items(), strict=True), color="0.75", linewidth=6, label="reference, never stopped")
    ends = [r.resumed_from for r in runs[1:]] + [max(runs[-1].losses)]
    curve: dict[int, float] = {}
    for run, end, colour in zip(runs, ends, COLOURS, strict=True):
        label = LABELS[run.layout] + (f", {run.ranks} ranks" if run.ranks > 1 else "")
        lost = {step: loss for step, loss in run.losses.items() if step >= end}
        curve |= {step: loss for step, loss in run.losses.items() if step <= end}
        # From the step before the resume, so that the curve has no gap there.
        steps = range(max(run.resumed_from, 1), end + 1)
        top.plot(steps, [curve[step] for step in steps], color=colour, label=label)
        if len(lost) > 1:
            style = {"color": colour, "linestyle": ":", "linewidth": 3, "zorder": 3}
            top.plot(*zip(*lost.items(), strict=True), **style, label="lost with the killed rank")
        differences = {s: max(abs(loss - reference.losses[s]), 1e-9) for s, loss in run.losses.items() if s <= end}
        bottom.plot(*zip(*differences.items(), strict=True), color=colour, marker=".", linestyle="none")
        if run.resumed_from:
            for axes in (top, bottom):
                axes.axvline(run.resumed_from, color=colour, linestyle="--", linewidth=1)
            top.annotate(
                f"resumed from\nstep {run.resumed_from}",
                (run.resumed_from, 0.7),
                xycoords=("data", "axes fraction"),
                xytext=(4, -4),
                textcoords="offset points",
                va="top",
                color=colour,
            )
    top.plot(killed_at, reference.losses[killed_at], "x", color="red", markersize=10, label="kill -9 during this save")
    top.set_ylabel("loss (nats per byte)")
    top.legend(loc="upper right", fontsize="small")
    bottom.axhline(tolerance, color="0.5", linewidth=1)
    bottom.annotate("allowed", (1, tolerance), color="0.4", xytext=(0, -3), textcoords="offset points", va="top")
    bottom.set_yscale("log")
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
