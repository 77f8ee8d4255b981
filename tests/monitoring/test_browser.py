"""The page in a real browser: what is drawn, click and keyboard, light and dark, laptop and phone, no requests, live."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from bytecheckpoint.monitoring.alerts import load_rules
from bytecheckpoint.monitoring.reading import RunMetrics
from bytecheckpoint.monitoring.report.page import make_page, page_data
from bytecheckpoint.monitoring.report.report import Reporter
from bytecheckpoint.monitoring.report.server import RunView, make_app
from bytecheckpoint.monitoring.report.trace import write_trace
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from tests.servers.browser import LAPTOP, PHONE, chromium, visit
from tests.support.metrics_runs import hostile_record, write_metrics

pytestmark = pytest.mark.server

SLOW = 5
RUN = SimulatedRun({"pp": 2, "dp": 4, "tp": 2}, saves=6, faults=[Fault("slow", [SLOW], first=2)])
#: Gives the warnings of the import, and by process and thread the number of slices.
_IMPORT_TRACE = """async () => {
    const model = new tr.Model();
    await new tr.importer.Import(model).importTraces([await (await fetch("trace.json")).text()]);
    const threads = (process) => Object.values(process.threads).map((one) => [one.name, one.sliceGroup.slices.length]);
    const processes = model.getAllProcesses().map((one) => [one.name, Object.fromEntries(threads(one))]);
    return [model.importWarnings.map((one) => one.message), Object.fromEntries(processes)];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def write_page(folder: Path, records: list[Any]) -> str:
    path = folder / "report.html"
    path.write_bytes(
        make_page(page_data(Reporter(load_rules(), mtbf=4 * 3600).report(RunMetrics.of(records)), "/run", 1.8e9))
    )
    return path.as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(tmp_path_factory.mktemp("page"), list(RUN.records()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_it_fits_the_screen_and_asks_for_nothing(browser: Any, page: str, size: tuple[int, int], scheme: str) -> None:
    with visit(browser, page, size, scheme) as seen:
        seen.drawn()
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert seen.requests == [page]
        assert f"rank {SLOW} on host-0000 is slow in write" in seen.text("#findings")
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 21, 27)") == (scheme == "dark")


def test_the_slow_rank_is_chosen_first_and_a_click_chooses_another_one(browser: Any, page: str) -> None:
    with visit(browser, page) as seen:
        seen.drawn()
        assert seen.text("#timeline-title") == f"Timeline of rank {SLOW}"
        box = seen.page.locator("#map canvas").first.bounding_box()
        seen.page.mouse.click(box["x"] + box["width"] - 20, box["y"] + 15)  # the last column, the first row
        seen.page.wait_for_selector("text=Timeline of rank 6")
        assert "pp 0" in seen.text("#timeline-about")
        assert seen.page.input_value("#rank") == "6"


def test_arrow_keys_move_from_rank_to_rank(browser: Any, page: str) -> None:
    with visit(browser, page) as seen:
        seen.drawn()
        seen.page.focus("#rank")
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        for key, rank in (("ArrowDown", 12), ("ArrowLeft", 10), ("ArrowUp", 3), ("Home", SLOW)):
            seen.page.keyboard.press(key)
            seen.page.wait_for_selector(f"text=Timeline of rank {rank}")
            assert f"rank {rank}, " in seen.page.get_attribute("#map", "aria-label")


def test_everything_can_be_reached_by_the_tab_key(browser: Any, page: str) -> None:
    with visit(browser, page) as seen:
        seen.drawn()
        reached = []
        for _ in range(60):
            seen.page.keyboard.press("Tab")
            reached.append(
                seen.page.evaluate("(({id, tagName, className}) => id || className || tagName)(document.activeElement)")
            )
        order = ["skip", "operation", "value", "rows", "columns", "rank", "map", "kind"]
        assert list(dict.fromkeys(name for name in reached if name in order)) == order
        unnamed = "input:not([aria-label]), select:not([aria-label])"
        assert seen.page.evaluate(f"[...document.querySelectorAll('{unnamed}')].every((field) => field.labels.length)")


def test_values_axes_and_operations_can_be_chosen(browser: Any, page: str) -> None:
    with visit(browser, page) as seen:
        seen.drawn()
        titles = seen.page.locator("#value option").all_inner_texts()
        assert {"Whole operation", "Blocking time", "Phase: write", "Phase: commit", "Bytes"} <= set(titles)
        assert seen.page.locator("#rows option").all_inner_texts() == ["DP", "TP", "PP", "host", "rank"]
        for rows, columns in (("host", "rank"), ("rank", "rank"), ("tp", "dp"), ("dp", "dp")):
            seen.page.select_option("#rows", rows)
            seen.page.select_option("#columns", columns)
        seen.page.select_option("#value", "nbytes")
        assert seen.text("#slowest-title") == "Most bytes"
        seen.page.select_option("#operation", index=3)
        assert "step 300" in seen.text("#summary")
        seen.page.select_option("#kind", "load")
        seen.page.click("text=The history as a table")
        assert seen.page.locator("#history-table tbody tr").count() == 1


def test_texts_of_a_run_are_shown_as_texts(browser: Any, tmp_path: Path) -> None:
    with visit(browser, write_page(tmp_path, [hostile_record()])) as seen:
        seen.drawn()
        box = seen.page.locator("#map").bounding_box()
        seen.page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 20)
        seen.page.wait_for_selector(".tip")  # which names the host
        assert seen.page.locator("img").count() == 0
        assert seen.page.title() == "Checkpoint report: /run"
        assert "<img src=x" in seen.text("#stragglers")


def test_the_page_says_what_saves_cost_the_run(browser: Any, page: str) -> None:
    with visit(browser, page) as seen:
        seen.drawn()
        assert "6 saves, 1 load and 0 that failed, by 1 job" in seen.text("#words")
        assert "at least 9" in seen.text("#words") and "of the time counts (ETTR)" in seen.text("#words")
        assert "With a failure every 4.0 h: " in seen.text("#words")


def test_the_trace_opens_in_a_trace_viewer(browser: Any, tmp_path: Path) -> None:
    """The viewer of about:tracing, as Go's tools bring it; https://ui.perfetto.dev is not to be had here."""
    if shutil.which("go") is None:
        pytest.skip("NOT TESTED HERE: Go is not installed, which has a trace viewer")
    root = subprocess.run(["go", "env", "GOROOT"], capture_output=True, text=True, check=True).stdout.strip()
    records = list(RUN.records())
    with open(tmp_path / "trace.json", "wb") as file:
        write_trace(records, file)
    viewer = Path(root, "src/internal/trace/traceviewer/static")
    for name in ("webcomponents.min.js", "trace_viewer_full.html"):
        shutil.copy(viewer / name, tmp_path)
    (tmp_path / "index.html").write_text(
        '<link rel="icon" href="data:,"><script src="webcomponents.min.js"></script>'
        '<link rel="import" href="trace_viewer_full.html">'
    )
    from starlette.staticfiles import StaticFiles

    with running(StaticFiles(directory=tmp_path, html=True)) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_function("() => window.tr && tr.Model && tr.importer && true", timeout=60_000)
        warnings, processes = page.evaluate(_IMPORT_TRACE)
    assert warnings == []
    slices = sum(record.table.filter(pc.not_equal(record.table["level"], "total")).num_rows for record in records)
    assert sum(sum(threads.values()) for threads in processes.values()) == slices
    assert len(processes) == RUN.world_size
    assert processes[f"rank {SLOW} (host-0000, pp=0,dp=2,tp=1)"]["saves"] == 6


# --- live ---


def served(root: Path, token: str = "") -> contextlib.AbstractContextManager[str]:
    """Serve the page of a run inside the block."""
    return running(make_app(RunView(str(root), Reporter()), token))


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serve an ASGI application inside the block."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def progress(root: Path, done: int, behind: int = 0, *, ended: bool = False) -> None:
    """Replace the file that says how far the two ranks of a save are."""
    ranks = {
        "rank": [0, 1], "host": ["a<b>", "b"], "phase": ["write", "stage"], "seconds": [2.0, 2.0], "done": [done, behind],
        "planned": [1000, 1000],
    }  # fmt: skip
    news = {
        "operation": "x-save-9", "kind": "save", "path": "/run/step_900", "step": 900, "world_size": 2,
        "began": time.time() - 2, "time": time.time(), "ended": ended, "ranks": ranks,
    }  # fmt: skip
    path = root / ".bytecheckpoint-metrics/live-x.json"
    path.with_suffix(".new").write_text(json.dumps(news))
    path.with_suffix(".new").replace(path)


def test_a_running_save_is_followed_until_its_metrics_are_there(browser: Any, tmp_path: Path) -> None:
    records = list(RUN.records())
    write_metrics(tmp_path, records[:-1])
    with served(tmp_path) as url, visit(browser, url) as seen:
        seen.drawn()
        assert "step 500" in seen.text("#summary")
        progress(tmp_path, 500)
        seen.page.wait_for_selector("text=500 B of 2.0 KiB on 2 ranks")
        progress(tmp_path, 750)
        seen.page.wait_for_selector("text=750 B of 2.0 KiB")
        assert "rank 1" in seen.text("#live tbody tr >> nth=0") and "left" not in seen.text("#live-body")
        # The one that is behind needs longest: 90 times its 2 seconds.
        progress(tmp_path, 1000, 11)
        seen.page.wait_for_selector("text=/about 1[78][0-9] s left at this speed/")
        progress(tmp_path, 1000, ended=True)
        write_metrics(tmp_path, records[-1:])
        seen.page.wait_for_selector("#summary >> text=step 600")
        seen.page.wait_for_selector("#live", state="hidden")


def test_a_monitor_that_ends_is_told(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path, RUN.records())
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(served(tmp_path))
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("html[data-drawn]", state="attached")
        stack.close()
        page.wait_for_selector("text=The monitor does not answer")
        context.close()


def test_a_browser_logs_in_with_the_token(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path, RUN.records())
    login = {"username": "any", "password": "s3cret"}
    with served(tmp_path, "s3cret") as url, visit(browser, url, http_credentials=login) as seen:
        seen.drawn()
        assert all("s3cret" not in request for request in seen.requests)
