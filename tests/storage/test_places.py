"""The same guarantees on every storage: odd paths, roots, very many files, writers at the same time, bytes read once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageConflictError, StorageError, UsageError
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.monitoring.reading import read_run
from bytecheckpoint.monitoring.report.report import Reporter
from bytecheckpoint.monitoring.report.server import RunView
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing.wrappers import Meter, MeteredStorage
from tests.storage.checks import check_save
from tests.storage.conftest import ANYWHERE
from tests.support.catalogs import catalog_at
from tests.support.coded import load_step, states
from tests.support.layouts import Box, Leaf
from tests.support.metrics import collecting, wait_for_operations
from tests.support.names import ODD_NAMES
from tests.support.ranks import attempt, succeeded
from tests.support.saves import load, save
from tests.support.variants import crossed
from tests.support.versions import Engine, Trainer, fine

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

ROWS = 3000


@pytest.mark.parametrize(
    ("folder", "anywhere"),
    crossed([*ODD_NAMES, "a/b/c", "-", "e\u0301", "*", "l" * 200], ANYWHERE),
    indirect=["anywhere"],
)
def test_paths_of_odd_characters(anywhere: str, folder: str) -> None:
    path = f"{anywhere}/{folder}/step"
    for step in (1, 2):
        bytecheckpoint.save(path, states(step=step), async_checkpoint=step == 2).result(60)
        assert load_step(path) == step == load_step(f"{path}/")
    assert run(["verify", path]) == 0
    assert resolve(f"{anywhere}/{folder}").folders() == ["step"]
    assert load_step(resolve(path).url) == 2


def test_versions_are_published_and_followed(anywhere: str) -> None:
    trainer = Trainer(f"{anywhere}/versions", 2)
    engine = Engine(trainer.model, f"{anywhere}/versions", 3, 1)
    for number in range(3):
        fine(trainer.publish())
        assert {report.versions for report in fine(engine.update())} == {int(number > 0)}
        engine.check()
    trainer.end()
    assert run(["verify", f"{anywhere}/versions/step_00000003"]) == 0


def test_slashes(anywhere: str) -> None:
    """Slashes at the end mean nothing; an empty part inside is one place or no place, but never a second one."""
    path = f"{anywhere}/step"
    bytecheckpoint.save(f"{path}//", states(step=1))
    assert load_step(path) == load_step(f"{path}/") == 1
    found = 1
    with contextlib.suppress(UsageError):
        found = load_step(f"{anywhere}//step")
    assert found == 1


@pytest.mark.parametrize("root", ["s3", "hdfs"], indirect=True)
def test_the_root_of_a_bucket_or_cluster(root: str) -> None:
    top = root.rpartition("/")[0]
    for step, path in enumerate((top, f"{top}/"), 1):
        check_save(path, step, async_checkpoint=step == 2)
        assert run(["verify", path]) == 0
    if top.startswith("s3"):
        assert run(["ls", path]) == 0
    names = [file.name for file in catalog_at(top).files]
    resolve(top).delete(["metadata.parquet", *names])  # other tests use the same cluster


def read(url: str, pipe: Any) -> None:
    pipe.send(attempt(lambda: resolve(url).read("x")))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("root", "kind"), [("s3", "an object store"), ("hdfs", "HDFS")], indirect=["root"])
def test_a_fork_is_refused_and_a_new_process_works(root: str, kind: str, method: str) -> None:
    resolve(root).publish("x", b"content")
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=read, args=(root, theirs))
    child.start()
    assert ours.poll(60)
    found = ours.recv()
    child.join(20)
    if method == "fork":
        assert isinstance(found, StorageError) and f"in a fork of a process that has used {kind}" in str(found)
    else:
        assert found == b"content"


def test_two_jobs_that_save_to_one_path(anywhere: str) -> None:
    """The checkpoint of the winner is complete, and the other save raises."""
    path = f"{anywhere}/step"

    def one(step: int) -> Any:
        return save(path, step, rows=ROWS)[0]

    if not resolve(path).capabilities.exclusive_publish:
        pytest.skip("this storage promises less")
    for number in range(3):
        steps = (2 * number + 1, 2 * number + 2)
        with ThreadPoolExecutor(2) as pool:
            got = list(pool.map(one, steps))
        failed = [g for g in got if isinstance(g, Exception)]
        assert all(isinstance(g, CheckpointError) for g in failed), got
        # On HDFS a sub-file may be missed while it is still being written.
        raised_conflicts = [isinstance(g, StorageConflictError) or "somebody has removed it" in str(g) for g in failed]
        assert len(failed) <= 1 and all(raised_conflicts), got
        assert run(["verify", path]) == 0
        assert load_step(path, rows=ROWS) in steps


#: Part of the bytes that ranks may read twice where they want neighbouring rows: the blocks at the borders.
BORDERS = 0.04


def test_a_load_reads_only_blocks_at_borders_twice(anywhere: str) -> None:
    """All ranks together read every stored byte once, sharded or replicated."""
    path = f"{anywhere}/step"
    succeeded(save(path, 1, world=2))
    sizes = sum(size for name, size in resolve(path).list() if "/" in name)
    for world in (1, 2, 3, 4):
        meter = Meter()
        assert load(MeteredStorage(resolve(path), meter), world) == {1}
        # What is small and wanted by all (plain values) each rank may read for itself.
        spare = (world - 1) * 64_000 + BORDERS * sizes
        assert 0.95 * sizes < meter.bytes("read_into") <= sizes + spare, f"{meter.bytes('read_into')} of {sizes}"
        assert meter.bytes("write") == 0


SHAPE = (2000, 600)
#: Which box of a tensor of this shape a rank wants, by rank and world size.
LAYOUTS: dict[str, Callable[[int, int], Box]] = {
    "replicated": lambda rank, world: ((0, 0), SHAPE),
    "halves, each replicated": lambda rank, world: ((rank % 2 * 1000, 0), (1000, 600)),
    "columns": lambda rank, world: ((0, 600 * rank // world), (2000, 600 * (rank + 1) // world - 600 * rank // world)),
}


def test_a_load_reads_replicas_and_columns_once(anywhere: str) -> None:
    """Replicas together read what one of them would, and so do ranks whose columns lie between one another's."""
    path = f"{anywhere}/step"
    whole = torch.arange(2000 * 600, dtype=torch.float32).reshape(SHAPE)
    tensors = {f"layer.{number}": whole + number for number in range(6)}
    bytecheckpoint.save(path, {"model": dict(tensors)})
    sizes = dict(resolve(path).list())
    total = sum(size for name, size in sizes.items() if name.startswith("model/"))
    for world in (1, 2, 3, 4):
        for layout, box_of in LAYOUTS.items():
            meter = Meter()

            def one(collective: Collective, box_of: Any = box_of, meter: Meter = meter) -> None:
                box = box_of(collective.rank, collective.world_size)
                states = {name: Leaf(SHAPE, [box]).fill(torch.full(SHAPE, -1.0), False) for name in tensors}
                bytecheckpoint.load(MeteredStorage(resolve(path), meter), {"model": states})
                for name, leaf in states.items():
                    leaf.check(tensors[name])

            ThreadWorld(world).run(one, timeout=120)
            part = 0.5 if world == 1 and layout.startswith("halves") else 1.0
            # Whole blocks are read: a rank that is alone may want half of each chunk. Where both halves meet in a chunk,
            # replicas of one half may read it each for themselves.
            spare = 8 << 20 if part < 1 else 0.15 * total if layout.startswith("halves") else 0
            read = meter.bytes("read_into") - world * sizes[CATALOG_NAME]
            assert 0.95 * part * total < read <= part * total + spare, f"{layout}, {world} ranks: {read} of {total}"


