"""Systems that keep metrics: ClickHouse and Prometheus from Debian, and a collector of OpenTelemetry."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.servers.process import Server, folder_of, free_port, opener, program_of
from tests.support.processes import wait_until

__all__ = ["ClickHouse", "Prometheus", "clickhouse", "collector", "prometheus"]


class ClickHouse:
    """A server with the users "default" (no password) and "writer" (password "pass/word").

    Args:
        port: port of the HTTP interface.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query."""
        request = f"http://127.0.0.1:{self.port}/?query={urllib.parse.quote(sql + ' FORMAT JSONCompact')}"
        rows: list[list[Any]] = json.loads(opener.open(request, timeout=20).read())["data"]
        return rows


@contextlib.contextmanager
def clickhouse(folder: Path) -> Iterator[ClickHouse]:
    """Run ClickHouse inside the block."""
    program, port = program_of("clickhouse-server"), free_port()
    folder.mkdir()
    user = (
        "<{0}><password>{1}</password><networks><ip>127.0.0.1</ip></networks>"
        "<profile>default</profile><quota>default</quota></{0}>"
    )
    users = user.format("default", "") + user.format("writer", "pass/word")
    (folder / "users.xml").write_text(
        f"<yandex><profiles><default/></profiles><users>{users}</users><quotas><default/></quotas></yandex>"
    )
    (folder / "config.xml").write_text(
        f"""<yandex><logger><level>information</level><console>1</console></logger>
        <http_port>{port}</http_port><tcp_port>{free_port()}</tcp_port><interserver_http_port>{free_port()}</interserver_http_port>
        <listen_host>127.0.0.1</listen_host><path>{folder}/data/</path><tmp_path>{folder}/tmp/</tmp_path>
        <mark_cache_size>67108864</mark_cache_size><users_config>{folder}/users.xml</users_config>
        <default_profile>default</default_profile><default_database>default</default_database></yandex>"""
    )
    server = Server(
        [program, f"--config-file={folder}/config.xml"], f"http://127.0.0.1:{port}/ping", folder / "log"
    ).start()
    try:
        yield ClickHouse(port)
    finally:
        server.stop()


def _status(url: str) -> int:
    try:
        with opener.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


class Prometheus:
    """A server of Prometheus.

    Args:
        port: port of the HTTP interface.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, expression: str) -> dict[str, float]:
        """Return what a PromQL expression gives: values by their labels, as 'a=1,b=2'."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?query={urllib.parse.quote(expression)}"
        results: Sequence[dict[str, Any]] = json.loads(opener.open(url, timeout=20).read())["data"]["result"]
        hidden = ("__name__", "instance", "job")
        return {
            ",".join(f"{k}={v}" for k, v in sorted(result["metric"].items()) if k not in hidden): float(
                result["value"][1]
            )
            for result in results
        }


@contextlib.contextmanager
def prometheus(folder: Path, target: int, rules: Path | None = None) -> Iterator[Prometheus]:
    """Run a Prometheus inside the block that scrapes a port of this machine, and applies rules, every 200 ms."""
    program, port = program_of("prometheus"), free_port()
    folder.mkdir()
    (folder / "config.yml").write_text(
        f"global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}\nrule_files: [{rules or ''}]\n"
        "scrape_configs:\n- job_name: training\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
    )
    command = [program, f"--config.file={folder}/config.yml", f"--storage.tsdb.path={folder}/data"]
    server = Server(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], f"http://127.0.0.1:{port}/-/ready", folder / "log"
    ).start()
    try:
        assert wait_until(lambda: _status(f"http://127.0.0.1:{port}/-/ready") == 200, 60)  # 503 before that
        yield Prometheus(port)
    finally:
        server.stop()


@contextlib.contextmanager
def collector(folder: Path) -> Iterator[tuple[int, Path]]:
    """Run a collector of OpenTelemetry inside the block; give its OTLP port and the log to which it writes what it gets."""
    program, port, health = folder_of("otelcol") / "otelcol", free_port(), free_port()
    folder.mkdir()
    log = folder / "log"
    metrics = (
        f"{{level: basic, readers: [{{pull: {{exporter: {{prometheus: {{host: 127.0.0.1, port: {health}}}}}}}}}]}}"
    )
    (folder / "config.yml").write_text(
        f"receivers: {{otlp: {{protocols: {{http: {{endpoint: '127.0.0.1:{port}'}}}}}}}}\n"
        "exporters: {debug: {verbosity: detailed}}\n"
        f"service:\n  telemetry: {{metrics: {metrics}}}\n"
        "  pipelines:\n    traces: {receivers: [otlp], exporters: [debug]}\n"
        "    metrics: {receivers: [otlp], exporters: [debug]}\n"
    )
    server = Server([str(program), f"--config={folder}/config.yml"], f"http://127.0.0.1:{port}/", log).start()
    try:
        yield port, log
    finally:
        server.stop()
