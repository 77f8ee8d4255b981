"""Damage to every part of every file: a load detects and names it, or it is harmless."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.storage import resolve
from tests.support.catalogs import resealed, with_footer
from tests.support.coded import files_of, load_step, states
from tests.support.ranks import attempt, load_all, save_all, succeeded

CATALOG = "metadata.parquet"
ROWS = 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, with a few hundred bytes in each file. Tests damage copies of it."""
    path = tmp_path_factory.mktemp("sound") / "s"
    ThreadWorld(2).run(lambda c: bytecheckpoint.save(path, states(c.rank, 2, 3, ROWS)))
    assert load_step(path, rows=ROWS) == 3
    return path


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage. A copied folder must load as the original does."""
    return Path(shutil.copytree(sound, tmp_path / "elsewhere" / "renamed"))


def catalog_of(path: Path) -> Catalog:
    return read_catalog(resolve(path))[0]


def refused(path: Path) -> CheckpointError:
    """Return the error of a load by two ranks, which read every byte; fail unless both raise the same CheckpointError."""
    errors = load_all(ThreadWorld(2), path, rows=ROWS)
    for error in errors:
        assert isinstance(error, CheckpointError), f"{error!r}"
        assert "\n" not in str(error)
    assert type(errors[0]) is type(errors[1])
    return errors[0]


def corrupt(path: Path, name: str) -> CorruptCheckpointError:
    """Return the error of a load; fail unless it says that the file `name` is damaged."""
    error = refused(path)
    assert type(error) is CorruptCheckpointError, error
    assert error.file == name and name in str(error), error
    return error


def flips(path: Path, places: range) -> Iterator[int]:
    """Flip one bit at each of `places` in turn, and restore it before the next."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1 << place % 8]))
            file.flush()
            yield place
            file.seek(place)
            file.write(old)
            file.flush()


def check_catalog_flips(damaged: Path, step: int) -> None:
    """Flip a bit in every `step`-th byte of the catalog; fail unless a load and an opening name the file."""
    size = (damaged / CATALOG).stat().st_size
    assert size > 3000
    for place in flips(damaged / CATALOG, range(0, size, step)):
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.parquet") as caught:
            load_step(damaged, rows=ROWS)
        assert caught.value.file == CATALOG
        if place % 90 == 0:
            with pytest.raises(CorruptCheckpointError):
                bytecheckpoint.open(damaged)
    assert load_step(damaged, rows=ROWS) == 3


def test_a_flipped_bit_anywhere_in_the_catalog(damaged: Path) -> None:
    check_catalog_flips(damaged, 5)


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte_of_the_catalog(damaged: Path) -> None:
    check_catalog_flips(damaged, 1)


def check_data_flips(path: Path, step: int) -> None:
    """Flip a bit in every `step`-th byte of data; fail unless a load names the file, the block and the tensor."""
    catalog = catalog_of(path)
    for number, entry in enumerate(catalog.files):
        for place in flips(path / entry.name, range(entry.data_offset + number % step, entry.size, step)):
            error = corrupt(path, entry.name)
            rows = (catalog.file == number) & (catalog.byte_offset <= place)
            rows &= place < catalog.byte_offset + catalog.byte_length
            (touched,) = {str(catalog.key(int(t))) for t in catalog.boxes.tensor[rows]}
            assert error.block == (place - entry.data_offset) // entry.block_bytes
            assert touched in error.tensors
            assert f"block {error.block}" in str(error) and error.tensors[0] in str(error)
    assert load_step(path, rows=ROWS) == 3


def test_a_flipped_bit_in_the_data_of_any_file(damaged: Path) -> None:
    check_data_flips(damaged, 83)


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte_of_data(damaged: Path) -> None:
    check_data_flips(damaged, 1)


def test_a_flipped_bit_in_a_header_is_harmless_to_a_load_and_known_to_the_catalog(damaged: Path) -> None:
    for entry in catalog_of(damaged).files:
        for place in flips(damaged / entry.name, range(0, entry.data_offset, 331)):
            assert load_step(damaged, rows=ROWS) == 3
            header = (damaged / entry.name).read_bytes()[: entry.data_offset]
            assert xxhash.xxh3_64_intdigest(header) != entry.header_sum, f"{entry.name}: no sum covers byte {place}"


