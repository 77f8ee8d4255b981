"""The table and the chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Result

__all__ = ["chart", "table"]

_OURS = "bytecheckpoint"
#: Further figures that are seconds.
_SECONDS = {"blocking", "commit", "end_to_end", "gathering", "plan", "quiet", "staging", "write", "write_least"}
_HEADING = (
    f"  {'':36} {'median':>9} {'least':>9} {'GiB/s':>7} {'core-s/GiB':>10} {'/raw':>6} {'/ours':>6}  further figures"
)


def table(results: Sequence[Result], about: dict[str, Any]) -> None:
    """Print one block per case, place and world: seconds, rates, and ratios to the raw limit and to ours.

    "/raw" is the arm's median divided by the best raw arm's, "/ours" divided by bytecheckpoint's: 2.0 means that
    bytecheckpoint is twice as fast.
    """
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    print(f"\n{versions}; Python {about['python']}; {about['cpus']} CPUs, {about['memory_gib']} GiB")
    print(f"state {about['state_mib']} MiB, load average {about['load_average']}")
    for group in _groups(results):
        first = group[0]
        where = f" on {first.place}" if first.place else ""
        size = f", {first.nbytes / 2**20:.0f} MiB" if first.nbytes else ""
        print(f"\n{first.case}{where}, {first.world} rank{'s' if first.world > 1 else ''}{size}")
        print(_HEADING)
        raw = _best([r for r in group if r.arm.startswith(("raw", "memcpy"))])
        ours = next((r for r in group if r.arm == _OURS), None)
        for r in group:
            if r.error:
                print(f"  {r.arm:36} {r.error}")
                continue
            rate = r.nbytes / 2**30 / r.median if r.nbytes and r.median else math.nan
            print(
                f"  {r.arm:36} {_seconds(r.median)} {_seconds(min(r.wall, default=math.nan))} {_number(rate, 7, 2)} "
                f"{_number(r.core_per_gib, 10, 3)} {_ratio(r, raw)} {_ratio(r, ours)}  {_extras(r)}"
            )


def _groups(results: Sequence[Result]) -> list[list[Result]]:
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for r in results:
        groups.setdefault((r.case, r.place, r.world), []).append(r)
    return list(groups.values())


def _best(results: Sequence[Result]) -> Result | None:
    timed = [r for r in results if r.wall]
    return min(timed, key=lambda r: r.median) if timed else None


def _seconds(value: float) -> str:
    if math.isnan(value):
        return f"{'':>9}"
    return f"{value * 1e3:6.1f} ms" if value < 1 else f"{value:7.2f} s"


def _number(value: float, width: int, digits: int) -> str:
    return f"{value:{width}.{digits}f}" if math.isfinite(value) else " " * width


def _ratio(result: Result, to: Result | None) -> str:
    if to is None or not to.wall or not result.wall or to is result or not to.median:
        return " " * 6
    return f"{result.median / to.median:6.2f}"


def _extras(result: Result) -> str:
    parts = []
    for name in result.extra:
        value = result.extra_median(name)
        if name.endswith(("bytes", "_sum")):
            parts.append(f"{name} {value / 2**20:.0f} MiB")
        elif name in _SECONDS:
            parts.append(f"{name} {value * 1e3:.1f} ms")
        else:
            parts.append(f"{name} {value:.4g}")
    return ", ".join(parts)


#: The panels of the chart: (case, place, world, title).
_PANELS = (
    ("save", "disk", 1, "save, disk, 1 rank"),
    ("save", "tmpfs", 1, "save, tmpfs, 1 rank"),
    ("async save: blocking", "tmpfs", 1, "blocking of an async save"),
    ("async save: first call", "tmpfs", 1, "blocking of the first one"),
    ("load (page cache)", "tmpfs", 1, "load, page cache, 1 rank"),
    ("load at a layout", "tmpfs", 4, "load at a layout, 4 ranks"),
    ("DDP load", "tmpfs", 4, "DDP load, 4 ranks"),
    ("small tensors: save", "tmpfs", 1, "small tensors: save"),
    ("small tensors: load", "tmpfs", 1, "small tensors: load"),
)


def chart(results: Sequence[Result], path: Path) -> bool:
    """Write a chart of the median seconds; return False if matplotlib is not installed or there is nothing to show."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = {(g[0].case, g[0].place, g[0].world): g for g in _groups(results)}
    panels = [
        (groups[case, place, world], title) for case, place, world, title in _PANELS if (case, place, world) in groups
    ]
    if not panels:
        return False
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 2.6 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (group, title) in zip(axes.flat, panels, strict=False):
        timed = [r for r in group if r.wall][::-1]
        colors = [_color(r.arm) for r in timed]
        bars = axis.barh([r.arm for r in timed], [r.median for r in timed], color=colors)
        axis.bar_label(bars, [_seconds(r.median).strip() for r in timed], fontsize=7, padding=2)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds (median), less is better", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _color(arm: str) -> str:
    if arm.startswith(_OURS):
        return "#c44e52"
    return "#aaaaaa" if arm.startswith(("raw", "memcpy")) else "#4c72b0"
