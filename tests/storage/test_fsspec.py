"""fsspec: whole saves and loads, and file systems that fail, lose bytes, or do not do what they say."""

from __future__ import annotations

import datetime
import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.storage.uploading import UploadingStorage
from tests.storage.checks import check_file, check_save
from tests.support.coded import load_step, states, step_of

STEP = "fsspec+flaky://x/step"


class Flaky(MemoryFileSystem):
    """Memory that misbehaves."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    failing: ClassVar[dict[str, list[Exception]]] = {}
    lossy: ClassVar[set[str]] = set()

    def _fail(self, call: str) -> None:
        if self.failing.get(call):
            raise self.failing[call].pop()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._fail("open")
        return super()._open(path, mode, **options)

    def cat_file(self, path: str, version: str = "", start: int | None = None, end: int | None = None) -> Any:
        """With an argument before the range, as s3fs has it."""
        self._fail("cat_file")
        assert version == ""
        data = super().cat_file(path, start=start, end=end)
        return data[: max(len(data) // 2, 1)] if "short" in self.lossy else data

    def info(self, path: str, **options: Any) -> Any:
        self._fail("info")
        found = super().info(path, **options)
        if "size" in self.lossy and found["type"] == "file":
            found = found | {"size": found["size"] - 1}
        return found

    def rm_file(self, path: str) -> None:
        self._fail("rm_file")
        super()._rm(path)

    _rm = rm_file

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self._fail("mv")
        if "mv" not in self.lossy:
            super().mv(path1, path2, **options)


@pytest.fixture
def flaky() -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    yield Flaky
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]
    Flaky.failing.clear()
    Flaky.lossy.clear()


@pytest.fixture
def storage(flaky: type[Flaky]) -> Storage:
    return resolve(STEP)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_save_replace_and_load(tmp_path: Path, scheme: str, writer: str, asynchronous: bool) -> None:
    bytecheckpoint.configure(writer=writer)
    root = f"fsspec+{scheme}://{tmp_path}"
    check_save(f"{root}/step", 1, 2, async_checkpoint=asynchronous)
    assert run(["verify", f"{root}/step"]) == 0
    assert run(["ls", root]) == 0
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError("slow"), OSError(5, "Input/output error")]
)
@pytest.mark.parametrize("call", ["open", "cat_file", "info", "mv"])
def test_transient_errors_are_tried_again(flaky: type[Flaky], call: str, error: Exception) -> None:
    flaky.failing[call] = [error, error]
    target = states()
    retries = bytecheckpoint.save(STEP, states(step=3)).result().retries
    retries += bytecheckpoint.load(STEP, target).retries
    assert step_of(target) == 3
    assert flaky.failing[call] == [] and retries == 2, "the reports count every attempt"


def test_a_removal_whose_outcome_cannot_be_seen(flaky: type[Flaky], storage: Storage) -> None:
    storage.publish("catalog", b"x")
    flaky.failing.update(rm_file=[ConnectionResetError("reset")], info=[ConnectionResetError("reset")])
    storage.delete(["catalog"])
    assert storage.list() == []


@pytest.mark.parametrize(("code", "attempts"), [(errno.EIO, 1), (errno.ESTALE, 2)])
def test_local_errors_are_judged_as_those_of_local_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, attempts: int
) -> None:
    """A local disk that fails is not asked for three minutes."""
    calls: list[int] = []

    def fail(*_: Any, **__: Any) -> Any:
        calls.append(code)
        raise OSError(code if len(calls) == 1 else errno.EACCES, "so it is")

    monkeypatch.setattr(LocalFileSystem, "cat_file", fail)
    storage = resolve(f"fsspec+file://{tmp_path}/step")
    storage.publish("catalog", b"x")
    with pytest.raises(StorageUnavailableError if attempts == 1 else StorageError, match="so it is"):
        storage.read("catalog")
    assert len(calls) == attempts


def test_errors_that_stay(flaky: type[Flaky], storage: Storage) -> None:
    bytecheckpoint.configure(storage_timeout=0.5)
    storage.publish("catalog", b"x")
    flaky.failing["cat_file"] = [ConnectionResetError("https://u:SECRET@host/?k=SECRET")] * 100
    with pytest.raises(
        StorageUnavailableError, match=r"cannot read fsspec\+flaky://x/step/catalog: .*\d attempts"
    ) as raised:
        storage.read("catalog")
    assert "SECRET" not in str(raised.value)
    flaky.failing["cat_file"] = [PermissionError(13, "Permission denied")]
    with pytest.raises(StorageError, match="Permission denied"):
        storage.read("catalog")


@pytest.mark.parametrize(
    ("what", "says"),
    [("size", r"fsspec\+flaky://x/step: \d+ bytes of \d+ arrived"), ("mv", "did not replace it")],
)
def test_writes_that_have_no_effect_are_noticed(flaky: type[Flaky], what: str, says: str) -> None:
    """Bytes do not arrive, or a catalog is not replaced."""
    bytecheckpoint.save(STEP, states(step=1))
    flaky.lossy.add(what)
    with pytest.raises(StorageError, match=says):
        bytecheckpoint.save(STEP, states(step=2))
    flaky.lossy.clear()
    assert load_step(STEP) == 1


def test_short_reads_are_continued(flaky: type[Flaky], storage: Storage) -> None:
    write_file(storage, "model/file", content(10_000))
    flaky.lossy.add("short")
    assert (read_all(storage, "model/file") == content(10_000)).all()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_path_that_looks_like_a_pattern(tmp_path: Path, scheme: str) -> None:
    root = f"fsspec+{scheme}://{tmp_path}"
    for step in (1, 2):
        bytecheckpoint.save(f"{root}/[ab]*{{1}}/step", states(step=step))
        bytecheckpoint.save(f"{root}/a/step", states(step=10 + step))
    assert load_step(f"{root}/[ab]*{{1}}/step") == 2
    assert load_step(f"{root}/a/step") == 12
    fsspec.filesystem("memory").store.clear()


def test_a_file_that_is_not_there_by_any_other_word(flaky: type[Flaky], storage: Storage) -> None:
    """ftp has numbers for it."""
    storage.publish("catalog", b"x")
    flaky.failing["rm_file"] = [RuntimeError("550 No such file")]
    storage.delete(["absent"])
    flaky.failing["rm_file"] = [RuntimeError("550 Permission denied")]
    with pytest.raises(StorageError, match=r"cannot delete fsspec\+flaky://x/step/catalog: 550 Permission denied"):
        storage.delete(["catalog"])
    storage.delete(["catalog"])
    assert storage.list() == []


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_class_that_only_this_process_knows(flaky: type[Flaky], writer: str) -> None:
    bytecheckpoint.configure(writer=writer)
    check_save(STEP, 3, async_checkpoint=True)


def test_versions_of_one_second(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sftp and ftp there is nothing but whole seconds."""
    second = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    monkeypatch.setattr(Flaky, "info", lambda fs, path: MemoryFileSystem.info(fs, path) | {"created": second})
    storage.publish("catalog", b"first", expected="")
    first = storage.version("catalog")
    storage.publish("catalog", b"other", expected=first)
    with pytest.raises(StorageConflictError):
        storage.publish("catalog", b"third", expected=first)
    assert storage.read("catalog") == b"other"


