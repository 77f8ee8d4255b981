"""HDFS without a server: URLs, the Hadoop configuration, error messages, timeouts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError, UsageError
from bytecheckpoint.storage.hdfs.cluster import call_client
from bytecheckpoint.storage.hdfs.config import parse_url, target_of
from bytecheckpoint.storage.hdfs.errors import facts_of, storage_error
from bytecheckpoint.storage.hdfs.rpc import RemoteError, concat
from tests.servers.hdfs import write_configuration
from tests.servers.peers import listening
from tests.storage.checks import within


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HADOOP_HOME", "HADOOP_USER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("place", ["user@host/x", "a/x/../y", "a/./x", "a/x//y", "a/x:y", "a/x\ny", "/x"])
def test_what_is_no_place_in_hdfs(conf: Path, place: str) -> None:
    with pytest.raises(UsageError, match="hdfs://"):
        parse_url(f"hdfs://{place}")


def test_urls(conf: Path) -> None:
    assert parse_url("hdfs://demo_0/checkpoints/") == ("demo_0", "/checkpoints")
    assert parse_url("hdfs://host:9000/a b/%41?#") == ("host:9000", "/a b/%41?#")
    assert parse_url("hdfs://host") == ("host", "/")
    write_configuration(conf, {"fs.defaultFS": "hdfs://main/ignored"}, {})
    assert parse_url("hdfs:///runs") == ("main", "/runs")


def test_where_namenodes_are(conf: Path) -> None:
    assert target_of("host:9000").namenodes == (("host", 9000),)
    assert target_of("host").namenodes == (("host", 8020),)
    hdfs = {
        "dfs.namenode.rpc-address.single": "one:8021",
        "dfs.ha.namenodes.pair": " a , b ",
        "dfs.namenode.rpc-address.pair.a": "first:1",
        "dfs.namenode.rpc-address.pair.b": "second",
        "dfs.ha.namenodes.half": "a,b",
        "dfs.namenode.rpc-address.half.a": "first:1",
        "dfs.client.socket-timeout": "5000",
    }
    write_configuration(conf, {}, hdfs)
    assert target_of("single").namenodes == (("one", 8021),)
    pair = target_of("pair")
    assert pair.namenodes == (("first", 1), ("second", 8020))
    assert dict(pair.options)["dfs.ha.namenodes.pair"] == "a,b"
    assert dict(pair.options)["dfs.client.failover.max.attempts"] == "1", "every NameNode is asked once"
    assert dict(pair.options)["dfs.client.socket-timeout"] == "5000", "what is configured stays"
    rotated = pair.rotated()
    assert rotated.namenodes == pair.namenodes[::-1] and rotated.rotated() == pair
    assert dict(rotated.options)["dfs.ha.namenodes.pair"] == "b,a"
    with pytest.raises(UsageError, match="not all their addresses"):
        target_of("half")
    for address in ("host:port", "host:0", "host:65536", ":8020"):
        with pytest.raises(UsageError, match="no address of a NameNode"):
            target_of(address)


def test_variables_and_included_files(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hadoop's own configuration has them; the client library does not know them."""
    monkeypatch.setenv("NAMENODE_PORT", "8021")
    write_configuration(conf, {"fs.defaultFS": "hdfs://${dfs.nameservices}", "main.host": "${main.prefix}-1"}, {})
    site = """<configuration xmlns:xi="http://www.w3.org/2001/XInclude">
        <property><name>dfs.nameservices</name><value>main</value></property>
        <property><name>dfs.namenode.rpc-address.main</name><value>${main.host}:${env.NAMENODE_PORT}</value></property>
        <property><name>dfs.client.unknown</name><value>${nobody.knows}</value></property>
        <xi:include href="more.xml"/>
    </configuration>"""
    (conf / "hdfs-site.xml").write_text(site)
    more = "<configuration><property><name>main.prefix</name><value>name</value></property></configuration>"
    (conf / "more.xml").write_text(more)
    assert parse_url("hdfs:///runs") == ("main", "/runs")
    target = target_of("main")
    assert target.namenodes == (("name-1", 8021),)
    options = dict(target.options)
    assert options["dfs.namenode.rpc-address.main"] == "name-1:8021", "passed on to the client"
    assert options["dfs.client.unknown"] == "${nobody.knows}"
    (conf / "more.xml").write_text(more.replace(">name<", ">other<"))
    assert target_of("main") != target, "another configuration is another client"
    (conf / "more.xml").unlink()
    with pytest.raises(UsageError, match=r"cannot read the Hadoop configuration .*hdfs-site\.xml: .*more\.xml"):
        target_of("main")


