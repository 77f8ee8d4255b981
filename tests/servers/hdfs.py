"""HDFS: a NameNode and DataNodes of Hadoop on this machine; each can be killed and started again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import hdfs_native

from bytecheckpoint.storage import Storage
from tests.servers.process import Server, folder_of, free_port, opener

__all__ = ["USER", "Hdfs", "Operations", "path_in_cluster", "write_configuration"]

#: The user who starts the NameNode is its superuser.
USER = "superuser"
_JAVA = ["java", "--add-opens", "java.base/java.lang=ALL-UNNAMED", "--add-opens", "java.base/java.util=ALL-UNNAMED"]
#: Options with which Java starts in half the time, and runs slower later.
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_LOGGING = """log4j.rootLogger=INFO, A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


def write_configuration(folder: Path, core: Mapping[str, str], hdfs: Mapping[str, str]) -> Path:
    """Write core-site.xml and hdfs-site.xml, as HADOOP_CONF_DIR has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, properties in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
        lines = (
            f"<property><name>{escape(key)}</name><value>{escape(value)}</value></property>\n"
            for key, value in properties.items()
        )
        (folder / name).write_text(f"<configuration>\n{''.join(lines)}</configuration>\n")
    return folder


def path_in_cluster(storage: Storage) -> str:
    """Return the path of a storage's folder, as plain clients name it."""
    return "/" + storage.url.split("://", 1)[1].partition("/")[2]


def _beans(http: int, service: str, name: str) -> list[dict[str, Any]]:
    with opener.open(f"http://127.0.0.1:{http}/jmx?qry=Hadoop:service={service},name={name}", timeout=10) as answer:
        beans: list[dict[str, Any]] = json.load(answer)["beans"]
    return beans


