"""URLs: schemes of this package and of others, what is missing, and what must not be in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import UsageError
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives import current
from bytecheckpoint.storage import known_schemes, resolve
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.world import world_of
from tests.storage.checks import check_save
from tests.support.coded import load_step, states
from tests.support.processes import run_program

_PLUGIN = """
from bytecheckpoint.storage.posix.storage import PosixStorage

class Tape(PosixStorage):
    def __init__(self, url):
        super().__init__({root!r} + "/" + url.partition("://")[2], url)

def no_storage(url):
    return object()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that adds schemes."""
    site, root = tmp_path / "site", tmp_path / "tapes"
    info = site / "tape_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tape-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bytecheckpoint.storages]\ntape = tape_backend:Tape\nbroken = tape_backend:absent\n"
        "none = tape_backend:no_storage\ns3 = tape_backend:Tape\n"
        "no_scheme = tape_backend:Tape\ntier+x = tape_backend:Tape\n"
    )
    (site / "tape_backend.py").write_text(_PLUGIN.format(root=str(root)))
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "tape_backend", raising=False)
    return root


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    urls = (f"file://{tmp_path}/a", f"FILE://{tmp_path}/a/")
    for given in (tmp_path / "a", str(tmp_path / "a"), "a", "./b/../a", *urls):
        storage = resolve(given)
        assert isinstance(storage, LocalStorage)
        assert storage.url == str(tmp_path / "a")
    assert resolve("file://localhost/x/y").url == resolve("file:////x//y").url == "/x/y"
    assert resolve("with:colon").url == str(tmp_path / "with:colon")


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert resolve("/absolute").url == "/absolute"
    with pytest.raises(bytecheckpoint.StorageError, match="step_1: the working directory of this process is gone"):
        resolve("step_1")


@pytest.mark.parametrize("path", ["", "a\0b", "file://", b"bytes", None, {"model": list(range(100))}])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(UsageError, match="not a checkpoint path") as caught:
        resolve(path)
    assert len(str(caught.value)) < 120


CREDENTIALS = "credentials belong in the environment"
BAD_PARTS = ("x/../y", "x//y", "./y", "..", "x/./y", "x\ny", "x\\y", "\udcff")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (Path("s3://bucket/step"), "s3: is no URL: write s3://"),
        ("s3:/bucket/step", "s3: is no URL: write s3://"),
        ("HDFS:demo_0/step", "HDFS: is no URL: write HDFS://"),
        ("mem:name", "mem: is no URL"),
        ("file:/folder", "file: is no URL: write file://"),
        ("fsspec+memory:/x", "fsspec.memory: is no URL"),
        ("fsspec+simplecache::s3://bucket/x", "fsspec.simplecache: is no URL"),
        (" s3://bucket/step", "' s3' is no scheme of a URL; known schemes: file, mem, s3"),
        ("my_store://x", "'my_store' is no scheme of a URL; known schemes: file, mem, s3"),
        ("://x", "'' is no scheme"),
        ("file://host/share/step", "write file:///folder"),
        ("file://relative", "write file:///folder"),
        ("file://localhost", "write file:///folder"),
        ("tier+/folder", r"a tier stands before a URL: write tier\+file:///folder"),
        ("tier+s3:/key:SECRET@bucket", "a tier stands before a URL"),
        ("s3:key:SECRET@bucket/x", "is no URL"),
        ("tier+nosuch://x", "no storage backend for nosuch://.*known schemes: file, mem"),
        ("fsspec+file://relative/step", "write fsspec.file:///folder"),
        ("fsspec+file:///", "write fsspec.file:///folder"),
        ("fsspec+memory://", "write fsspec.file:///folder"),
        ("fsspec+://x", "write fsspec.file:///folder"),
        ("fsspec+nosuch://x", r"fsspec\+nosuch://: Protocol not known: nosuch; it knows .*file.* ftp,"),
        ("fsspec+oss://bucket/x", "cannot use fsspec.oss://: Install ossfs"),
        ("fsspec+zip://step::file:///a.zip", "without '::'"),
        ("fsspec+memory://a//b", "an empty, '.' or '..' part"),
        ("fsspec+memory://x/../y", "an empty, '.' or '..' part"),
        ("fsspec+sftp://user:SECRET@host/x", "takes no password and no query"),
        ("fsspec+s3://b/x?key=SECRET", "takes no password and no query"),
        ("ftp://user:SECRET@host/step", r"no storage backend for ftp://.*file, mem, s3, gs, az, hdfs, fsspec\+"),
        ("tier+mem", "tier"),
        *(
            (home, "is not expanded to your home folder: give os.path.expanduser")
            for home in ("~", Path("~/run/step_1"))
        ),
        ("tier+tier+file:///x/y", "tier"),
        ("s3://key:SECRET@bucket/x", CREDENTIALS),
        ("s3://key:SEC/SECRET@bucket/x", CREDENTIALS),
        ("s3://bucket/x?X-Amz-Signature=SECRET", CREDENTIALS),
        ("s3://bucket/x?y", CREDENTIALS),
        ("az://c/x?sig=SECRET", CREDENTIALS),
        ("gs://u:SECRET@b", CREDENTIALS),
        *((url, "mem://name") for url in ("mem://", "mem:///", "mem://..", "mem://a/../b", "mem://a//b", "mem:///etc")),
        *((f"s3://{path}", "write s3://bucket/folder") for path in ("", "/x", *(f"b/{bad}" for bad in BAD_PARTS))),
    ],
)
def test_a_broken_url_is_no_folder_of_this_machine(
    path: str | Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words) as raised:
        bytecheckpoint.save(path, states(step=1))
    assert "SECRET" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_only_look_like_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("./s3:/bucket", "./x://y", "a/b://c", "12:30", "~old/x", "./~/x"):
        assert resolve(given).url == str(tmp_path / given.replace("//", "/"))


def test_a_storage_stands_for_itself(tmp_path: Path) -> None:
    storage = resolve(tmp_path / "step")
    assert resolve(storage) is storage
    handle = bytecheckpoint.save(storage, states(step=3), async_checkpoint=True)
    handle.result(60)
    assert handle.path == str(storage) == str(tmp_path / "step")
    assert load_step(storage) == 3
    with bytecheckpoint.open(storage) as checkpoint:
        assert "model/w" in checkpoint


_MISSING = [
    ("s3://bucket/x", "obstore", "s3"),
    ("gs://bucket/x", "obstore", "gcs"),
    ("az://container/x", "obstore", "azure"),
    ("hdfs://cluster/x", "hdfs_native", "hdfs"),
    ("fsspec+memory://x", "fsspec", "fsspec"),
]


def test_a_missing_package_says_what_to_install() -> None:
    program = f"""
