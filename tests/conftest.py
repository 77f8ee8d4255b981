"""Settings of every test run: threads, hypothesis profiles, worlds of processes, parallel workers, accelerators."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.worlds import Worlds

# Set before anything imports torch, and inherited by every child process: many ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Thousands of saves would each write a file of metrics. tests/monitoring turns them on.
os.environ.setdefault("BYTECHECKPOINT_METRICS", "off")
# Tests start hundreds of processes; compiling torch's sources anew in each of them costs seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline per example: pytest's time limit covers the test, and one slow example on a busy machine is no failure.
settings.register_profile("default", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("full", parent=settings.get_profile("default"), max_examples=50)  # of `make test-all`
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.register_profile("quick", parent=settings.get_profile("default"), max_examples=5, phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_GPU_TESTS = f"{Path(__file__).parent / 'gpu'}/"

# What one parallel worker runs as a unit. By default that is a file, because the tests of a file share its fixtures.
#: Files that share a costly fixture: the pool of worlds, or an HDFS cluster. The unit's name -> how the paths begin.
_SHARED_UNITS = {
    "worlds": ("tests/distributed/",),
    "interchange": ("tests/frameworks/interchange/",),
    "hdfs": tuple(f"tests/storage/test_{name}.py" for name in ("hdfs", "hdfs_commit", "hdfs_contact", "leaks")),
    "places": tuple(
        f"tests/storage/test_{name}.py" for name in ("frameworks", "manager", "places", "tiers_on_servers", "worlds")
    ),
}
#: Files whose tests share nothing: any worker may run any of their tests.
_SINGLE_TESTS = (
    "tests/benchmarks/",
    "tests/collectives/test_mesh.py",
    "tests/collectives/test_torch_world.py",
    "tests/faults/test_kill.py",
    "tests/monitoring/test_sinks.py",
    "tests/packaging/test_extras.py",
    "tests/storage/test_local_faults.py",
    "tests/storage/test_object_contact.py",
    "tests/tiers/test_cooldown.py",
    "tests/tiers/test_cooldown_beside.py",
    "tests/tiers/test_machines.py",
)
#: The longest units start first, so that no worker is alone with one at the end.
_FIRST = (
    *_SHARED_UNITS["worlds"],
    *_SHARED_UNITS["hdfs"],
    "tests/storage/test_hdfs_faults.py",
    "tests/storage/test_end_to_end.py",
    "tests/manager/test_launchers.py",
    *_SHARED_UNITS["places"],
    "tests/frameworks/test_world.py",
    "tests/faults/",
    "tests/tiers/",
    "tests/collectives/",
)


_POOL = pytest.StashKey[Worlds]()


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """The pool of process worlds of this run."""
    pool = request.config.stash[_POOL] = Worlds(tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the worlds of a folder after its tests: of an idle rank, gloo wakes a thread per group 100 times a second."""
    pool = item.config.stash.get(_POOL, None)
    if pool is not None and (nextitem is None or nextitem.path.parent != item.path.parent):
        pool.close()


@pytest.fixture(autouse=True)
def restored_settings() -> Iterator[None]:
    """Undo what a test configures, so that no other test depends on the order."""
    from tests.support.settings import using  # imports torch, which pytest's own process need not do

    with using():
        yield


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a test saves a checkpoint."""
    return str(tmp_path / "step")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the modules and thousands of tests out of every collection of garbage."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.freeze()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that `on_ranks` marks on the ranks of a world, instead of here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    size, timeout = mark.args
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    number = size if isinstance(size, int) else size(**arguments)
    pyfuncitem.funcargs["worlds"].run(number, pyfuncitem.function, *arguments.values(), timeout=timeout)
    return True


@pytest.hookimpl(optionalhook=True)  # unknown to pytest where pytest-xdist is not installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole units to parallel workers, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(_SINGLE_TESTS):
                return nodeid
            shared = (unit for unit, paths in _SHARED_UNITS.items() if nodeid.startswith(paths))
            return next(shared, nodeid.split("::", maxsplit=1)[0])

    config.option.loadscopereorder = False
    return UnitScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for parallel workers; mark tests/gpu, and skip what needs an accelerator where there is none."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: next((n for n, path in enumerate(_FIRST) if item.nodeid.startswith(path)), len(_FIRST))
        )
    for item in items:
        if str(item.path).startswith(_GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if torch.accelerator.is_available():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="NOT TESTED HERE: needs an accelerator, torch.accelerator finds none"))
