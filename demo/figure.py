"""The figure of the demo: loss and sample length of three resumed jobs, over those of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl

mpl.use("Agg")  # no display needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("tab:blue", "tab:orange", "tab:green")
AGAIN = "tab:purple"
NONE = 1e-9  # where the difference of equal losses is drawn
LABELS = {"plain": "1 rank", "fsdp2": "FSDP2", "tp2_fsdp2": "TP 2 × FSDP 2"}


class Curve(Protocol):
    layout: str
    ranks: int
    resumed_from: int
    losses: dict[int, float]
    sample_lengths: dict[int, float]


def draw(reference: Curve, runs: Sequence[Curve], again: Curve, killed_at: int, tolerance: float, path: Path) -> None:
    """Write the figure.

    Args:
        reference: the uninterrupted run.
        runs: the job's runs, each resumed from a checkpoint of the one before.
        again: a run that repeats the end of the last one.
        killed_at: step whose save was killed.
        tolerance: largest allowed difference of two losses.
        path: path of the PNG.
    """
    figure, panels = plt.subplots(3, 1, sharex=True, figsize=(9, 8), height_ratios=(3, 2, 1.3), layout="constrained")
    top, middle, bottom = panels
    grey = {"color": "0.75", "linewidth": 6}
    top.plot(*columns(reference.losses), **grey, label="reference, never stopped")
    middle.plot(*columns(reference.sample_lengths), **grey)
    ends = [r.resumed_from for r in runs[1:]] + [max(runs[-1].losses)]
    losses: dict[int, float] = {}
    lengths: dict[int, float] = {}
    for run, end, colour in zip(runs, ends, COLOURS, strict=True):
        label = LABELS[run.layout] + (f", {run.ranks} ranks" if run.ranks > 1 else "")
        losses |= until(end, run.losses)
        lengths |= until(end, run.sample_lengths)
        # From the step before the resume, so that the curves have no gap there.
        steps = range(max(run.resumed_from, 1), end + 1)
        top.plot(steps, [losses[step] for step in steps], color=colour, label=label)
        middle.plot(steps, [lengths[step] for step in steps], color=colour)
        lost = {step: loss for step, loss in run.losses.items() if step >= end}
        if len(lost) > 1:
            style = {"color": colour, "linestyle": ":", "linewidth": 3, "zorder": 3}
            top.plot(*columns(lost), **style, label="lost with the killed rank")
        bottom.plot(*columns(differences(until(end, run.losses), reference.losses)), ".", color=colour)
        if run.resumed_from:
            mark_resume(panels, run.resumed_from, colour)
    mark_resume(panels, again.resumed_from, AGAIN)
    crosses = {"color": AGAIN, "linestyle": "none", "marker": "+", "zorder": 4}
    top.plot(*columns(again.losses), **crosses, label=f"{LABELS[again.layout]} again, exactly the same")
    middle.plot(*columns(again.sample_lengths), **crosses)
    bottom.plot(*columns(differences(again.losses, runs[-1].losses)), **crosses)
    top.plot(killed_at, reference.losses[killed_at], "x", color="red", markersize=10, label="kill -9 during this save")
    top.set_ylabel("loss (nats per byte)")
    top.legend(loc="upper right", fontsize="small")
    middle.set_ylabel("sample length (bytes)")
    bottom.axhline(tolerance, color="0.5", linewidth=1)
    bottom.annotate("allowed", (1, tolerance), color="0.4", xytext=(0, -3), textcoords="offset points", va="top")
    bottom.set_yscale("log")
    bottom.set_yticks([NONE, 1e-7, 1e-5, 1e-3], ["none", *(f"$10^{{-{n}}}$" for n in (7, 5, 3))])
    bottom.set_ylabel("difference of losses")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def columns(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    return [*curve], [*curve.values()]


def until(end: int, curve: dict[int, float]) -> dict[int, float]:
    return {step: value for step, value in curve.items() if step <= end}


def differences(curve: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    """Return the absolute differences; `NONE` for equal values, since the axis is logarithmic."""
    return {step: max(abs(value - other[step]), NONE) for step, value in curve.items()}


def mark_resume(panels: Sequence[Axes], step: int, colour: str) -> None:
    for axes in panels:
        axes.axvline(step, color=colour, linestyle="--", linewidth=1)
    panels[0].annotate(
        f"resumed from\nstep {step}",
        (step, 0.55),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=colour,
    )