import sys
for _, package, _ in {_MISSING!r}:
    sys.modules[package] = None
from bytecheckpoint.storage import resolve
from bytecheckpoint.errors import UsageError
for url, _, _ in {_MISSING!r}:
    try:
        resolve(url)
    except UsageError as error:
        print(error)
"""
    lines = run_program(program).stdout.splitlines()
    assert len(lines) == len(_MISSING)
    for line, (_, package, extra) in zip(lines, _MISSING, strict=True):
        assert f"needs the package {package}: pip install 'bytecheckpoint-unified[{extra}]'" in line


def test_a_scheme_of_another_package(plugin: Path) -> None:
    assert [s for s in known_schemes() if s not in ("broken", "none")][-3:] == ["fsspec+...", "tier+...", "tape"]
    storage = resolve("tape://one/step")
    storage.publish("catalog", b"x")
    assert (plugin / "one" / "step" / "catalog").read_bytes() == b"x"
    assert type(resolve("s3://bucket/x")).__name__ == "ObjectStorage", "built-in schemes cannot be taken over"


def test_the_writer_process_finds_it_too(plugin: Path) -> None:
    bytecheckpoint.configure(writer="process")
    world_of(current()).resources.helper().stop()  # an earlier test's process does not know the package
    check_save("tape://one/step", 3, async_checkpoint=True)
    assert (plugin / "one" / "step" / "metadata.parquet").exists()


@pytest.mark.parametrize(("scheme", "words"), [("broken", "cannot be imported"), ("none", "no bytecheckpoint Storage")])
@pytest.mark.usefixtures("plugin")
def test_a_broken_package_is_named(scheme: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"tape_backend.* of tape-backend .*{words}"):
        resolve(f"{scheme}://x")


def test_a_whole_bucket_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    assert resolve("s3://bucket").url == resolve("S3://bucket/").url == "s3://bucket"
    assert resolve("s3://bucket/a/b/").url == "s3://bucket/a/b"


@pytest.mark.parametrize("url", ["s3://key:SECRET@bucket/x", "az://c/x?sig=SECRET", "tier+s3://key:SECRET@bucket/x"])
def test_no_secret_of_a_url_is_shown(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by the command line nor by a save or load that fails."""
    caplog.set_level(0)
    for words in (["ls", url], ["inspect", url], ["verify", url], ["diff", url, url], ["repair", url],
                  ["export", url, str(tmp_path / "out")]):  # fmt: skip
        assert run(words) == 2
    for call in (
        lambda: bytecheckpoint.save(url, states(step=1)),
        lambda: bytecheckpoint.save(url, states(step=1), async_checkpoint=True).result(60),
        lambda: load_step(url),
        lambda: bytecheckpoint.open(url),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert "SECRET" not in repr(raised.value)
    assert "SECRET" not in caplog.text + "".join(capfd.readouterr())
