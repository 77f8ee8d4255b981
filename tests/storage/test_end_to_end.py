"""Whole saves and loads on object stores, HDFS and in memory: every mode, every layout, servers that die on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import resolve
from tests.servers.fault_proxy import FaultProxy, Request, asks, fault_proxy
from tests.servers.s3 import S3Server, versitygw
from tests.servers.tcp_proxy import Line, TcpProxy, tcp_proxy
from tests.storage.checks import check_outage
from tests.storage.conftest import use
from tests.support.coded import load_step, whole
from tests.support.modes import MODES
from tests.support.mounts import small_tmpfs
from tests.support.processes import run_program
from tests.support.ranks import succeeded
from tests.support.saves import ROWS, load, save
from tests.support.variants import crossed, quick

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]
EVERY_S3_SERVER = True


@pytest.mark.parametrize(
    ("mode", "writer", "pool"),
    quick(
        [
            ("sync", "process", "whole"),
            *((m, w, p) for m in ("async", "background") for w in ("process", "thread") for p in ("whole", "ring")),
        ],
        every=5,
    ),
)
def test_save_replace_and_load_at_another_layout(root: str, mode: str, writer: str, pool: str) -> None:
    bytecheckpoint.configure(writer=writer, chunk_bytes=1 << 20, staging_bytes=4 << 20 if pool == "ring" else 0)
    path = f"{root}/step"
    succeeded(save(path, 1, world=2, **MODES[mode]))
    assert load(path, 3) == {1}
    before = {name for name, _ in resolve(path).list()}
    succeeded(save(path, 2, world=2, **MODES[mode]))
    assert load(path, 1) == {2}
    after = {name for name, _ in resolve(path).list()}
    assert before & after == {"metadata.parquet"} and len(before) == len(after), "old files are gone"
    assert run(["verify", path]) == 0
    with bytecheckpoint.open(path) as checkpoint:
        rows = checkpoint["model/w"][ROWS // 2 - 3 : ROWS // 2 + 3]
        assert torch.equal(rows, whole(2, 0, ROWS)[ROWS // 2 - 3 : ROWS // 2 + 3])


def test_the_command_line_takes_urls(anywhere: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = anywhere
    for step in (1, 2):
        succeeded(save(f"{root}/step_{step}", step, rows=24))
    assert run(["ls", root]) == 0
    listed = capsys.readouterr().out
    assert "step_1" in listed and "step_2" in listed and listed.count("committed") == 2
    assert run(["ls", f"{root}/step_1"]) == 0
    assert run(["inspect", f"{root}/step_1", "model/*"]) == 0
    assert "model/w" in capsys.readouterr().out
    assert run(["diff", f"{root}/step_1", f"{root}/step_1"]) == 0
    assert run(["diff", f"{root}/step_1", f"{root}/step_2"]) == 1
    assert run(["export", f"{root}/step_1", str(tmp_path / "hf")]) == 0
    exported = (tmp_path / "hf" / "model.safetensors").read_bytes()
    for options, code in (([], 0), ([], 2), (["--force"], 0), (["--force", "--max-shard-size", "7700B"], 0)):
        assert run(["export", f"{root}/step_1", f"{root}/exported", *options]) == code
        found = resolve(f"{root}/exported")
        if "--max-shard-size" not in options:
            assert found.list() == [("model.safetensors", len(exported))]
            assert found.read("model.safetensors") == exported
    assert [name for name, _ in found.list()] == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"
    ]  # fmt: skip
    assert run(["export", f"{root}/step_1", f"{root}/step_2", "--force"]) == 2, "no checkpoint is exported into"
    resolve(f"{root}/step_2").delete(["metadata.parquet"])
    assert run(["ls", f"{root}/step_2"]) == 2
    assert run(["repair", f"{root}/step_2"]) == 0
    assert run(["verify", f"{root}/step_2"]) == 0
    assert load_step(f"{root}/step_2") == 2
    assert run(["ls", f"{root}/absent"]) == 2


def test_a_damaged_object_is_found(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    succeeded(save(f"{root}/step", 1, rows=24))
    storage = resolve(f"{root}/step")
    (name,) = [n for n, _ in storage.list() if n.startswith("model/rank")]
    data = bytearray(storage.read(name))
    data[5000] ^= 1
    storage.publish(name, bytes(data))
    with pytest.raises(bytecheckpoint.CorruptCheckpointError, match="checksum mismatch"):
        load_step(f"{root}/step")
    assert run(["verify", f"{root}/step"]) == 1
    storage.publish(name, bytes(data[:-1]))
    with pytest.raises(bytecheckpoint.CorruptCheckpointError, match="the catalog says"):
        load_step(f"{root}/step")
    storage.delete([name])
    with pytest.raises(bytecheckpoint.CorruptCheckpointError, match="missing"):
        load_step(f"{root}/step")


# --- servers that die -------------------------------------------------------------------------------------------------


@pytest.fixture
def between(mortal: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with fault_proxy(mortal.endpoint) as made:
        use(monkeypatch, mortal.environment(made.endpoint))
        yield made


def at(word: str) -> Callable[[Request], bool]:
    """Return a predicate: requests whose method and path hold `word`."""
    return lambda request: word in f"{request.method} {request.path}"


@pytest.mark.parametrize(
    ("moment", "mode"),
    crossed(
        ["HEAD", "partNumber=2", "POST /bucket/step/model", "/optimizer/rank", "PUT /bucket/step/metadata", "delete"],
        list(MODES),
    ),
)
def test_a_server_killed_during_a_save_and_started_again(
    mortal: S3Server, between: FaultProxy, mode: str, moment: str
) -> None:
    succeeded(save("s3://bucket/step", 1))
    rule = between.add(at(moment), before=lambda: mortal.server.kill_for(1.5))
    succeeded(save("s3://bucket/step", 2, **MODES[mode]))
    assert rule.hits == 1
    assert load("s3://bucket/step", 2) == {2}
    assert run(["verify", "s3://bucket/step"]) == 0


@pytest.mark.parametrize(
    ("moment", "mode"),
    crossed(["HEAD", "PUT /bucket/step/model/rank-00001", "PUT /bucket/step/metadata"], list(MODES)),
)
def test_a_server_killed_during_a_save_that_stays_away(
    mortal: S3Server, between: FaultProxy, mode: str, moment: str
) -> None:
    succeeded(save("s3://bucket/step", 1, world=2))
    between.add(at(moment), before=mortal.server.kill)
    check_outage("s3://bucket/step", mode, mortal.server.start)


def test_a_server_killed_during_a_load_and_started_again(mortal: S3Server, between: FaultProxy) -> None:
    succeeded(save("s3://bucket/step", 1, world=2))
    rule = between.add(asks("GET", "/model/rank-00001"), before=lambda: mortal.server.kill_for(1.5))
    assert load("s3://bucket/step", 3) == {1}
    assert rule.hits == 1


def test_a_server_killed_during_a_load_that_stays_away(mortal: S3Server, between: FaultProxy) -> None:
    succeeded(save("s3://bucket/step", 1, world=2))
    bytecheckpoint.configure(storage_timeout=3.0)
    between.add(asks("GET", "/model/rank-00001"), before=mortal.server.kill)
    with pytest.raises(
        StorageUnavailableError, match=r"cannot (read|open) s3://bucket/step/\w+/rank-0000\d.*attempt \d+"
    ):
        load_step("s3://bucket/step", rows=ROWS)


def test_a_load_that_meets_a_replacement_starts_again(mortal: S3Server, between: FaultProxy) -> None:
    """There is no open file that keeps the old objects alive."""
    succeeded(save("s3://bucket/step", 1))
    rule = between.add(asks("GET", "/model/rank"), before=lambda: succeeded(save("s3://bucket/step", 2)))
    assert load_step("s3://bucket/step", rows=ROWS) == 2
    assert rule.hits == 1


def test_a_full_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_tmpfs(tmp_path, "30m", lazy=True):
        server = versitygw(tmp_path)
        server.make_bucket("bucket")
        use(monkeypatch, server.environment())
        bytecheckpoint.configure(storage_timeout=5.0)
        succeeded(save("s3://bucket/step", 1, rows=1000))
        (raised,) = save("s3://bucket/step", 2, rows=4 * ROWS)
        assert isinstance(raised, StorageError) and "s3://bucket/step" in str(raised)
        assert isinstance(raised, StorageFullError | StorageUnavailableError)
        assert load_step("s3://bucket/step", rows=1000) == 1
        server.server.stop()


# --- slow and broken lines --------------------------------------------------------------------------------------------


@pytest.fixture
def line(mortal: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    with tcp_proxy(mortal.endpoint.removeprefix("http://")) as proxy:
        use(monkeypatch, mortal.environment(f"http://{proxy.address}"))
        yield proxy


@pytest.mark.parametrize(
    ("direction", "limits"),
    [("down", {"delay": 0.1}), ("up", {"rate": 20e6}), ("down", {"piece": 1000, "delay": 0.00001})],
    ids=["latency", "bandwidth", "small pieces"],
)
def test_a_slow_line(line: TcpProxy, direction: str, limits: dict[str, float]) -> None:
    setattr(line, direction, Line(**limits))  # type: ignore[arg-type]
    succeeded(save("s3://bucket/step", 1, rows=5000, async_checkpoint=True))
    assert load_step("s3://bucket/step", rows=5000) == 1


@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize(("direction", "cut"), [("up", 300), ("down", 1), ("down", 1000)])
def test_a_line_that_breaks_for_a_while(line: TcpProxy, direction: str, cut: int, what: str) -> None:
    succeeded(save("s3://bucket/step", 1))
    broken: Line = getattr(line, direction)
    broken.cut = cut
    threading.Timer(1.5, setattr, [broken, "cut", 0]).start()
    if what == "save":
        succeeded(save("s3://bucket/step", 2))
    assert load_step("s3://bucket/step", rows=ROWS) == (2 if what == "save" else 1)


def test_a_line_that_swallows_everything(line: TcpProxy) -> None:
    succeeded(save("s3://bucket/step", 1, rows=24))
    line.up.swallow = True
    bytecheckpoint.configure(storage_timeout=4.0)
    with pytest.raises(StorageUnavailableError, match=r"s3://bucket/step.*no answer in time.*attempt"):
        load_step("s3://bucket/step")
    (raised,) = save("s3://bucket/step", 2, rows=24)
    assert isinstance(raised, StorageUnavailableError)
    line.up.swallow = False
    assert load_step("s3://bucket/step") == 1


_SAVE_AND_LEAVE = """
import sys
import bytecheckpoint
from tests.support.coded import states

path, writer, staging = sys.argv[1:]
bytecheckpoint.configure(writer=writer)
for step in (1, 2):
    bytecheckpoint.save(f"{path}/{step}", states(step=step, rows=20_000), async_checkpoint=True, staging=staging)
"""


@pytest.mark.parametrize(
    ("root", "staging", "writer"),
    crossed(["s3", "az", "hdfs", "mem"], ["blocking", "background"], ["process", "thread"]),
    indirect=["root"],
)
def test_saves_in_flight_finish_when_the_program_ends(root: str, writer: str, staging: str) -> None:
    done = run_program(_SAVE_AND_LEAVE, root, writer, staging)
    assert (done.returncode, done.stderr) == (0, "")
    assert {load_step(f"{root}/{step}", rows=ROWS) - step for step in (1, 2)} == {0}


def test_nothing_there(root: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=root):
        load_step(f"{root}/step")
    assert resolve(root).list() == []
