"""How much memory is free, read from fake trees of the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.engine.memory import FreeMemory, free_memory

_MIB = 1 << 20
_V1_MOUNT = "36 31 0:31 {root} {point} rw,nosuid - cgroup cgroup rw,memory"
_V2_MOUNT = "41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw"


class _Machine:
    """A folder with the kernel's files."""

    def __init__(self, root: Path, available: int | None = 1000) -> None:
        self.root = root
        self._mounts: list[str] = []
        self._paths: list[str] = []
        if available is not None:
            self._write("proc/meminfo", f"MemTotal: 4096000 kB\nMemFree: 1 kB\nMemAvailable: {available << 10} kB\n")

    def _write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, *paths: str) -> None:
        self._write("proc/self/cgroup", "".join(f"{path}\n" for path in paths))

    def mounts(self, *lines: str) -> None:
        other = r"10 31 0:28 / /mnt/with\040space rw - tmpfs tmpfs rw,mode=755"
        self._write("proc/self/mountinfo", "".join(f"{line}\n" for line in (other, *lines)))

    def v1(self, folder: str, limit: int, used: int, *, cache: int = 0, shmem: int = 0) -> None:
        self._write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{folder}/memory.usage_in_bytes", f"{used * _MIB}\n")
        half = cache * _MIB // 2
        stat = f"active_file 0\ntotal_cache {(cache + shmem) * _MIB}\ntotal_shmem {shmem * _MIB}\n"
        self._write(f"{folder}/memory.stat", f"{stat}total_inactive_file {half}\ntotal_active_file {half}\n")

    def v2(self, folder: str, limit: str, used: int, *, cache: int = 0, high: str = "max") -> None:
        self._write(f"{folder}/memory.max", f"{limit}\n")
        self._write(f"{folder}/memory.high", f"{high}\n")
        self._write(f"{folder}/memory.current", f"{used * _MIB}\n")
        half = cache * _MIB // 2
        self._write(f"{folder}/memory.stat", f"anon 5\ninactive_file {half}\nactive_file {half}\nfile {cache * _MIB}\n")

    def free(self) -> tuple[int, str]:
        """Return the free MiB and what limits them."""
        free = free_memory(self.root)
        return free.nbytes // _MIB, free.source.removeprefix(f"{self.root}/")


@pytest.fixture
def machine(tmp_path: Path) -> _Machine:
    return _Machine(tmp_path)


def test_a_machine_without_cgroups(machine: _Machine) -> None:
    assert machine.free() == (1000, "this machine")


def test_no_file_means_no_limit(tmp_path: Path) -> None:
    assert free_memory(tmp_path).nbytes >= 1 << 60


def test_version_1(machine: _Machine) -> None:
    machine.process("5:cpu:/elsewhere", "4:memory:/job")
    machine.mounts(_V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"))
    machine.v1("sys/fs/cgroup/memory", 9223372036854771712, 3000)
    machine.v1("sys/fs/cgroup/memory/job", 700 * _MIB, 500)
    assert machine.free() == (200, "sys/fs/cgroup/memory/job")


def test_page_cache_is_free_and_shared_memory_is_not(machine: _Machine) -> None:
    machine.process("4:memory:/job")
    machine.mounts(_V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"))
    machine.v1("sys/fs/cgroup/memory/job", 700 * _MIB, 690, cache=300, shmem=100)
    assert machine.free()[0] == 310


def test_a_job_of_slurm_is_limited_by_an_ancestor(machine: _Machine) -> None:
    top, job = "sys/fs/cgroup", "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    machine.process("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_3")
    machine.mounts(_V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2(f"{top}/system.slice", "max", 900)
    machine.v2(job, str(800 * _MIB), 750, cache=200)
    machine.v2(f"{job}/step_0", str(900 * _MIB), 750, cache=200)
    machine.v2(f"{job}/step_0/user", "max", 750)
    machine.v2(f"{job}/step_0/user/task_3", "max", 100)
    assert machine.free() == (250, job)


def test_the_machine_may_have_less_than_the_cgroup(machine: _Machine) -> None:
    machine.process("0::/job")
    machine.mounts(_V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup/job", str(5000 * _MIB), 100)
    assert machine.free() == (1000, "this machine")


def test_a_container_sees_its_own_cgroup_as_the_root(machine: _Machine) -> None:
    machine.process("0::/")
    machine.mounts(_V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup", str(300 * _MIB), 100)
    assert machine.free()[0] == 200


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/", "/../../elsewhere", "/docker/abcdef", "/other"])
def test_a_container_that_mounts_a_part_of_the_tree(machine: _Machine, path: str) -> None:
    machine.process(f"4:memory:{path}")
    machine.mounts(_V1_MOUNT.format(root="/docker/abc", point="/sys/fs/cgroup/memory"))
    machine.v1("sys/fs/cgroup/memory", 300 * _MIB, 100)
    assert machine.free()[0] == 200


def test_both_versions_at_once(machine: _Machine) -> None:
    machine.process("4:cpu,memory:/job", "0::/user.slice")
    machine.mounts(
        _V1_MOUNT.format(root="/", point=r"/sys/fs/the\040memory"), _V2_MOUNT.format(root="/", point="/sys/fs/unified")
    )
    machine.v1("sys/fs/the memory/job", 400 * _MIB, 100)
    machine._write("sys/fs/unified/user.slice/cgroup.procs", "1\n")
    assert machine.free() == (300, "sys/fs/the memory/job")
    machine.v2("sys/fs/unified/user.slice", str(50 * _MIB), 40)
    assert machine.free() == (10, "sys/fs/unified/user.slice")


def test_memory_beyond_high_is_throttled(machine: _Machine) -> None:
    machine.process("0::/job")
    machine.mounts(_V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup/job", str(500 * _MIB), 100, high=str(300 * _MIB))
    assert machine.free()[0] == 200


def test_a_full_cgroup_has_nothing_free(machine: _Machine) -> None:
    machine.process("0::/job")
    machine.mounts(_V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup/job", str(100 * _MIB), 120)
    assert machine.free()[0] == 0


def test_this_machine() -> None:
    free = free_memory()
    assert isinstance(free, FreeMemory)
    assert 0 < free.nbytes < 1 << 50