def test_who_one_is(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    assert target_of("host").user == "alice" and not target_of("host").secure
    write_configuration(conf, {"hadoop.security.authentication": "kerberos"}, {})
    assert target_of("host").secure


def test_a_broken_configuration(conf: Path) -> None:
    (conf / "core-site.xml").write_text("<configuration><property>")
    with pytest.raises(UsageError, match=r"cannot read the Hadoop configuration .*core-site\.xml"):
        target_of("host")


def rpc_error(kind: str, message: str) -> RuntimeError:
    """Return the client's error for one that a NameNode reports, with the trace of its stack."""
    trace = r"\n\tat org.apache.hadoop.hdfs.server.namenode.FSNamesystem.x(FSNamesystem.java:1)"
    return RuntimeError(f'RPCError("{kind}", "{message}{trace}")')


def not_written(running: int) -> RuntimeError:
    return rpc_error(
        "java.io.IOException",
        "File /x could only be written to 0 of the 1 minReplication nodes. "
        f"There are {running} datanode(s) running and {running} node(s) are excluded",
    )


REFUSED = OSError("Connection refused (os error 111)")
SAFE_MODE = rpc_error("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot create")
DENIED = rpc_error("org.apache.hadoop.security.AccessControlException", "Permission denied: user=a")
ALL_FAILED = RuntimeError(
    'DataTransferError("All DataNodes failed: [DatanodeInfoProto { id: DatanodeIdProto { secret }")'
)
NO_FOLDER = RuntimeError('RPCError("org.apache.hadoop.fs.ParentNotDirectoryException", "/t/a (is not a directory)")')


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (REFUSED, StorageUnavailableError, "Connection refused (attempt 3); check"),
        (TimeoutError("no answer in 3 s"), StorageUnavailableError, "no answer in 3 s (attempt 3)"),
        (SAFE_MODE, StorageUnavailableError, "SafeModeException: Cannot create (attempt 3)"),
        (DENIED, StorageError, "AccessControlException: Permission denied: user=a (attempt 3); check who you are"),
        (RemoteError("org.apache.x.DSQuotaExceededException", "over\n\tat x"), StorageFullError, "raise the quota"),
        (not_written(running=2), StorageFullError, "no DataNode has room"),
        (not_written(running=0), StorageUnavailableError, "0 datanode(s) running"),
        (ALL_FAILED, StorageUnavailableError, "All DataNodes failed (attempt 3)"),
        (RuntimeError("NoSASLMechanism"), StorageError, "NoSASLMechanism (attempt 3); check who"),
        (FileNotFoundError("/x"), FileNotFoundError, "hdfs://c/x"),
        (NO_FOLDER, FileNotFoundError, "hdfs://c/x"),
    ],
)
def test_what_errors_say(raised: Exception, kind: type[Exception], says: str) -> None:
    found = storage_error(facts_of(raised), "upload", "hdfs://c/x", 3, [("host", 1)])
    assert type(found) is kind
    text = str(found)
    assert says in text and "hdfs://c/x" in text
    assert "\\n" not in text and "java:" not in text and "secret" not in text
    assert kind is FileNotFoundError or text.startswith("cannot upload hdfs://c/x: ")


def test_a_call_that_takes_too_long_is_left_alone() -> None:
    released = threading.Event()
    with within(10), pytest.raises(TimeoutError, match=r"no answer in 0\.2 s"):
        call_client(lambda: released.wait(30), 0.2)
    assert call_client(lambda: 7, 10) == 7, "other calls go on"
    released.set()
    with pytest.raises(ValueError, match="inside"):
        call_client(lambda: int("inside"), 10)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_peer_that_is_no_namenode(host: str) -> None:
    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listening(answer, host) as peer, pytest.raises((RemoteError, OSError)):
        concat(target_of(peer).namenodes, "root", "/a", ["/b"], b"0" * 16, timeout=5)
