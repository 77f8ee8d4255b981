"""Sinks that need no server: what they send, and that no bad sink disturbs a save."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import bytecheckpoint
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.monitoring import delivery
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.progress import OperationProgress, RankProgress
from bytecheckpoint.monitoring.reading import read_run
from bytecheckpoint.monitoring.record import make_record
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from bytecheckpoint.monitoring.sinks import Sink, make_sink, shown
from bytecheckpoint.monitoring.sinks.clickhouse import tab_separated
from bytecheckpoint.monitoring.table import OperationRecord, operation_record
from bytecheckpoint.representation.names import METRICS_FOLDER
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.tuning import tuned
from tests.servers.process import free_port, opener
from tests.support.certificates import certificates
from tests.support.metrics import STATES, collecting, tables, wait_for_operations
from tests.support.processes import run_program, wait_until
from tests.support.receivers import bad_port, receiver
from tests.support.variants import crossed, quick

BAD = ["refuses", "hangs", "500"]
SCHEMES = ["clickhouse", "otlp"]


def simulated(**changes: Any) -> list[OperationRecord]:
    return list(SimulatedRun(**{"mesh": {"pp": 2, "dp": 4}, "saves": 3, "loads": 1} | changes).records())


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_clickhouse_rows_are_text_with_escapes_and_nulls() -> None:
    record = simulated(mesh={"dp": 2}, faults=[Fault("fail", [1])])[1]
    table = record.table
    errors = table["subject"].combine_chunks()
    odd = errors.dictionary.to_pylist()
    odd[odd.index(next(text for text in odd if text))] = "a\tb\\c\nd"
    table = table.set_column(
        table.schema.get_field_index("subject"), "subject", type(errors).from_arrays(errors.indices, odd)
    )
    lines = tab_separated(table).decode().split("\n")
    assert len(lines) == len(table) and {len(line.split("\t")) for line in lines} == {len(table.column_names)}
    first = dict(zip(table.column_names, lines[0].split("\t"), strict=True))
    assert (first["operation"], first["kind"], first["dp"], first["tp"]) == (record.id, "save", "0", "\\N")
    assert int(first["began"]) == int(record.began) and any("a\\tb\\\\c\\nd" in line for line in lines)


def test_clickhouse_credentials_travel_in_headers_only() -> None:
    with receiver() as received:
        sink = make_sink(f"clickhouse://me:se%2Fcret@127.0.0.1:{received.port}/db?table=t")
        (record, *_) = simulated()
        sink.deliver(record, summarize(record))
    ((path, headers, _),) = received.requests
    assert headers["X-ClickHouse-User"] == "me" and headers["X-ClickHouse-Key"] == "se/cret" and "cret" not in path


def test_otlp_sends_a_trace_per_operation_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "job=j1")
    records = simulated(faults=[Fault("fail", [5]), Fault("retry", [2])])
    with receiver() as received:
        sink = make_sink(f"otlp://user:secret@127.0.0.1:{received.port}")
        for record in records:
            sink.deliver(record, summarize(record))
        sink.close()
    traces = [
        ExportTraceServiceRequest.FromString(body).resource_spans[0]
        for path, _, body in received.requests if path == "/v1/traces"
    ]  # fmt: skip
    assert len(traces) == len(records)
    resource = {a.key: a.value.string_value for a in traces[0].resource.attributes}
    assert resource["service.name"] == "bytecheckpoint" and resource["job"] == "j1"
    spans = traces[-1].scope_spans[0].spans
    assert len({span.trace_id for span in spans}) == 1
    root = next(span for span in spans if not span.parent_span_id)
    ranks = {span.name: span for span in spans if span.parent_span_id == root.span_id}
    assert root.name == "save" and set(ranks) == {f"rank {rank}" for rank in range(8)}
    assert "rank 5" in root.status.message and ranks["rank 5"].status.code == 2
    phases = {span.name for span in spans if span.parent_span_id == ranks["rank 0"].span_id}
    assert {"capture", "stage", "write"} <= phases
    assert all(root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in spans)
    newest = [body for path, _, body in received.requests if path == "/v1/metrics"][-1]
    metrics = {
        m.name: m for m in ExportMetricsServiceRequest.FromString(newest).resource_metrics[0].scope_metrics[0].metrics
    }
    moved = {p.attributes[0].value.string_value: p.as_int for p in metrics["bytecheckpoint.io"].sum.data_points}
    assert moved["save"] == sum(sum(nbytes_of(r)) for r in records if r.kind == "save")
    assert sum(p.count for p in metrics["bytecheckpoint.operation.duration"].histogram.data_points) == len(records)
    assert sum(p.as_int for p in metrics["bytecheckpoint.retries"].sum.data_points) > 0


def nbytes_of(record: OperationRecord) -> list[int]:
    return [row["nbytes"] for row in record.table.to_pylist() if row["level"] == "rank"]


def test_otlp_spans_of_a_large_job_are_limited_to_the_ranks_that_matter() -> None:
    record = simulated(mesh={"dp": 512}, faults=[Fault("slow", [477], factor=9)])[1]
    with receiver() as received:
        make_sink(f"otlp://127.0.0.1:{received.port}").deliver(record, summarize(record))
    (trace,) = [body for path, _, body in received.requests if path == "/v1/traces"]
    spans = ExportTraceServiceRequest.FromString(trace).resource_spans[0].scope_spans[0].spans
    names = {span.name for span in spans}
    assert len(spans) <= 4001 and "rank 477" in names
    assert len([name for name in names if name.startswith("rank ")]) == 64


@pytest.mark.parametrize(
    "address", ["clickhouses://me:secret@{}/db", "otlps://me:secret@{}", "webhook+https://me:secret@{}/"]
)
def test_over_https_only_a_trusted_server_gets_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    files = certificates(tmp_path)
    (record,) = simulated(saves=1, loads=0)
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # which `requests` prefers
        monkeypatch.delenv(variable, raising=False)
    with receiver(certificate=files["tls_certificate"], key=files["tls_key"]) as received:

        def send() -> None:
            sink = make_sink(address.format(f"127.0.0.1:{received.port}"))
            sink.deliver(record, summarize(record))
            sink.alert(Alert(rule="failed", severity="critical", text="it failed"))

        with pytest.raises((OSError, RuntimeError), match=r"certificate verify failed") as refused:
            send()
        assert "secret" not in str(refused.value) and received.requests == []
        for variable in ("SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_CERTIFICATE"):
            monkeypatch.setenv(variable, files["tls_authority"])
        monkeypatch.setattr(urllib.request, "_opener", None)  # it has read the variable
        send()
        assert received.requests


def test_prometheus_shows_the_newest_operation_and_counts_all() -> None:
    port = free_port()
    sink = make_sink(f"prometheus://127.0.0.1:{port}")
    try:
        records = simulated(mesh={"dp": 64}, faults=[Fault("slow", [7], first=2), Fault("missing", [9], first=2)])
        for record in records:
            sink.deliver(record, summarize(record))
        text = opener.open(f"http://127.0.0.1:{port}/metrics").read().decode()
    finally:
        sink.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['bytecheckpoint_operations_total{kind="save",outcome="done"}']) == 3
    assert float(values['bytecheckpoint_last_successful_step{kind="save"}']) == records[-1].step
    assert float(values['bytecheckpoint_last_phase_slowest_rank{kind="save",phase="write"}']) == 7
    assert float(values['bytecheckpoint_last_missing_ranks{kind="save"}']) == 1
    assert len(values) < 300 and 'rank="' not in text
    with pytest.raises(OSError, match=r"."):
        opener.open(f"http://127.0.0.1:{port}/metrics")


def test_alerts_are_counted_and_sent() -> None:
    alert = Alert(rule="slow rank", severity="warning", text="rank 3 is slow", operation="w-save-1", rank=3, time=5e8)
    port = free_port()
    with receiver() as received:
        sinks = [make_sink(f"otlp://127.0.0.1:{received.port}"), make_sink(f"prometheus://127.0.0.1:{port}")]
        for sink in sinks:
            sink.alert(alert)
        page = opener.open(f"http://127.0.0.1:{port}/metrics").read().decode()
        for sink in sinks:
            sink.close()
    labels = '{rule="slow rank",severity="warning"}'
    assert f"bytecheckpoint_alerts_total{labels} 1.0" in page
    (told,) = re.findall(rf"bytecheckpoint_last_alert_timestamp_seconds{re.escape(labels)} (.+)", page)
    assert abs(float(told) - time.time()) < 60  # not the time of its operation
    # PromQL sees no increase in a counter that begins at 1.
    for zero in ('operations_total{kind="save",outcome="failed"}', 'alerts_total{rule="straggler",severity="warning"}',
                 'phase_seconds_total{kind="load",phase="read"}'):  # fmt: skip
        assert f"bytecheckpoint_{zero} 0.0" in page
    (trace,) = [body for path, _, body in received.requests if path == "/v1/traces"]
    (span,) = ExportTraceServiceRequest.FromString(trace).resource_spans[0].scope_spans[0].spans
    assert span.name == "alert slow rank" and span.start_time_unix_nano == int(5e17)


@pytest.mark.parametrize(("scheme", "kind"), crossed(SCHEMES, BAD))
def test_a_bad_sink_delays_nothing_and_says_so_once(
    tmp_path: Path, scheme: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with bad_port(kind) as port, tuned(metrics_end=8.0), collecting(f"{scheme}://u:hunter2@127.0.0.1:{port}/db,files"):
        began = time.monotonic()
        for step in range(3):
            bytecheckpoint.save(tmp_path / f"step_{step}", STATES)
        seconds = time.monotonic() - began
        assert len(wait_for_operations(tmp_path, 3)) == 3, "the other sink has everything"
        if kind != "hangs":
            (bad,) = [d for a, d in delivery.queues().items() if a != "files"]
            assert bad.flush(30) and bad.dropped == 3
    lines = [
        r.getMessage() for r in caplog.records if "metrics" in r.getMessage() or r.name.startswith("opentelemetry")
    ]
    assert len(lines) == 1 and f"do not reach {scheme}://127.0.0.1" in lines[0] and "hunter2" not in caplog.text
    assert seconds < 5, "as long as without that sink"


@pytest.mark.parametrize("scheme", quick(SCHEMES, every=2))
def test_the_exit_waits_a_limited_time_for_a_sink_that_hangs(tmp_path: Path, scheme: str) -> None:
    program = """if True:
        import sys, time, torch, bytecheckpoint
        from bytecheckpoint.monitoring.sinks import make_sink
        from bytecheckpoint.tuning import tuned
        bytecheckpoint.configure(metrics=sys.argv[2])
        make_sink(sys.argv[2])  # imports its client, which may take long and is no wait for the network
        changed = tuned(metrics_end=1.0)
        changed.__enter__()
        for step in range(3):
            bytecheckpoint.save(f"{sys.argv[1]}/step_{step}", {"model": {"w": torch.ones(9)}})
        print(time.time())
    """
    with bad_port("hangs") as port:
        done = run_program(program, tmp_path, f"{scheme}://127.0.0.1:{port}")
    assert done.returncode == 0, done.stderr
    assert time.time() - float(done.stdout) < 10, "three records of 5 seconds each wait"


PROGRESS = RankProgress("save", 1, "/run/step_1", 1, 0, "host", "write", 1.0, 1, 1)


class SlowSink(Sink):
    """Takes a record when the test lets it."""

    may = threading.Semaphore(0)
    asked = threading.Event()
    taken: list[str] = []  # noqa: RUF012

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        self.asked.set()
        self.may.acquire()
        self.taken.append(record.id)


def test_what_a_slow_sink_cannot_take_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "make_sink", SlowSink)
    (record,) = simulated(saves=1, loads=0)
    summary = summarize(record)
    with collecting("slow://"):
        delivery.deliver(record, summary)
        assert SlowSink.asked.wait(10)  # from here on nothing leaves its queue
        began = time.monotonic()
        for _ in range(199):
            delivery.deliver(record, summary)
        assert time.monotonic() - began < 1
        (slow,) = delivery.queues().values()
        assert slow.dropped == 199 - 64
        dropped = slow.dropped
        for _ in range(100):
            delivery.deliver_alert(Alert(rule="failed", severity="critical", text="it failed"))
            delivery.deliver_progress(OperationProgress.of([PROGRESS], record.id, 1, ended=True))
        assert slow.dropped == dropped + 100 and slow.waiting() == 64
        SlowSink.may.release(200)
        assert slow.flush(10) and len(SlowSink.taken) + dropped == 200
    assert caplog.text.count("metrics are dropped") == 1
    assert caplog.text.count(f"keeps up again; {dropped + 100} records and alerts are lost") == 1


def test_what_a_client_says_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("<html>\n" + "http://a.example\n" * 100_000)
    monkeypatch.setattr(delivery, "make_sink", Mock(side_effect=error))
    with collecting("slow://"):
        delivery.open_sinks()
        assert wait_until(lambda: "RuntimeError: <html> http://a.example" in caplog.text, 10)
    assert caplog.text.count("\n") == 1 and len(caplog.text) < 5000


def test_a_webhook_that_redirects_gets_no_alert_and_passes_no_password_on() -> None:
    with receiver() as other, receiver(302, location=f"http://localhost:{other.port}/") as first:
        sink = make_sink(f"webhook+http://me:secret@127.0.0.1:{first.port}/")
        with pytest.raises(OSError, match="302"):
            sink.alert(Alert(rule="failed", severity="critical", text="it failed"))
    assert len(first.requests) == 1 and not other.requests


ADDRESSES = [
    "clickhouse://u:hunter2@127.0.0.1:{port}/db?table=t",
    "clickhouse://u:hun/hunter2@127.0.0.1:{port}/db",
    "clickhouse://u:a@hunter2@127.0.0.1:{port}/db",
    "clickhouse://u:a,hunter2@127.0.0.1:{port}/db",
    "clickhouse://127.0.0.1:{port}/db?password=hunter2",
    "otlp://u:hunter2@127.0.0.1:{port}",
    "otlp://u:hun/hunter2@127.0.0.1:{port}",
    "prometheus://u:hunter2@127.0.0.1:{port}",
    "webhook+http://u:hunter2@127.0.0.1:{port}/hunter2#hunter2",
    "webhook+http://127.0.0.1:{port}/my hunter2",
    "webhook+http://my u:hunter2@127.0.0.1:{port}",
    "nowhere://u:hunter2@127.0.0.1:{port}?token=hunter2",
    "hunter2",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_log_line_shows_a_secret(tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = b"no: http://u:hunter2@host/?token=hunter2"
    with receiver(403, answer) as received, collecting(address.format(port=received.port)):
        bytecheckpoint.save(tmp_path / "step_1", STATES)
        delivery.deliver_alert(Alert(rule="failed", severity="critical", text="it failed"))
        assert wait_until(lambda: "metrics do not reach" in caplog.text, 30)
    assert "hunter2" not in caplog.text
    assert not any("hunter2" in thread.name for thread in threading.enumerate())
    assert "hunter2" not in shown(address)


def test_no_sink_gets_a_secret(tmp_path: Path) -> None:
    """Neither that of the path, nor that of an error."""
    path = "s3://key:hunter2@bucket/run/step_7?token=hunter2"
    error = "403 for https://bucket.host/step_7?X-Amz-Signature=hunter2 (Authorization: Bearer hunter2hunter2)"
    record = failed_record(path, error)
    port = free_port()
    with receiver() as received:
        sinks = [make_sink(f"{scheme}://127.0.0.1:{received.port}") for scheme in SCHEMES]
        sinks.append(make_sink(f"prometheus://127.0.0.1:{port}"))
        for sink in sinks:
            sink.deliver(record, summarize(record))
        page = opener.open(f"http://127.0.0.1:{port}/metrics").read()
        for sink in sinks:
            sink.close()
    sent = b"".join(body for _, _, body in received.requests)
    assert b"step_7" in sent and b"403 for" in sent and b"hunter2" not in sent + page
    assert "hunter2" not in str(record.table.to_pylist())


def failed_record(path: str, error: str) -> OperationRecord:
    operation = Operation("save", path)
    operation.mark("write")
    record = make_record(operation, 0, "host", {}, RuntimeError(error), 10)
    return operation_record([record], "w", 1)


def test_a_long_load_asks_the_storage_once_whether_its_run_has_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    folders = PosixStorage.folders
    monkeypatch.setattr(PosixStorage, "folders", lambda storage: asked.append(storage.url) or folders(storage))
    (tmp_path / "new/.bytecheckpoint-metrics").mkdir(parents=True)
    sink = make_sink("files")
    for run, files in (("old", 0), ("new", 1)):
        path = tmp_path / run / "step_1"
        path.mkdir(parents=True)
        step = msgspec.structs.replace(PROGRESS, kind="load", path=str(path))
        for _ in range(5):
            sink.progress(OperationProgress.of([step], f"{run}-load-1", 1, ended=False))
        assert len(asked) == 1 and len(list(tmp_path.glob(f"{run}/.bytecheckpoint-metrics/*"))) == files
        asked.clear()


def test_a_run_that_is_removed_at_once_stays_removed(tmp_path: Path) -> None:
    """Nothing prevents the removal of a temporary folder, and no file appears in it later."""
    with collecting():
        for run in [tmp_path / str(number) for number in range(20)]:
            bytecheckpoint.save(run / "step_1", STATES)
            bytecheckpoint.load(run / "step_1", STATES)
            shutil.rmtree(run)
        bytecheckpoint.save(tmp_path / "stays/step_1", STATES)
        (files,) = delivery.queues().values()
        assert wait_until(lambda: files.waiting() == 0, 30)
    assert [path.name for path in tmp_path.iterdir()] == ["stays"] and len(tables(tmp_path / "stays")) == 1


def test_a_checkpoint_by_itself_keeps_its_metrics_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with collecting():
        for path in ("ckpt", "ckpt", "run/step_1", "run/last"):
            bytecheckpoint.save(path, STATES)
            bytecheckpoint.load(path, STATES)
        for root in ("ckpt", "run"):
            wait_for_operations(root, 4)
    assert sorted(os.listdir()) == ["ckpt", "run"] and sorted(os.listdir("run")) == [METRICS_FOLDER, "last", "step_1"]
    assert len(read_run("ckpt").operations) == len(read_run("run").operations) == 4
    assert command(["verify", "ckpt"]) == 0 and "not ours" not in "".join(capsys.readouterr())
    assert command(["rm", "ckpt"]) == 0 and os.listdir("ckpt") == []


def test_the_folder_for_temporary_files_gets_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with collecting():
        bytecheckpoint.save(tmp_path / "run/step_1", STATES)
        with tempfile.TemporaryDirectory() as path:
            bytecheckpoint.save(path, STATES)
        wait_for_operations(tmp_path / "run", 1)
        (files,) = delivery.queues().values()
        assert wait_until(lambda: files.waiting() == 0, 30)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_call_that_fails_at_once_has_a_path_that_leads_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)  # no warning: the caller gets the error
    with collecting(), pytest.raises(bytecheckpoint.UsageError):
        bytecheckpoint.save("run/step_1", STATES, staging="unknown")
    assert wait_until(lambda: "alert failed" in caplog.text, 30)
    assert f"({tmp_path}/run/step_1)" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("path", ["", "s3:/bucket/step_1", STATES])
def test_a_call_without_a_path_has_no_metrics(path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("bytecheckpoint.monitoring.collector.deliver", lambda record, _: seen.append(record.path))
    for call in (bytecheckpoint.save, bytecheckpoint.load):
        with collecting(), pytest.raises(bytecheckpoint.UsageError):
            call(path, STATES)
    assert wait_until(lambda: len(seen) == 2, 30)
    assert seen == ["", ""]


def test_an_operation_without_a_path_has_no_files() -> None:
    record = failed_record("", "no path")
    make_sink("files").deliver(record, summarize(record))


def test_files_of_killed_jobs_go(tmp_path: Path) -> None:
    """Of one killed in an operation a summary stays: its only trace."""
    folder = tmp_path / ".bytecheckpoint-metrics"
    folder.mkdir()
    step = msgspec.structs.replace(PROGRESS, path=str(tmp_path / "step_1"))
    for name, ended, age in (("ended", True, 90_000), ("running", True, 5), ("cut-off", False, 90_000)):
        progress = OperationProgress.of([step], f"{name}-save-1", 1, ended=ended)
        progress = msgspec.structs.replace(progress, time=time.time() - age)
        (folder / f"live-{name}.json").write_bytes(msgspec.json.encode(progress))
    (folder / "live-damaged.json").write_text("{}")
    make_sink("files").progress(OperationProgress.of([step], "mine-save-1", 1, ended=False))
    assert {path.stem for path in folder.glob("live-*")} == {"live-running", "live-damaged", "live-mine"}
    (trace,) = [one for one in read_run(str(tmp_path)).operations if one.id == "cut-off-save-1"]
    assert trace.cut_off and trace.state == "cut off" and trace.nbytes == PROGRESS.done
    # The job was only suspended: its record counts.
    operation = Operation("save", str(tmp_path / "step_1"))
    operation.number = 1
    record = make_record(operation, 0, "host", {}, RuntimeError("late"), 10)
    make_sink("files").deliver(late := operation_record([record], "cut-off", 1), summarize(late))
    (kept,) = [one for one in read_run(str(tmp_path)).operations if one.id == late.id == trace.id]
    assert kept.state == "failed"


def test_the_end_of_an_operation_does_not_hide_the_next_one(tmp_path: Path) -> None:
    step = msgspec.structs.replace(PROGRESS, path=str(tmp_path / "step_1"))
    sink = make_sink("files")
    for operation, ended in (("mine-save-1", False), ("mine-save-2", False), ("mine-save-1", True)):
        sink.progress(OperationProgress.of([step], operation, 1, ended=ended))
    shown = json.loads((tmp_path / ".bytecheckpoint-metrics/live-mine.json").read_text())
    assert (shown["operation"], shown["ended"]) == ("mine-save-2", False)


def test_the_files_of_a_run_stay_below_their_limit(tmp_path: Path) -> None:
    with collecting("files://?keep_gib=0"), tuned(files_delay=0.0):
        for step in range(18):
            bytecheckpoint.save(tmp_path / f"step_{step}", STATES)
            # A record may else come after later ones.
            assert wait_until(lambda: len(read_run(str(tmp_path)).operations) == step + 1, 30)  # noqa: B023
    run = read_run(str(tmp_path))
    assert [one.step for one in run.operations] == list(range(18))
    assert [record.step for record in run.records] == [16, 17], "looked at after the first operation and each 16th"
    for wrong in ("files://?keep_gib=-1", "files://?keep_gib=nan", "files://?keep=3", "files:///x"):
        with pytest.raises(bytecheckpoint.UsageError, match="keep_gib"):
            make_sink(wrong)


def test_two_sinks_at_once_and_a_change_in_the_middle(tmp_path: Path) -> None:
    """An address that is given twice counts once."""
    with receiver() as received, collecting(",".join([f"clickhouse://127.0.0.1:{received.port}", "files"] * 2)):
        bytecheckpoint.save(tmp_path / "step_1", STATES)
        wait_for_operations(tmp_path, 1)
        (clickhouse,) = [d for a, d in delivery.queues().items() if a != "files"]
        assert clickhouse.flush(30)
        bytecheckpoint.configure(metrics="files")
        bytecheckpoint.save(tmp_path / "step_2", STATES)
        wait_for_operations(tmp_path, 2)
        assert set(delivery.queues()) == {"files"}
    assert len(received.requests) == 1 and len(tables(tmp_path)) == 2


def test_a_forked_child_has_sinks_of_its_own(tmp_path: Path) -> None:
    """In a program of its own: a process that runs tests has threads of many libraries, and a child of one has crashed."""
    program = """if True:
        import faulthandler, os, sys
        import bytecheckpoint
        from tests.support.metrics import STATES, collecting, wait_for_operations

        faulthandler.enable()
        with collecting():
            def save(name, operations):
                bytecheckpoint.save(f"{sys.argv[1]}/{name}/step_{operations}", STATES)
                wait_for_operations(f"{sys.argv[1]}/{name}", operations)

            save("parent", 1)
            if (child := os.fork()) == 0:
                save("child", 1)
                sys.exit()
            status = os.waitpid(child, 0)[1]
            save("parent", 2)
        print(status)
    """
    done = run_program(program, tmp_path)
    assert done.stdout == "0\n", done.stderr


def test_metrics_of_a_save_that_ends_with_the_program_are_delivered(tmp_path: Path) -> None:
    program = """if True:
        import sys, time, torch, bytecheckpoint
        from bytecheckpoint.tuning import tuned
        bytecheckpoint.configure(metrics="files")
        changed = tuned(idle_call_thread=0.1)
        changed.__enter__()
        for step in range(2):
            save = bytecheckpoint.save(f"{sys.argv[1]}/step_{step}", {"model": {"w": torch.ones(9)}}, async_checkpoint=True)
            save.result()
            time.sleep(1 - step)  # idle threads have ended when the last save ends
    """
    done = run_program(program, tmp_path)
    assert done.returncode == 0 and not done.stderr and len(tables(tmp_path)) == 2


def test_an_unknown_scheme_and_a_missing_package_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bytecheckpoint.UsageError, match=r"no sink is called 'kafka'; there are: off, .*clickhouse"):
        make_sink("kafka://host")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "bytecheckpoint.monitoring.sinks.prometheus", raising=False)
    with pytest.raises(bytecheckpoint.UsageError, match=r"pip install 'bytecheckpoint-unified\[prometheus\]'"):
        make_sink("prometheus://")
