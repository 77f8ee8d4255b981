"""Storages against a model, a dictionary: hypothesis looks for steps after which the two differ."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from bytecheckpoint.errors import StorageConflictError
from bytecheckpoint.storage import FileWriter, NewFile, resolve
from bytecheckpoint.storage.testing import content

FOLDERS = ("", "model/", "extra/")
CATALOGS = ("metadata.parquet", "model/index")

#: Which of two storage objects of the same URL makes a call.
instances = st.integers(0, 1)
catalogs = st.sampled_from(CATALOGS)
sizes = st.sampled_from([0, 1, 100, 4096, 5000])


class _OpenFile:
    """A file that is being written, and what it will contain."""

    def __init__(self, name: str, data: np.ndarray[Any, Any], writer: FileWriter) -> None:
        self.name, self.data, self.writer = name, data, writer


class StorageMachine(RuleBasedStateMachine):
    """Two storage objects of one folder, and the files that it should contain."""

    writers = Bundle("writers")
    versions = Bundle("versions")

    def __init__(self, make_url: Callable[[], str]) -> None:
        super().__init__()
        url = make_url()
        self.storages = [resolve(url), resolve(url)]
        self.model: dict[str, bytes] = {}
        self.unfinished: list[_OpenFile] = []
        self.created = 0

    # --- files ------------------------------------------------------------------------------------------------

    @rule(target=writers, instance=instances, folder=st.sampled_from(FOLDERS), size=sizes, stable=st.booleans())
    def create(self, instance: int, folder: str, size: int, stable: bool) -> _OpenFile:
        self.created += 1
        name = f"{folder}file-{self.created}"
        writer = self.storages[instance].create(NewFile(name, size, stable=stable))
        self.unfinished.append(_OpenFile(name, content(size, self.created), writer))
        return self.unfinished[-1]

    @rule(file=consumes(writers), pieces=st.integers(1, 3))
    def write_and_finish(self, file: _OpenFile, pieces: int) -> None:
        size = len(file.data)
        bounds = [size * number // pieces for number in range(pieces + 1)]
        for start, stop in reversed(list(itertools.pairwise(bounds))):
            if stop > start:
                file.writer.write_at(start, [memoryview(file.data)[start:stop]])
        file.writer.finish(size)
        self.unfinished.remove(file)
        self.model[file.name] = file.data.tobytes()

    @rule(file=consumes(writers), written=st.booleans())
    def abort(self, file: _OpenFile, written: bool) -> None:
        if written and len(file.data):
            file.writer.write_at(0, [memoryview(file.data)])
        file.writer.abort()
        self.unfinished.remove(file)

    @rule(instance=instances, data=st.data())
    def read_range(self, instance: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model) or ["absent"]))
        storage = self.storages[instance]
        if name not in self.model:
            with pytest.raises(FileNotFoundError):
                storage.open(name)
            return
        expected = self.model[name]
        start, length = data.draw(st.integers(0, 6000)), data.draw(st.integers(0, 6000))
        reader = storage.open(name)
        out = bytearray(length)
        assert reader.size == len(expected) and reader.match_size(len(expected))
        count = reader.read_into(start, [memoryview(out)])
        reader.close()
        assert bytes(out[:count]) == expected[start : start + length]
        assert not any(out[count:])

    # --- commits ----------------------------------------------------------------------------------------------

    @rule(target=versions, instance=instances, name=catalogs)
    def version(self, instance: int, name: str) -> tuple[str, str, bytes | None]:
        """Remember a version together with the content that it stands for."""
        return name, self.storages[instance].version(name), self.model.get(name)

    @rule(instance=instances, version=versions, data=st.binary(max_size=20))
    def publish(self, instance: int, version: tuple[str, str, bytes | None], data: bytes) -> None:
        name, expected, seen = version
        before = self.storages[1 - instance].version(name)
        if before == expected:
            assert self.model.get(name) == seen, "one version, two contents"
            self.storages[instance].publish(name, data, expected=expected)
            self.model[name] = data
            return
        with pytest.raises(StorageConflictError):
            self.storages[instance].publish(name, data, expected=expected)

    @rule(instance=instances, name=catalogs, data=st.binary(max_size=20))
    def publish_over_any(self, instance: int, name: str, data: bytes) -> None:
        self.storages[instance].publish(name, data)
        self.model[name] = data

    # --- names ------------------------------------------------------------------------------------------------

    @rule(instance=instances, data=st.data())
    def delete(self, instance: int, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from([*sorted(self.model), "absent", "model/absent"]), max_size=4))
        self.storages[instance].delete(names)
        for name in names:
            self.model.pop(name, None)

    @invariant()
    def folder_equals_model(self) -> None:
        unfinished = {file.name for file in self.unfinished}
        for storage in self.storages:
            listed = [(name, size) for name, size in storage.list() if name not in unfinished]
            assert listed == sorted((name, len(data)) for name, data in self.model.items())
            folders = {name.partition("/")[0] for name in self.model if "/" in name}
            assert folders <= set(storage.folders())

    @rule(instance=instances)
    def every_file_is_as_written(self, instance: int) -> None:
        for name, data in self.model.items():
            assert self.storages[instance].read(name) == data
            assert self.storages[instance].stat(name).size == len(data)

    def teardown(self) -> None:
        for file in self.unfinished:
            file.writer.abort()
        storage = self.storages[0]
        assert [name for name, _ in storage.list()] == sorted(self.model), "aborted files are gone"
        storage.delete(list(self.model))
        assert storage.list() == []


def check(make_url: Callable[[], str], examples: int = 25) -> None:
    """Run the machine on new folders."""
    some = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(lambda: StorageMachine(make_url), settings=some)


def test_local_disk(tmp_path: Path) -> None:
    check(lambda: f"{tmp_path}/{uuid.uuid4().hex}/step", examples=15)  # each step waits for the disk


def test_memory(memory: str) -> None:
    check(lambda: f"{memory}/{uuid.uuid4().hex}")


def test_fsspec_memory() -> None:
    check(lambda: f"fsspec+memory://{uuid.uuid4().hex}/step")
    fsspec.filesystem("memory").store.clear()
