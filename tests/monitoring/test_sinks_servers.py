"""Sinks on real servers: ClickHouse (the oldest dialect that is supported), Prometheus, a collector of OpenTelemetry."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

import bytecheckpoint
from bytecheckpoint.monitoring import delivery
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.analysis.summary import summarize
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from bytecheckpoint.monitoring.sinks import make_sink
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, encode_table
from bytecheckpoint.monitoring.table import SCHEMA
from tests.servers.metrics import ClickHouse, clickhouse, collector, prometheus
from tests.servers.process import free_port, program_of
from tests.support.metrics import STATES, collecting
from tests.support.processes import ROOT, environment, python, wait_until

pytestmark = pytest.mark.server

RULES = ROOT / "docs/prometheus/rules.yml"
RUN = SimulatedRun(
    {"pp": 2, "dp": 8}, saves=4, faults=[Fault("slow", [11], factor=8, first=3), Fault("retry", [3], first=2)]
)


def examples(language: str) -> list[str]:
    """Return the blocks of the page in a language."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.DOTALL)
    return [text for found, text in blocks if found == language]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouse]:
    with clickhouse(tmp_path_factory.mktemp("clickhouse") / "server") as running:
        yield running


def test_clickhouse_creates_the_table_and_holds_every_row(server: ClickHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLICKHOUSE_USER", "writer")
    monkeypatch.setenv("CLICKHOUSE_PASSWORD", "pass/word")
    sink = make_sink(f"clickhouse://127.0.0.1:{server.port}/default?table=ranks")
    records = list(RUN.records())
    for record in records:
        sink.deliver(record, summarize(record))
    assert server.ask("SELECT toInt32(count()) FROM ranks") == [[sum(len(r.table) for r in records)]]
    assert [name for name, *_ in server.ask("DESCRIBE TABLE ranks")] == SCHEMA.names
    for row in (records[0].table.to_pylist()[0], records[-1].table.to_pylist()[-1]):
        texts = ("operation", "level", "name", "phase", "subject", "host")
        same = " AND ".join(f"{name} = '{row[name]}'" for name in texts)
        found = server.ask(
            "SELECT toInt32(step), isNull(tp), toInt32(dp), toUInt32(began) FROM ranks"
            f" WHERE rank = {row['rank']} AND {same}"
        )
        assert [row["step"], int(row["tp"] is None), row["dp"], int(row["began"].timestamp())] in found
    slowest = server.ask(
        "SELECT rank, seconds FROM ranks WHERE level = 'phase' AND name = 'write' ORDER BY seconds DESC LIMIT 1"
    )
    assert slowest[0][0] == 11


def test_the_examples_of_the_page_find_the_slow_host(tmp_path: Path, server: ClickHouse) -> None:
    sink = make_sink(f"clickhouse://127.0.0.1:{server.port}?table=saves")
    (tmp_path / "run" / METRICS_FOLDER).mkdir(parents=True)
    for record in replace(RUN, began=time.time() - 7200, ranks_per_host=4, faults=RUN.faults[:1]).records():
        sink.deliver(record, summarize(record))
        (tmp_path / "run" / METRICS_FOLDER / f"{record.id}.parquet").write_bytes(encode_table(record.table))
    of_server, of_files = examples("sql")
    assert server.ask(of_server)[0][0] == "host-0002"
    assert duckdb.sql(of_files.replace("'run/", f"'{tmp_path}/run/")).fetchall()[0][0] == "host-0002"


def test_a_real_save_reaches_clickhouse_and_a_wrong_password_is_said(
    tmp_path: Path, server: ClickHouse, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"clickhouse://writer:{{}}@127.0.0.1:{server.port}/default?table=real"
    good, bad = address.format("pass%2Fword"), address.format("wrongword")
    with collecting(f"{good},{bad}"):
        bytecheckpoint.save(tmp_path / "step_00000042", STATES)
        assert wait_until(lambda: server.ask("EXISTS TABLE real") == [[1]], 30)
        assert wait_until(lambda: bool(server.ask("SELECT rank FROM real")), 30)
        assert wait_until(lambda: "metrics do not reach" in caplog.text, 30)
    assert server.ask("SELECT DISTINCT kind, toInt32(step), name FROM real WHERE level = 'rank'") == [
        ["save", 42, "done"]
    ]
    assert caplog.text.count("metrics do not reach") == 1 and "wrongword" not in caplog.text


def test_prometheus_scrapes_rank_0_and_answers(tmp_path: Path) -> None:
    port = free_port()
    sink = make_sink(f"prometheus://127.0.0.1:{port}")
    records = list(RUN.records())
    with prometheus(tmp_path / "server", port) as server:
        # Before the first save, so that increases can be seen.
        assert wait_until(lambda: server.ask('bytecheckpoint_operations_total{outcome="done"}') != {}, 60)
        for record in records:
            sink.deliver(record, summarize(record))
        done = "kind=save,outcome=done"
        assert wait_until(lambda: server.ask("bytecheckpoint_operations_total").get(done) == 4, 60)
        assert server.ask('topk(1, bytecheckpoint_last_phase_longest_seconds{kind="save"})').keys() == {
            "kind=save,phase=write"
        }
        assert server.ask('bytecheckpoint_last_phase_slowest_rank{phase="write"}') == {"kind=save,phase=write": 11}
        assert server.ask("bytecheckpoint_last_successful_step")["kind=save"] == records[-1].step
        increase = server.ask('increase(bytecheckpoint_operations_total{kind="save"}[1m])')
        assert increase[done] > 0
        (queries,) = examples("promql")
        for query in re.split("^#.*$", queries, flags=re.MULTILINE)[1:]:
            found = server.ask(query)  # raises if Prometheus does not understand it
            if "median" in query:
                assert "kind=save,phase=write" in found
        assert server.ask("histogram_quantile(0.9, bytecheckpoint_operation_seconds_bucket)")["kind=save"] > 1
    sink.close()


def test_the_alert_rules_fire_when_they_should(tmp_path: Path) -> None:
    tests = (ROOT / "tests/monitoring/prometheus-rules.yml").read_text().replace("RULES", str(RULES))
    (tmp_path / "tests.yml").write_text(tests)
    done = subprocess.run(
        [program_of("promtool"), "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


TRAINING = """if True:
    import sys, time, torch, bytecheckpoint
    bytecheckpoint.configure(metrics=f"prometheus://127.0.0.1:{sys.argv[2]}")
    state = {"model": {"w": torch.ones(9)}}
    bytecheckpoint.save(f"{sys.argv[1]}/run/step_1", state)
    sys.stdin.readline()
    open(f"{sys.argv[1]}/run/step_2", "w").close()  # no folder can be made there
    try:
        bytecheckpoint.save(f"{sys.argv[1]}/run/step_2/x", state)
    except bytecheckpoint.CheckpointError:
        sys.stdin.readline()
"""


def test_a_real_prometheus_fires_for_a_first_failure_and_a_killed_rank_0(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES.read_text().replace("for: 5m", "for: 1s"))
    port = free_port()
    command = python("-c", TRAINING, tmp_path, port)
    training = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, text=True)
    with training, prometheus(tmp_path / "server", port, tmp_path / "rules.yml") as server:

        def firing(alert: str) -> dict[str, float]:
            return server.ask(f'count by (rule, severity) (ALERTS{{alertname="{alert}", alertstate="firing"}})')

        assert wait_until(lambda: server.ask('bytecheckpoint_operations_total{outcome="done"} > 0') != {}, 60)
        assert server.ask('bytecheckpoint_alerts_total{rule="failed"}') == {"rule=failed,severity=critical": 0}
        assert not firing("BytecheckpointAlert")
        assert training.stdin is not None
        training.stdin.write("\n")
        training.stdin.flush()
        assert wait_until(lambda: firing("BytecheckpointAlert") == {"rule=failed,severity=critical": 1}, 60)
        assert server.ask("increase(bytecheckpoint_alerts_total[1m]) > 0").keys() == {"rule=failed,severity=critical"}
        assert not firing("BytecheckpointGone")
        training.kill()
        assert wait_until(lambda: firing("BytecheckpointGone") != {}, 60)


def test_every_query_of_the_dashboard_finds_something(tmp_path: Path) -> None:
    panels = json.loads((ROOT / "docs/prometheus/dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) == 20
    port = free_port()
    sink = make_sink(f"prometheus://127.0.0.1:{port}")
    values = {"$__range": "6h", "$job": ".*", "$instance": ".*"}
    with prometheus(tmp_path / "server", port) as server:
        assert wait_until(lambda: server.ask("bytecheckpoint_operations_total") != {}, 60)
        for record in RUN.records():
            sink.deliver(record, summarize(record))
        sink.alert(Alert(rule="failed", severity="critical", text="it failed"))
        for name, value in values.items():
            queries = [query.replace(name, value) for query in queries]

        def unanswered() -> list[str]:
            return [query for query in queries if not server.ask(query)]

        assert wait_until(lambda: not unanswered(), 20), unanswered()
    sink.close()


@pytest.mark.slow  # the collector is built for minutes
def test_a_collector_takes_traces_and_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with collector(tmp_path / "collector") as (port, log), collecting(f"otlp://127.0.0.1:{port}"):
        bytecheckpoint.save(tmp_path / "step_00000042", STATES)
        assert wait_until(lambda: "bytecheckpoint.step: Int(42)" in log.read_text(), 60)
        assert wait_until(lambda: "bytecheckpoint.operation.duration" in log.read_text(), 60)
    text = log.read_text()
    for line in ("service.name: Str(bytecheckpoint)", "rank 0", "write", "Unit: By", "bytecheckpoint.phase.duration"):
        assert line in text
    assert "metrics do not reach" not in caplog.text and not delivery.queues()
