"""Another program overwrites foreign files, which have no seal, while they are read: nothing of two saves is mixed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine import catalogs
from bytecheckpoint.engine.catalogs import CatalogReader
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointReplacedError
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import adoption


def values(number: int) -> dict[str, torch.Tensor]:
    """Tensors of one save; in files of the same size they lie in another order in each."""
    names = ["a", "b", "c"]
    return {name: torch.full((64, 16), 10.0 * number + names.index(name)) for name in names[number:] + names[:number]}


def as_safetensors(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    for shard, names in (("1", "ab"), ("2", "c")):  # the second shard comes later
        save_file({name: values(number)[name] for name in names}, folder / f"model-{shard}.safetensors")
    index = {"weight_map": {name: f"model-{1 + (name == 'c')}.safetensors" for name in "abc"}}
    (folder / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))


def as_dcp(folder: Path, number: int) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it overwrites, and has no process group
        dcp.save({"model": values(number)}, checkpoint_id=folder, no_dist=True)


def as_torch(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(values(number), folder / "model.pt")


def touched(folder: Path) -> None:
    """Times differ, also where two writes follow each other faster than the clock of the file system ticks."""
    for path in folder.iterdir():
        os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)


def overwriting(write: Callable[[Path, int], None], folder: Path, original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the original function; the first call overwrites the checkpoint before that returns."""
    left = [1]

    def call(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        while left:
            left.pop()
            write(folder, 1)
            touched(folder)
        return result

    return call


FORMATS = pytest.mark.parametrize("write", [as_safetensors, as_dcp, as_torch])


@FORMATS
def test_an_open_checkpoint(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    folder = tmp_path / "m"
    write(folder, 0)
    with bytecheckpoint.open(folder) as found:
        (a,) = [name for name in found if str(name).endswith("a")]
        assert found[a][:].unique().tolist() == [0.0]
        write(folder, 1)
        touched(folder)
        with pytest.raises(CheckpointReplacedError, match=rf"wrote to {folder}/\S+ while"):
            found[a][:]
    with bytecheckpoint.open(folder) as found:
        assert found[a][:].unique().tolist() == [10.0]


@FORMATS
@pytest.mark.parametrize("place", [FileSet, CatalogReader])
def test_a_load_starts_again(
    tmp_path: Path, write: Callable[[Path, int], None], place: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first read of tensors, and between the index and that."""
    folder, name = tmp_path / "m", "fetch" if place is FileSet else "__init__"
    write(folder, 0)
    monkeypatch.setattr(place, name, overwriting(write, folder, getattr(place, name)))
    state = {name: torch.zeros(64, 16) for name in "abc"}
    bytecheckpoint.load(folder, {"model": state})
    assert all(torch.equal(state[name], values(1)[name]) for name in "abc")


@FORMATS
def test_ranks_that_use_the_index_of_another(
    tmp_path: Path, write: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on object stores: rank 0 reads the index, and the others open files that were overwritten meanwhile."""
    folder = tmp_path / "m"
    write(folder, 0)
    monkeypatch.setattr(CatalogReader, "head", overwriting(write, folder, CatalogReader.head))

    for mine in ThreadWorld(3).run(partial(load_one, folder), timeout=90):
        assert all(torch.equal(tensor, values(1)[name]) for name, tensor in mine.items())


def load_one(folder: Path, collective: Collective) -> dict[str, torch.Tensor]:
    """Load one tensor of three on each rank from a storage that is far away."""
    storage = resolve(str(folder))
    storage.capabilities = replace(storage.capabilities, shared=True, page_cache=False)
    mine = {"abc"[collective.rank]: torch.zeros(64, 16)}
    bytecheckpoint.load(storage, {"model": mine}, strict=False, timeout=60)
    return mine


@FORMATS
def test_each_rank_decodes_the_index_once(
    tmp_path: Path, write: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m", 0)
    decoded, decode = [], catalogs.decode
    monkeypatch.setattr(catalogs, "decode", lambda data: decoded.append(data) or decode(data))
    for mine in ThreadWorld(3).run(partial(load_one, tmp_path / "m"), timeout=90):
        assert all(torch.equal(tensor, values(0)[name]) for name, tensor in mine.items())
    assert len(decoded) == 3


@FORMATS
def test_adopt_refuses(tmp_path: Path, write: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    write(folder, 0)
    monkeypatch.setattr(adoption, "read_catalog", overwriting(write, folder, adoption.read_catalog))
    with pytest.raises(CheckpointReplacedError, match="wrote to"):
        adoption.adopt(folder, tmp_path / "adopted")
    assert not (tmp_path / "adopted" / "metadata.parquet").exists()


def test_a_file_removed_when_all_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer removes its old checkpoint: what was read of it before is whole."""
    as_torch(tmp_path, 0)
    original = FileSet.check_unchanged

    def check(self: FileSet, *args: Any) -> None:
        if "model.pt" in {self.catalog.files[file].name for file in self._users}:
            (tmp_path / "model.pt").unlink(missing_ok=True)
        original(self, *args)

    monkeypatch.setattr(FileSet, "check_unchanged", check)
    state = {name: torch.zeros(64, 16) for name in "abc"}
    bytecheckpoint.load(tmp_path, {"model": state})
    assert all(torch.equal(state[name], values(0)[name]) for name in "abc")
    assert not (tmp_path / "model.pt").exists()