def test_the_damaged_block_and_only_its_tensors_are_named(path: Path) -> None:
    saved = {"model": {f"t{i}": torch.full((16384,), float(i)) for i in range(12)}}  # one 64 KiB block each
    bytecheckpoint.save(path, saved)
    (entry,) = [f for f in catalog_of(path).files if "rank-" in f.name]
    for place in flips(path / entry.name, range(entry.data_offset + 7 * 65536, entry.data_offset + 8 * 65536, 9999)):
        with pytest.raises(CorruptCheckpointError) as caught:
            bytecheckpoint.load(path, {"model": {f"t{i}": torch.zeros(16384) for i in range(12)}})
        assert (caught.value.file, caught.value.block) == (entry.name, 7), place
        assert len(caught.value.tensors) == 1
        (name,) = caught.value.tensors
        # What lies in sound blocks still loads.
        others = {key: torch.zeros(16384) for key in saved["model"] if f"model/{key}" != name}
        bytecheckpoint.load(path, {"model": others}, strict=False)
        assert all(torch.equal(others[key], saved["model"][key]) for key in others)


def test_verify_finds_a_flipped_bit_anywhere(damaged: Path) -> None:
    from bytecheckpoint.tools import verify

    assert verify(resolve(damaged)).ok
    for entry in catalog_of(damaged).files:
        for place in flips(damaged / entry.name, range(0, entry.size, 199)):
            report = verify(resolve(damaged))
            assert len(report.findings) == 1, f"{entry.name}, byte {place}: {report.findings}"
            (finding,) = report.findings
            assert (finding.file, finding.kind) == (entry.name, "header" if place < entry.data_offset else "block")
    assert verify(resolve(damaged)).ok


def test_open_detects_a_flipped_bit(damaged: Path) -> None:
    checkpoint = bytecheckpoint.open(damaged)
    (name,) = [f for f in files_of(damaged) if "model/rank-00000" in f]
    for _ in flips(damaged / name, range(4096 + 8, (damaged / name).stat().st_size, 401)):
        got = [attempt(checkpoint[key].__getitem__, ...) for key in checkpoint if key.startswith("model/")]
        errors = [error for error in got if isinstance(error, Exception)]
        assert errors and all(type(error) is CorruptCheckpointError and error.file == name for error in errors)


def append(file: Path, data: bytes) -> None:
    file.write_bytes(file.read_bytes() + data)


