"""The pictures of the report in docs/images: `python -m benchmarks.report_pictures [--keep FOLDER]`.

One is of a real run of four ranks on this machine, in which the storage of rank 2 gets slow in the course of the run. The
other one is of a simulated run of 8,960 ranks. Prints the seconds that a browser takes to draw the latter. Needs Chromium.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

import bytecheckpoint
from bytecheckpoint.monitoring import delivery
from bytecheckpoint.monitoring.alerts import load_rules
from bytecheckpoint.monitoring.reading import RunMetrics, read_run
from bytecheckpoint.monitoring.report.page import make_page, page_data
from bytecheckpoint.monitoring.report.report import Reporter
from bytecheckpoint.monitoring.report.trace import write_trace
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun

__all__ = ["main"]

_IMAGES = Path(__file__).parents[1] / "docs/images"
_RANKS, _SAVES, _SLOW_RANK, _FIRST_SLOW, _TRAINING = 4, 9, 2, 4, 1.5
#: The 405B model of the paper's evaluation: TP 8, DP 70, PP 16. One rank, and later one machine, get slow.
_LARGE = SimulatedRun(
    {"pp": 16, "dp": 70, "tp": 8},
    saves=12,
    faults=[Fault("slow", [4711], factor=4.0, first=6), Fault("slow", range(2400, 2408), factor=2.5, first=9)],
)


def slow_saves(root: str) -> None:
    """Save some times on each of four ranks; on one of them writes take longer from some save on."""
    import pytest
    import torch

    from tests.support.faulty_storage import Faults
    from tests.support.metrics import wait_for_operations
    from tests.support.settings import using

    rank = torch.distributed.get_rank()
    state = {f"layers.{number}.weight": torch.randn(1 << 21) for number in range(16)}  # 128 MiB, shared by all ranks
    with pytest.MonkeyPatch.context() as patch, using(metrics="files", writer="thread", mesh="dp=2,tp=2"):
        faults = Faults().install(patch)
        for number in range(_SAVES):
            if number == _FIRST_SLOW:
                faults.add("write", delay=0.7, rank=_SLOW_RANK, times=100)
            path = f"{root}/step_{100 * (number + 1)}"
            time.sleep(_TRAINING)  # the training between two saves
            bytecheckpoint.save(path, {"model": state}, async_checkpoint=True).result(120)
        if rank == 0:
            wait_for_operations(root, _SAVES)
            delivery.finish()


def real_run(root: str) -> RunMetrics:
    """Run the saves of `slow_saves`, and return their metrics."""
    from tests.support.worlds import Worlds

    worlds = Worlds(Path(root) / "worlds")
    try:
        worlds.run(_RANKS, slow_saves, f"{root}/run")
    finally:
        worlds.close()
    return read_run(f"{root}/run")


def draw(browser: Any, folder: Path, name: str, run: RunMetrics, scheme: str) -> list[int]:
    """Write page and trace of a run, and its picture. Return the milliseconds of five drawings of the heat map."""
    from tests.servers.browser import visit

    root = "simulated://run" if name.endswith("simulated") else "/checkpoints/run"
    begun = time.perf_counter()
    page = make_page(page_data(Reporter(load_rules()).report(run), root, run.records[-1].began + 60))
    print(f"{name}: page of {len(page) / 1e6:.1f} MB in {time.perf_counter() - begun:.1f} s", end=", ")
    path = folder / f"{name}.html"
    path.write_bytes(page)
    begun = time.perf_counter()
    with open(folder / f"{name}.trace.json", "wb") as file:
        count = write_trace(run.records, file)
        print(f"trace of {count} operations, {file.tell() / 1e6:.1f} MB, in {time.perf_counter() - begun:.1f} s")
    times = []
    for _ in range(5):
        with visit(browser, path.as_uri(), (1100, 1460), scheme) as seen:
            times.append(seen.drawn())
            seen.page.wait_for_selector("#history canvas")
            picture = seen.page.screenshot()
    # A quarter of the size, and nobody sees it.
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE).save(
        _IMAGES / f"{name}.png", optimize=True
    )
    return times


def main() -> None:
    """Draw the pictures."""
    from tests.servers.browser import chromium

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for pages and traces")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        draw(browser, folder, "report-slow-rank", real_run(scratch), "light")
        times = draw(browser, folder, "report-simulated", RunMetrics.of(list(_LARGE.records())), "dark")
        print(
            f"8,960 ranks drawn after {statistics.median(times)} ms (median of {sorted(times)}), from the navigation on"
        )


if __name__ == "__main__":
    main()
