"""The page of a run, its data, its trace and its server, without a browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytecheckpoint.cli.main import run as command
from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.alerts import load_rules
from bytecheckpoint.monitoring.reading import RunMetrics, RunReader
from bytecheckpoint.monitoring.report import page as page_columns
from bytecheckpoint.monitoring.report.page import make_page, page_data
from bytecheckpoint.monitoring.report.report import Reporter
from bytecheckpoint.monitoring.report.server import RunView, make_app, require_token
from bytecheckpoint.monitoring.report.trace import write_trace
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from tests.support.metrics_runs import hostile_record, write_metrics
from tests.support.processes import wait_until

RUN = SimulatedRun({"pp": 2, "dp": 2, "tp": 2}, saves=4, faults=[Fault("slow", [3], first=2), Fault("retry", [1])])


def data_of(run: SimulatedRun) -> dict[str, Any]:
    return page_data(Reporter(load_rules()).report(RunMetrics.of(list(run.records()))), "/run", 1.8e9)


def unpacked(column: Mapping[str, str]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(column["data"]), column["type"])


def test_every_rank_and_phase_of_the_tables_is_in_the_columns() -> None:
    (record,) = SimulatedRun({"dp": 4}, saves=1, loads=0).records()
    detail = page_data(Reporter().report(RunMetrics.of([record])), "/run", 1.8e9)["details"][record.id]
    assert unpacked(detail["rank"]).tolist() == [0, 1, 2, 3]
    assert unpacked(detail["axes"]["dp"]).tolist() == [0, 1, 2, 3]
    rows = record.table.filter(np.array(record.table["level"].to_pylist()) == "phase").sort_by(
        [("rank", "ascending"), ("begin", "ascending")]
    )
    codes = unpacked(detail["phases"]["name"]["codes"])
    assert [detail["phases"]["name"]["values"][code] for code in codes] == rows["name"].to_pylist()
    assert unpacked(detail["phases"]["seconds"]).tolist() == rows["seconds"].to_pylist()


def test_a_rank_without_a_report_lies_where_it_was_before() -> None:
    run = SimulatedRun({"dp": 2, "tp": 2}, saves=2, loads=0, faults=[Fault("missing", [3], first=1)])
    data = data_of(run)
    detail = data["details"][data["operations"][-1]["id"]]
    assert unpacked(detail["state"]).tolist() == [0, 0, 0, 2]
    assert unpacked(detail["axes"]["tp"]).tolist() == [0, 1, 0, 1]


def test_the_page_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_of(RUN)["leftOut"] == []
    for limit in ("OPERATIONS", "PHASE_ROWS", "SPANS_PER_OPERATION", "ALERTS"):
        monkeypatch.setattr(page_columns, limit, 1)
    notes = " ".join(data_of(RUN)["leftOut"])
    assert "The history shows the newest 1 of 5 operations" in notes
    assert "Single reads and writes" in notes


def test_the_page_begins_with_what_ranks_do_themselves() -> None:
    """Whole operations take all ranks equally long: each waits for the slowest one."""
    run = SimulatedRun({"dp": 200}, saves=1, loads=1, faults=[Fault("slow", [123], factor=1.3)])
    data = data_of(run)
    assert {one["kind"]: one["ownPhase"] for one in data["operations"]} == {"save": "write", "load": "read"}


def test_spans_of_the_slowest_ranks_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("SPANS_PER_OPERATION", 10), ("SLOWEST", 1), ("SAMPLED", 1)):
        monkeypatch.setattr(page_columns, name, limit)
    (record,) = SimulatedRun(
        {"dp": 50}, saves=1, loads=0, noise=0.01, faults=[Fault("slow", [31], factor=1.3)]
    ).records()
    detail = page_data(Reporter().report(RunMetrics.of([record])), "/run", 1.8e9)["details"][record.id]
    shown = unpacked(detail["rank"])[unpacked(detail["spans"]["counts"]) > 0]
    assert shown.tolist() == [0, 31]


def test_names_and_errors_of_a_run_never_become_markup() -> None:
    page = make_page(page_data(Reporter().report(RunMetrics.of([hostile_record()])), "</script><b>", 1.8e9)).decode()
    (embedded,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert "<" not in embedded
    assert "onerror=" in json.loads(embedded)["operations"][0]["path"]
    assert page.count("</script>") == 3


def test_the_page_runs_its_own_scripts_and_asks_nobody() -> None:
    page = make_page(None).decode()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 2
    assert policy.replace("&#39;", "'").startswith(
        f"default-src 'none'; script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';"
    )
    assert "connect-src" not in policy


def test_the_chart_library_is_the_file_that_its_note_names() -> None:
    folder = files("bytecheckpoint.monitoring.report") / "assets/echarts"
    note = json.loads((folder / "echarts.json").read_text())
    content = (folder / "echarts.min.js").read_bytes()
    assert note["echarts.min.js"] == "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()
    assert "Apache License" in (folder / "LICENSE").read_text()


# --- trace ---


def trace_of(run: SimulatedRun) -> list[dict[str, Any]]:
    file = io.BytesIO()
    records = list(run.records())
    assert write_trace(records, file) == len(records)
    return json.loads(file.getvalue())["traceEvents"]


def test_slices_of_one_thread_of_the_trace_do_not_overlap() -> None:
    threads = defaultdict(list)
    for event in trace_of(RUN):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len({process for process, _ in threads}) == RUN.world_size
    for slices in threads.values():
        slices.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(slices))


def test_the_trace_names_every_process_and_thread() -> None:
    events = trace_of(RUN)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names[4] == "rank 3 (host-0000, pp=0,dp=1,tp=1)"
    assert all(isinstance(e[key], int) and e[key] > 0 for e in events for key in ("pid", "tid"))
    assert {e["ph"] for e in events} == {"X", "M"}


# --- server ---


def ask(app: Any, path: str, host: str = "localhost:1", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer."""
    sent: list[Any] = []
    asked = [(b"host", host.encode())] + [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": asked, "root_path": ""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, body


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    write_metrics(tmp_path, RUN.records())
    return RunView(str(tmp_path), Reporter())


def test_the_server_shows_the_run_and_what_runs_now(view: RunView, tmp_path: Path) -> None:
    app = make_app(view)
    status, headers, page = ask(app, "/")
    assert status == 200
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert b'data-live="true"' in page
    assert wait_until(lambda: ask(app, "/data.json")[2] != b"null", 30)  # of a read that lasts, on a busy machine
    assert len(json.loads(ask(app, "/data.json")[2])["operations"]) == 5
    news = json.loads(ask(app, "/live.json")[2])
    assert (news["running"], news["error"]) == ([], "")
    assert json.loads(ask(make_app(RunView(str(tmp_path), Reporter())), "/live.json")[2])["version"] != news["version"]
    assert ask(app, "/etc/passwd")[0] == 404


def test_a_long_read_is_told_meanwhile(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    read = view._reader.read

    def slowly(progress: Any) -> Any:
        progress(3, 50)
        assert go_on.wait(30)
        return read(progress)

    monkeypatch.setattr(view._reader, "read", slowly)
    assert view.news()["error"] == "Reading the metrics: 3 of 50 files." and view.data() == b"null"
    go_on.set()
    assert wait_until(lambda: view.news()["error"] == "", 30) and len(json.loads(view.data())["operations"]) == 5


@pytest.mark.parametrize("host", ["evil.example:8765", "169.254.0.1", ""])
def test_without_a_token_only_this_machine_is_answered(view: RunView, host: str) -> None:
    assert ask(make_app(view), "/", host)[0] == 403


def test_with_a_token_nothing_is_shown_without_it(view: RunView) -> None:
    app = make_app(view, "s3cret")
    for path in ("/", "/data.json", "/live.json"):
        assert ask(app, path)[0] == 401
        assert ask(app, path, authorization="Bearer wrong")[0] == 401
        assert ask(app, path, authorization="Basic ???")[0] == 401
        assert ask(app, path, "monitor.example", authorization="Bearer s3cret")[0] == 200
    login = base64.b64encode(b"me:s3cret").decode()
    assert ask(app, "/", authorization=f"Basic {login}")[0] == 200
    assert b"s3cret" not in ask(app, "/", authorization="Bearer s3cret")[2]


def test_other_machines_are_served_with_a_token_only() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        require_token(host, "")
    require_token("0.0.0.0", "token")
    for host in ("0.0.0.0", "::", "10.0.0.1", "monitor.example"):
        with pytest.raises(UsageError, match="give a --token"):
            require_token(host, "")


def test_damaged_progress_is_not_shown(view: RunView, tmp_path: Path) -> None:
    folder = tmp_path / ".bytecheckpoint-metrics"
    ranks = '{"rank": [0], "host": ["a"], "phase": ["write"], "seconds": [1.0], "done": [NaN], "planned": [1]}'
    no_json = (
        '{"operation": "a-save-1", "kind": "save", "path": "/run/1", "step": 1, "world_size": 1, "began": 1.0, '
        f'"time": {time.time()}, "ended": false, "ranks": {ranks}}}'
    )
    bad = ["", "[]", "{}", '{"ranks": 3}', '{"ranks": {"rank": [1]}, "ended": false}', "[" * 100_000, no_json]
    for number, text in enumerate(bad):
        (folder / f"live-{number}.json").write_text(text)
    assert view.news()["running"] == []
    assert view.news()["error"] == ""


def test_a_save_in_which_the_job_was_killed(view: RunView, tmp_path: Path) -> None:
    """It runs no more once another job saves, and is in the history with what is known of it."""
    last = [*RUN.records()][-1]
    ranks = {
        "rank": [0, 1],
        "host": ["a", "a"],
        "phase": ["write"] * 2,
        "seconds": [5.0] * 2,
        "done": [3, 1],
        "planned": [4, 4],
    }
    news = {
        "operation": "killed-save-9", "kind": "save", "path": "/run/step_9", "step": 9, "world_size": 2,
        "began": last.began - 35.0, "time": last.began - 30.0, "ended": False, "ranks": ranks,
    }  # fmt: skip
    file = tmp_path / ".bytecheckpoint-metrics/live-killed.json"
    assert "killed-save-9" not in str(view.data())
    for time_of_news, running in ((time.time(), ["killed-save-9"]), (last.began - 30.0, [])):
        file.write_text(json.dumps(news | {"time": time_of_news}))
        view._view = replace(view._view, read_at=0.0)
        assert [one["operation"] for one in view.news()["running"]] == running
    (cut_off,) = [one for one in json.loads(view.data())["operations"] if one["id"] == "killed-save-9"]
    assert cut_off["state"] == "cut off" and cut_off["critical"] == [["write", 1, 0.0, 5.0]] and cut_off["nbytes"] == 4
    (finding,) = [one for one in json.loads(view.data())["findings"] if "ended" in one["title"]]
    assert finding["title"] == "A job ended in 1 save" and finding["severity"] == "info", "another save came later"
    file.write_text(json.dumps(news | {"world_size": 1 << 40}))
    assert RunReader(str(tmp_path)).read().operations[-1].id == last.id


# --- command ---


def test_the_report_is_written_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path, RUN.records())
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert command(["report", str(tmp_path), "-o", str(page), "--trace", str(trace)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert capsys.readouterr().out.count("\n") == 2
    assert command(["report", str(tmp_path), "-o", str(tmp_path / "none/report.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_the_report_is_written_to_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path, RUN.records())
    assert command(["report", str(tmp_path), "-o", "-"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("<!doctype html>") and out.rstrip().endswith("</html>")
    assert command(["report", str(tmp_path), "--trace", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["traceEvents"]
    program = [sys.executable, "-u", "-m", "bytecheckpoint.cli.main", "report", str(tmp_path), "-o", "-"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None and process.stdout.read(9) == b"<!doctype"
        process.stdout.close()
        assert process.wait(60) == 141
    for options in (["-o", "-", "--trace", "-"], ["-o", "-", "--json"], ["--trace", "-", "--json"]):
        assert command(["report", str(tmp_path), *options]) == 2
        assert "only one" in capfd.readouterr().err
    assert command(["report", str(tmp_path), "-o", str(tmp_path / "page"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["operations"] and (tmp_path / "page").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_tables_show_the_last_and_the_worst(
    tmp_path: Path, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [
        Fault("slow", [3], first=40, last=80),
        Fault("fail", [2], first=20, last=20),
        Fault("missing", [1], first=7, last=7),
    ]
    write_metrics(tmp_path, SimulatedRun({"dp": 4}, saves=100, faults=faults).records())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for name, value in {"COLUMNS": "80", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert command(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 110 and (not terminal or max(map(len, lines)) <= 80)
    before, last = (
        next(i for i, line in enumerate(lines) if text in line) for text in ("slowest operations", "the last 10 of 101")
    )
    worst, newest = lines[before + 2 : last - 1], lines[last + 2 : last + 12]
    assert len(worst) == 10 and "failed" in "".join(worst) and "1 missing" in "".join(worst)
    assert [line.split()[1] for line in newest] == [str(step) for step in range(9_100, 10_100, 100)]
    assert sum("rank 3" in line for line in worst) >= 8
    assert any(line == "and 31 more (--all)" for line in lines)
    assert command(["report", str(tmp_path), "--all"]) == 0
    assert sum(line.startswith("save ") for line in capsys.readouterr().out.splitlines()) == 141


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    root, page = tmp_path / "a\udcff", tmp_path / "report.html"
    root.mkdir()
    write_metrics(root, RUN.records())
    assert command(["report", str(root), "-o", str(page)]) == 0
    assert "/a\\\\udcff" in page.read_text()


def test_the_monitor_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    for host, shown in {"127.0.0.1": "127.0.0.1", "::1": "[::1]", "[::1]": "[::1]"}.items():
        if host == "127.0.0.1" or socket.has_dualstack_ipv6():
            assert command(["monitor", str(tmp_path), "--host", host, "--port", "0"]) == 0
            assert capsys.readouterr().out.startswith(f"http://{shown}:")


def test_a_monitor_of_other_machines_without_a_token_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for token in ("", " \n"):
        assert command(["monitor", str(tmp_path), "--host", "0.0.0.0", "--token", token]) == 2
        assert "give a --token" in capsys.readouterr().err