class Hdfs:
    """A running cluster.

    Args:
        folder: folder for all its files.
        datanodes: number of DataNodes.
        data: folder for the DataNodes' blocks, if not in `folder`.
        java: options of the Java machines; by default they start quickly.
        **properties: properties of hdfs-site.xml.

    Attributes:
        port: port of the NameNode's RPC.
        namenode: process of the NameNode.
        datanodes: processes of the DataNodes.
        ports: ports on which the DataNodes take data.
    """

    def __init__(
        self,
        folder: Path,
        datanodes: int = 2,
        data: Path | None = None,
        *,
        java: Sequence[str] = _QUICK,
        **properties: str,
    ) -> None:
        self._folder = folder
        self._options = [*_JAVA, *java]
        self._libraries = folder_of("hadoop") / "lib"
        self.port, self._http = free_port(), free_port()
        self._conf = self._configure(datanodes, properties)
        subprocess.run(
            [*self._java("namenode.NameNode", 256), "-format", "-nonInteractive"], check=True, timeout=300,
            capture_output=True, env=self._environment(),
        )  # fmt: skip
        self.namenode = self._server(self._java("namenode.NameNode", 512), self._http, "nn")
        self.datanodes: list[Server] = []
        self.ports: list[int] = []
        self._data = data or folder
        self._datanode_http: list[int] = []
        for number in range(datanodes):
            taken, http, ipc = free_port(), free_port(), free_port()
            blocks = self._data / f"dn{number}"
            command = [
                *self._java("datanode.DataNode", 256), "-D", f"dfs.datanode.data.dir={blocks}",
                "-D", f"dfs.datanode.address=127.0.0.1:{taken}", "-D", f"dfs.datanode.http.address=127.0.0.1:{http}",
                "-D", f"dfs.datanode.ipc.address=127.0.0.1:{ipc}", "-D", "dfs.datanode.hostname=127.0.0.2",
            ]  # fmt: skip
            self.ports.append(taken)
            self._datanode_http.append(http)
            self.datanodes.append(self._server(command, http, f"dn{number}"))

    def _configure(self, datanodes: int, properties: Mapping[str, str]) -> Path:
        conf = self._folder / "conf"
        for name in ("hdfs", "datanode"):  # both programs look for them
            (conf / "webapps" / name).mkdir(parents=True)
        (conf / "log4j.properties").write_text(_LOGGING)
        (conf / "hadoop-metrics2.properties").write_text("*.periodMillis=100\n")  # counters are up to date
        core = {"fs.defaultFS": f"hdfs://127.0.0.1:{self.port}", "hadoop.tmp.dir": str(self._folder / "tmp")}
        hdfs = {
            "dfs.replication": str(min(datanodes, 2)),
            "dfs.namenode.name.dir": str(self._folder / "nn"),
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.fs-limits.min-block-size": "1048576",
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1",
            # The NameNode counts a dead DataNode as alive for minutes, as in any cluster.
            "dfs.namenode.heartbeat.recheck-interval": "300000",
            **properties,
        }
        return write_configuration(conf, core, hdfs)

    def _java(self, main: str, megabytes: int) -> list[str]:
        classpath = f"{self._conf}:{self._libraries}/*"
        return [*self._options, f"-Xmx{megabytes}m", "-cp", classpath, f"org.apache.hadoop.hdfs.server.{main}"]

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "HADOOP_USER_NAME": USER}

    def _server(self, command: list[str], http: int, name: str) -> Server:
        url, log = f"http://127.0.0.1:{http}/jmx?qry=x", self._folder / f"{name}.log"
        return Server(command, url, log, env={"HADOOP_USER_NAME": USER})

    def start(self) -> Hdfs:
        """Start every server that does not run, and wait until files can be written."""
        servers = [server for server in (self.namenode, *self.datanodes) if not server.running]
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.start, servers))
        self.wait(len(self.datanodes))
        return self

    def stop(self) -> None:
        """End all servers."""
        for server in (*self.datanodes, self.namenode):
            server.kill()

    def wait(self, datanodes: int, timeout: float = 120.0) -> None:
        """Wait until so many DataNodes have registered and the NameNode has left safe mode."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                live = self.bean("NameNode", "FSNamesystemState")["NumLiveDataNodes"]
                if live >= datanodes and not self.bean("NameNode", "NameNodeInfo")["Safemode"]:
                    return
            except (OSError, LookupError, ValueError):
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not become ready: {(self._folder / 'nn.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def bean(self, service: str, name: str) -> dict[str, Any]:
        """Return a record of the NameNode's monitoring interface."""
        deadline = time.monotonic() + 60
        while not (beans := _beans(self._http, service, name)):
            if time.monotonic() > deadline:
                raise LookupError(f"the NameNode has no {name}")
            time.sleep(0.1)  # its server answers before everything in it is registered
        return beans[0]

    def bytes_read(self) -> int:
        """Return the bytes that the DataNodes have sent since they started."""
        time.sleep(0.7)
        beans = [bean for http in self._datanode_http for bean in _beans(http, "DataNode", "DataNodeActivity-*")]
        return sum(int(bean["BytesRead"]) for bean in beans)

    def blocks(self, datanode: int) -> list[Path]:
        """Return the files of a DataNode's blocks."""
        return [p for p in (self._data / f"dn{datanode}").rglob("blk_*") if p.suffix != ".meta"]

    def client(self) -> Any:
        """Return a client that goes past every proxy."""
        return hdfs_native.Client(f"hdfs://127.0.0.1:{self.port}")

    def operations(self) -> dict[str, int]:
        """Return how often each operation of the NameNode was called since it started."""
        time.sleep(0.7)  # counters are published every 0.1 s, and cached a little
        found = self.bean("NameNode", f"RpcDetailedActivityForPort{self.port}")
        ends = "NumOps"
        return {key[: -len(ends)]: value for key, value in found.items() if key.endswith(ends) and value}

    def configuration(self, folder: Path, *, namenode: str = "", **properties: str) -> dict[str, str]:
        """Return the variables with which clients find the cluster as "demo_0", by a configuration in a new folder.

        Args:
            folder: new folder for the files.
            namenode: address of a proxy in place of the NameNode's own.
            **properties: further properties, with "__" for "." and "_" for "-".
        """
        further = {key.replace("__", ".").replace("_", "-"): value for key, value in properties.items()}
        address = namenode or f"127.0.0.1:{self.port}"
        hdfs = {"dfs.nameservices": "demo_0", "dfs.namenode.rpc-address.demo_0": address}
        conf = write_configuration(folder, {"fs.defaultFS": "hdfs://demo_0"}, {**hdfs, **further})
        return {"HADOOP_CONF_DIR": str(conf), "HADOOP_USER_NAME": USER}

    def shell(self, *arguments: str) -> str:
        """Run `hdfs dfs ARGUMENTS`, Hadoop's own client; return its output."""
        return self._run("org.apache.hadoop.fs.FsShell", *arguments)

    def admin(self, *arguments: str) -> str:
        """Run `hdfs dfsadmin ARGUMENTS`; return its output."""
        return self._run("org.apache.hadoop.hdfs.tools.DFSAdmin", *arguments)

    def _run(self, main: str, *arguments: str) -> str:
        command = [*self._options, "-cp", f"{self._conf}:{self._libraries}/*", main, *arguments]
        done = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True, env=self._environment())
        return done.stdout


class Operations:
    """Counts what the NameNode does for clients."""

    _servers = re.compile(
        "Overall|SendHeartbeat|Block(ReceivedAndDeleted|Report)|RegisterDatanode|VersionRequest|RenewLease"
    )

    def __init__(self, hdfs: Hdfs) -> None:
        self._hdfs = hdfs
        self._before = Counter(hdfs.operations())

    def since(self) -> Counter[str]:
        """Return the number of calls of each operation since the last look."""
        now = Counter(self._hdfs.operations())
        found = {name: count - self._before[name] for name, count in now.items() if not self._servers.match(name)}
        self._before = now
        return Counter({name: count for name, count in found.items() if count})