def become_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def become_link(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut by one byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut to its header": lambda file: os.truncate(file, 4096),
    "cut inside its header": lambda file: os.truncate(file, 100),
    "empty": lambda file: os.truncate(file, 0),
    "one byte appended": lambda file: append(file, b"\0"),
    "a page appended": lambda file: append(file, bytes(4096)),
    "removed": Path.unlink,
    "a folder in its place": become_folder,
    "a dangling link in its place": lambda file: become_link(file, "nowhere"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_storage_file(damaged: Path, damage: str) -> None:
    names = [name for name in files_of(damaged) if name != CATALOG]
    assert len(names) == 8
    for name in names:
        keep = damaged.parent / "kept"
        shutil.copy(damaged / name, keep)
        DAMAGES[damage](damaged / name)
        corrupt(damaged, name)
        if (damaged / name).is_dir():
            (damaged / name).rmdir()
        shutil.move(keep, damaged / name)
    assert load_step(damaged, rows=ROWS) == 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_catalog(damaged: Path, damage: str) -> None:
    DAMAGES[damage](damaged / CATALOG)
    if damage in ("removed", "a dangling link in its place", "a folder in its place"):
        error = refused(damaged)
        assert type(error) is CheckpointNotFoundError and CATALOG in str(error)
    else:
        corrupt(damaged, CATALOG)


def test_files_of_equal_size_that_change_places(damaged: Path) -> None:
    by_size: dict[int, list[str]] = {}
    for name in files_of(damaged):
        by_size.setdefault((damaged / name).stat().st_size, []).append(name)
    pairs = [names[:2] for names in by_size.values() if len(names) > 1]
    assert pairs
    for one, other in pairs:
        first, second = (damaged / one).read_bytes(), (damaged / other).read_bytes()
        (damaged / one).write_bytes(second)
        (damaged / other).write_bytes(first)
        error = refused(damaged)
        assert type(error) is CorruptCheckpointError and error.file in (one, other)
        (damaged / one).write_bytes(first)
        (damaged / other).write_bytes(second)
    assert load_step(damaged, rows=ROWS) == 3


def test_a_file_of_another_generation_in_its_place(damaged: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    ThreadWorld(2).run(lambda c: bytecheckpoint.save(other, states(c.rank, 2, 4, ROWS)))
    theirs = {name.split(".")[0]: name for name in files_of(other)}
    for name in files_of(damaged):
        if name == CATALOG or name.startswith(("model/values", "optimizer/values")):
            continue  # the trees of plain values are the same in both, or of another length
        kept = (damaged / name).read_bytes()
        (damaged / name).write_bytes((other / theirs[name.split(".")[0]]).read_bytes())
        corrupt(damaged, name)
        (damaged / name).write_bytes(kept)


def test_a_catalog_of_another_generation_in_its_place(damaged: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    bytecheckpoint.save(other, states(step=4, rows=ROWS))
    shutil.copy(other / CATALOG, damaged / CATALOG)
    error = refused(damaged)
    assert type(error) is CorruptCheckpointError and "missing" in str(error)


@pytest.mark.parametrize("content", ["text", "parquet", "storage file", "folder of another format"])
def test_a_foreign_file_as_catalog(damaged: Path, content: str) -> None:
    target = damaged / CATALOG
    if content == "text":
        target.write_text("step: 3\n")
    elif content == "parquet":
        column = pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(bytes(16))])  # pa.array imports pandas
        pq.write_table(pa.Table.from_arrays([column], ["a"]), target)
    elif content == "storage file":
        shutil.copy(damaged / files_of(damaged)[0], target)
    else:
        target.write_bytes(b"PAR1" + bytes(200) + b"PAR1")
    corrupt(damaged, CATALOG)
    with pytest.raises(CorruptCheckpointError):
        bytecheckpoint.open(damaged)


def test_a_catalog_of_a_newer_version(damaged: Path) -> None:
    data = (damaged / CATALOG).read_bytes()
    newer = with_footer(data, lambda footer: footer.update(version=7))
    for content, version in ((resealed(data, b"bytecheckpoint07"), "07"), (newer, "7")):
        (damaged / CATALOG).write_bytes(content)
        error = refused(damaged)
        assert type(error) is IncompatibleCheckpointError
        assert f"version {version}" in str(error) and "upgrade" in str(error)


OUTSIDE = ("../../secret", "/etc/passwd", "model/../../secret", "..", "C:/x", "model\\..\\x")
MALFORMED = ("", ".", "a\0b", "a//b", "a\nb")


@pytest.mark.parametrize("name", OUTSIDE + MALFORMED)
def test_a_catalog_that_names_files_outside_is_refused(damaged: Path, tmp_path: Path, name: str) -> None:
    catalog = catalog_of(damaged)
    (tmp_path / "secret").write_bytes((damaged / catalog.files[0].name).read_bytes())
    first = dataclasses.replace(catalog.files[0], name=name)
    hostile = dataclasses.replace(catalog, files=(first, *catalog.files[1:]))
    (damaged / CATALOG).write_bytes(encode(hostile, check=False))
    corrupt(damaged, CATALOG)


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "folder").mkdir()
    for place in ("nowhere", "folder", "file"):
        with pytest.raises(CheckpointNotFoundError, match=place):
            load_step(tmp_path / place)
        with pytest.raises(CheckpointNotFoundError, match=place):
            bytecheckpoint.open(tmp_path / place)


def test_a_corrupt_checkpoint_is_replaced_by_the_next_save(damaged: Path) -> None:
    (damaged / CATALOG).write_bytes(b"garbage")
    for name in files_of(damaged)[:2]:
        (damaged / name).write_bytes(b"garbage")
    succeeded(save_all(ThreadWorld(2), damaged, 9))
    assert load_step(damaged) == 9
    assert len(files_of(damaged)) == 9


@pytest.mark.parametrize("what", ["fifo", "zeros", "loop"])
def test_what_is_no_file_neither_hangs_nor_fills_memory(damaged: Path, what: str) -> None:
    for name in files_of(damaged):
        file = damaged / name
        saved = file.read_bytes()
        if what == "fifo":
            file.unlink()
            os.mkfifo(file)
        else:
            become_link(file, "/dev/zero" if what == "zeros" else file.name)
        for error in load_all(ThreadWorld(2), damaged, rows=ROWS):
            assert isinstance(error, CheckpointError), (name, error)
        file.unlink()
        file.write_bytes(saved)
    assert load_step(damaged, rows=ROWS) == 3