def test_a_file_without_a_size(flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch) -> None:
    """Web servers that send in chunks do that."""
    resolve(STEP).publish("catalog", b"x")
    monkeypatch.setattr(Flaky, "info", lambda fs, path: MemoryFileSystem.info(fs, path) | {"size": None})
    with pytest.raises(StorageError, match=r"fsspec\+flaky://x/step/catalog: its file system does not say how long"):
        resolve(STEP).open("catalog")


def test_a_listing_without_sizes(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Web servers have such listings."""
    write_file(storage, "model/file", content(1000))
    full = MemoryFileSystem.ls
    monkeypatch.setattr(Flaky, "ls", lambda fs, path, detail: [e | {"size": None} for e in full(fs, path, detail=True)])
    assert storage.list() == [("model/file", 1000)] and storage.folders() == ["model"]


class OneConnection(Flaky):
    """One connection, which carries one request at a time, and which can be lost for good: ftp and the like."""

    protocol = "oneconnection"
    cachable = True
    made: ClassVar[list[OneConnection]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.busy = threading.Lock()
        self.lost = False
        self.made.append(self)

    def _fail(self, call: str) -> None:
        if self.lost:
            raise OSError("Socket is closed")
        assert self.busy.acquire(blocking=False), "two requests at the same time"
        time.sleep(0.001)
        self.busy.release()


@pytest.fixture
def connections(flaky: type[Flaky]) -> Iterator[list[OneConnection]]:
    assert flaky is not OneConnection
    fsspec.register_implementation("oneconnection", OneConnection, clobber=True)
    OneConnection.clear_instance_cache()
    yield OneConnection.made
    OneConnection.made.clear()


def test_one_request_at_a_time(connections: list[OneConnection]) -> None:
    storage = resolve("fsspec+oneconnection://x/step")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: check_file(storage, f"model/{number}", content(100_000)), range(16)))
    resolve("fsspec+oneconnection://x/other").publish("catalog", b"x")
    assert len(connections) == 1


@pytest.mark.usefixtures("connections")
def test_an_upload_may_read_from_its_own_file_system() -> None:
    """Cooldown within one file system does: time limits let another thread read."""
    source, target = resolve("fsspec+oneconnection://x/hot"), resolve("fsspec+oneconnection://x/cold")
    assert isinstance(target, UploadingStorage)
    data = content(100_000)
    write_file(source, "model/0", data)

    def pieces() -> Iterator[memoryview]:
        with ThreadPoolExecutor(1) as pool:
            yield memoryview(pool.submit(read_all, source, "model/0").result(20))

    target.upload("model/0", len(data), pieces)
    assert (read_all(target, "model/0") == data).all()


def test_a_connection_that_is_lost_is_made_anew(connections: list[OneConnection]) -> None:
    bytecheckpoint.save("fsspec+oneconnection://x/step", states(step=1))
    for step in (2, 3):
        storage = resolve("fsspec+oneconnection://x/step")
        for connection in connections:
            connection.lost = True
        bytecheckpoint.save(storage, states(step=step))
        assert load_step(storage) == load_step("fsspec+oneconnection://x/step") == step
    assert len(connections) == 3


class Hosted(Flaky):
    """It parses its URLs as sftp and ftp do, and knows no other options than a host."""

    protocol = "hosted"

    def __init__(self, host: str) -> None:
        super().__init__()
        assert host == "somewhere"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(infer_storage_options(path)["path"]).rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        found = infer_storage_options(path)
        return {key: value for key, value in found.items() if key not in ("path", "protocol")}


@pytest.mark.parametrize("folder", ["a#b", "#", "a/#/b", "100%#%41"])
def test_what_looks_like_a_fragment_is_part_of_the_path(flaky: type[Flaky], folder: str) -> None:
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    check_save(f"fsspec+hosted://somewhere/{folder}", 2)
    assert f"/{folder}/metadata.parquet" in flaky.store


def test_folders_made_and_removed_by_others_meanwhile(
    flaky: type[Flaky], storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks make the same folders at the same moment, and a job that fails removes those that it empties."""

    def makedirs(fs: Flaky, path: str, exist_ok: bool = False) -> None:
        MemoryFileSystem.makedirs(fs, path.rpartition("/")[0], exist_ok=True)
        if made.append(path) or len(made) > 1:
            MemoryFileSystem.makedirs(fs, path, exist_ok=True)
        raise OSError("Failure")

    made: list[str] = []
    monkeypatch.setattr(Flaky, "makedirs", makedirs)
    flaky.failing["open"] = [FileNotFoundError(2, "No such file")]
    check_file(storage, "model/file", content(1000))
    assert flaky.failing["open"] == [] and len(made) == 3


class Unreachable(MemoryFileSystem):
    """It connects when it is made, as sftp does."""

    protocol = "unreachable"
    cachable = False
    error: ClassVar[Exception] = OSError()

    def __init__(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(111, "Connection refused"), StorageUnavailableError),
        (PermissionError(13, "Authentication failed for https://u:SECRET@host/?k=SECRET"), StorageError),
        (FileNotFoundError(2, "no such host"), StorageError),
        (RuntimeError("odd"), StorageError),
    ],
)
def test_a_file_system_that_cannot_be_reached(error: Exception, kind: type[Exception]) -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    Unreachable.error = error
    with pytest.raises(kind, match=r"cannot use fsspec\+unreachable://host/x: ") as raised:
        resolve("fsspec+unreachable://host/x")
    assert type(raised.value) is kind and "SECRET" not in str(raised.value)