def test_a_part_of_a_tensor_takes_that_part_of_its_bytes(anywhere: str) -> None:
    path = f"{anywhere}/step"
    whole = torch.arange(1 << 22, dtype=torch.float32).reshape(64, -1)
    bytecheckpoint.save(path, {"model": {"w": whole}})
    storage = MeteredStorage(resolve(path))
    with bytecheckpoint.open(storage) as checkpoint:
        assert torch.equal(checkpoint["model/w"][5:6], whole[5:6])
    assert storage.meter.bytes("read_into") <= 3 << 20


def test_metrics_lie_beside_the_run(anywhere: str) -> None:
    with collecting():
        for step in (1, 2):
            succeeded(save(f"{anywhere}/run/step_{step:08d}", step, world=2, rows=ROWS))
        load(f"{anywhere}/run/step_00000002", world=1, rows=ROWS)
        found = wait_for_operations(f"{anywhere}/run", 3)
    assert sorted(table["step"][0].as_py() for table in found) == [1, 2, 2]
    assert len(read_run(f"{anywhere}/run").records) == 3
    assert run(["measure", f"{anywhere}/run", "--size", "8MiB", "--threads", "2"]) == 0
    assert len(read_run(f"{anywhere}/run").limits) == 1
    assert run(["report", f"{anywhere}/run"]) == 0
    shown = RunView(f"{anywhere}/run", Reporter())
    assert not shown.news()["error"] and len(json.loads(shown.data())["operations"]) == 3
    assert resolve(f"{anywhere}/run").folders() == [METRICS_FOLDER, "step_00000001", "step_00000002"]
