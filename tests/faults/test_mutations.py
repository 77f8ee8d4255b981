"""Damaged and hostile checkpoints: a load is right or raises a typed error, with little memory and in little time."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.optimizer_tree import is_optimizer_tree, unpack_tensors
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.representation.checksums import block_sums
from bytecheckpoint.representation.string_column import StringColumn
from bytecheckpoint.representation.values.tree import parse_state_reference
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from tests.support.catalogs import with_footer
from tests.support.mutations import run_mutations
from tests.support.ranks import load_all, save_all, succeeded
from tests.support.settings import using

CATALOG = "metadata.parquet"


@pytest.mark.timeout(400)
def test_some_mutations(tmp_path: Path) -> None:
    assert run_mutations(tmp_path, 1, 60) == []


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_mutations(tmp_path: Path, seed: int) -> None:
    """10,000 in all."""
    assert run_mutations(tmp_path, seed, 1000) == []


@pytest.fixture
def saved(path: Path) -> Path:
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer, "extra_states": {"n": 3}})
    return path


def refuses(path: Path, match: str = "") -> None:
    """Check that a load, an opening and a verification refuse a checkpoint with a typed error."""
    model = torch.nn.Linear(30, 20)
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra_states": {}}
    for action in (
        lambda: bytecheckpoint.load(path, states),
        lambda: bytecheckpoint.open(path),
        lambda: verify(resolve(path)),
    ):
        with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError), match=match):
            action()


@pytest.mark.parametrize(
    "change",
    [
        lambda footer: footer["files"].update(count=2**31 - 1, **{k: footer["files"][k][0] for k in ("name", "size")}),
        lambda footer: footer["files"].update(count=20_000_000),
        lambda footer: footer["info"].update(world_size="many"),
        lambda footer: footer["info"].update(world_size=-1),
        lambda footer: footer["info"].update(world_size=10**30),
    ],
)
def test_claims_of_a_footer(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = with_footer((saved / CATALOG).read_bytes(), change)
    (saved / CATALOG).write_bytes(data)
    refuses(saved, "metadata.parquet")


@pytest.mark.parametrize("size", [300 << 20, 12 << 30, 1 << 42])
@pytest.mark.parametrize("tail", [False, True])
def test_a_sparse_catalog(saved: Path, size: int, tail: bool) -> None:
    end = (saved / CATALOG).read_bytes()[-1500:]
    os.truncate(saved / CATALOG, size)
    if tail:
        with (saved / CATALOG).open("r+b") as file:
            file.seek(-len(end), os.SEEK_END)
            file.write(end)
    refuses(saved, "metadata.parquet")


@pytest.mark.parametrize(
    "change",
    [
        {"block_bytes": 64 << 30},
        {"block_bytes": 2 << 20},
        {"block_bytes": 5000},
        {"size": 1 << 42, "data_offset": 1 << 41},
    ],
)
def test_a_table_of_files_that_takes_memory(saved: Path, change: dict[str, int]) -> None:
    catalog = decode((saved / CATALOG).read_bytes())
    files = tuple(dataclasses.replace(file, **change) for file in catalog.files)
    sums = tuple(np.zeros(max(file.blocks, 0) if file.blocks < 1000 else 0, np.uint64) for file in files)
    (saved / CATALOG).write_bytes(encode(dataclasses.replace(catalog, files=files, file_sums=sums), check=False))
    refuses(saved, "metadata.parquet")


def rewritten(path: Path, **changes: Any) -> None:
    """Replace columns of the catalog, as a writer without checks would."""
    catalog = decode((path / CATALOG).read_bytes())
    (path / CATALOG).write_bytes(encode(dataclasses.replace(catalog, **changes), check=False))


@pytest.mark.parametrize("state", ["optimizer", "extra_states"])
@pytest.mark.parametrize("data", [b"", b"\xc1\x01\xdb", b"\xc1\x01\xa2\xff\xff", b"\xc1\x01\xc1", b"\xc1\x63\xc0"])
def test_damaged_values_name_their_file_and_state(saved: Path, state: str, data: bytes) -> None:
    """Their sums are right. The version of the last one is a newer one."""
    catalog = decode((saved / CATALOG).read_bytes())
    (number,) = [i for i, file in enumerate(catalog.files) if file.state == state and "values" in file.name]
    entry = catalog.files[number]
    content = data.ljust(entry.size - entry.data_offset, b"\x00")
    (saved / entry.name).write_bytes((saved / entry.name).read_bytes()[: entry.data_offset] + content)
    sums = list(catalog.file_sums)
    sums[number] = block_sums(content, entry.block_bytes)
    rewritten(saved, file_sums=tuple(sums))
    live = torch.nn.Linear(30, 20)
    states = {"model": live, "optimizer": torch.optim.AdamW(live.parameters()), "extra_states": {}}
    for action in (lambda: bytecheckpoint.load(saved, states), lambda: dict(bytecheckpoint.open(saved))):
        with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError), match=entry.name) as raised:
            action()
        if isinstance(raised.value, CorruptCheckpointError):
            assert raised.value.file == entry.name and raised.value.tensors == (f"{state}/state////values",)


def test_a_file_without_checksums(saved: Path) -> None:
    catalog = decode((saved / CATALOG).read_bytes())
    files = [dataclasses.replace(file, block_bytes=0) for file in catalog.files]
    rewritten(saved, files=tuple(files), file_sums=tuple(sums[:0] for sums in catalog.file_sums))
    with pytest.raises(IncompatibleCheckpointError, match=r"safetensors has no checksums"):
        load_model(saved)
    with pytest.raises(IncompatibleCheckpointError, match=r"safetensors has no checksums"):
        bytecheckpoint.load(saved, {"extra_states": {}})
    with pytest.raises(IncompatibleCheckpointError, match=r"safetensors has no checksums"):
        _ = bytecheckpoint.open(saved)["model/weight"][...]


def test_a_file_name_that_no_file_system_takes(saved: Path) -> None:
    catalog = decode((saved / CATALOG).read_bytes())
    rewritten(saved, files=(dataclasses.replace(catalog.files[0], name="f" * 5000), *catalog.files[1:]))
    refuses(saved, "is too long for a file system")


@pytest.mark.parametrize("extent", [1 << 61, (1 << 62) - 1])
def test_shapes_that_are_too_large_together(saved: Path, extent: int) -> None:
    shapes = decode((saved / CATALOG).read_bytes()).shapes.copy()
    shapes[-1, 0] = extent
    rewritten(saved, shapes=shapes)
    refuses(saved, "has an impossible shape")


def test_values_of_another_state(saved: Path) -> None:
    """A state without values may be that of a module, so a load of the rest would look complete."""
    catalog = decode((saved / CATALOG).read_bytes())
    names = zip(catalog.state.to_list(), catalog.slot.to_list(), strict=True)
    states = ["x" if name == ("extra_states", "//values") else name[0] for name in names]
    rewritten(saved, state=StringColumn.of(states))
    refuses(saved, "which is of another state")


def test_values_of_another_slot(saved: Path) -> None:
    catalog = decode((saved / CATALOG).read_bytes())
    names = zip(catalog.state.to_list(), catalog.slot.to_list(), strict=True)
    slots = ["x" if name == ("extra_states", "//values") else name[1] for name in names]
    rewritten(saved, slot=StringColumn.of(slots))
    with pytest.raises(CorruptCheckpointError, match="no values of extra_states") as raised:
        bytecheckpoint.load(saved, {"extra_states": {}})
    assert raised.value.file == CATALOG


def test_stored_boxes_that_overlap(path: Path) -> None:
    succeeded(save_all(ThreadWorld(2), path, 1, rows=10))
    boxes = decode((path / CATALOG).read_bytes()).boxes
    offsets = boxes.offsets.copy()
    offsets[offsets[:, 0] == 5, 0] = 4
    rewritten(path, boxes=dataclasses.replace(boxes, offsets=offsets))
    (loaded,) = load_all(ThreadWorld(1), path, rows=10)
    with pytest.raises(CorruptCheckpointError, match="overlap") as raised:
        _ = bytecheckpoint.open(path)["model/w"][...]
    for error in (loaded, raised.value):
        assert (
            isinstance(error, CorruptCheckpointError)
            and error.file == CATALOG
            and error.tensors[0].startswith("model/")
        )


def test_a_newer_version_names_the_catalog(saved: Path) -> None:
    data = with_footer((saved / CATALOG).read_bytes(), lambda footer: footer.update(version=99))
    (saved / CATALOG).write_bytes(data)
    refuses(saved, r"metadata\.parquet: the catalog has format version 99")


def test_state_that_its_rows_do_not_fill(saved: Path) -> None:
    """No memory is taken for it."""
    catalog = decode((saved / CATALOG).read_bytes())
    shapes = catalog.shapes.copy()
    (number,) = [i for i, key in enumerate(catalog.keys()) if key.slot == "exp_avg" and key.fqn == "weight"]
    shapes[number] = (1 << 30, 1 << 20)
    (saved / CATALOG).write_bytes(encode(dataclasses.replace(catalog, shapes=shapes), check=False))
    model = torch.nn.Linear(30, 20)
    with pytest.raises(CorruptCheckpointError, match=r"optimizer/state/weight/exp_avg.* a part of it only") as raised:
        bytecheckpoint.load(saved, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, strict=False)
    assert raised.value.file == CATALOG and raised.value.tensors == ("optimizer/state/weight/exp_avg",)


SOUND: dict[str, Any] = {
    "groups": [{"params": ["w"]}],
    "state": {"w": {}},
    "aliases": {},
    "globals": [],
    "optimizers": ["SGD"],
}


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 3},
        {"groups": [3]},
        {"groups": [{}]},
        {"groups": [{"params": "w"}]},
        {"groups": [{"params": [3]}]},
        {"state": []},
        {"state": {"w": 3}},
        {"state": {3: {}}},
        {"aliases": {"w": 3}},
        {"aliases": [3]},
        {"globals": {}},
        {"optimizers": [[]]},
        {"own": [3]},
        {"complete": "yes"},
    ],
)
def test_a_malformed_optimizer_tree(change: dict[str, Any]) -> None:
    assert is_optimizer_tree(SOUND)
    with pytest.raises(CorruptCheckpointError, match="form of an optimizer"):
        is_optimizer_tree(SOUND | change)


@pytest.mark.parametrize(
    "packed", [3, [], ["float32", [2], b"x"], ["float32", [-1], b""], ["float32", ["2"], b""], [1, [], b""]]
)
def test_a_malformed_tensor_among_hyperparameters(packed: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        unpack_tensors({"__tensor__": packed})
    with pytest.raises(CorruptCheckpointError):
        parse_state_reference("x:y")
    assert parse_state_reference("9" * 5000 + ":ab") == ("ab", "")


def test_a_name_of_45_megabytes(path: Path) -> None:
    """A load that lacks it says so at once, in a message of readable length."""
    bytecheckpoint.save(path, {"model": {"w" * 45_000_000: torch.zeros(2)}})
    with pytest.raises(IncompatibleCheckpointError, match="lacks model/v") as raised:
        bytecheckpoint.load(path, {"model": {"v" * 1000: torch.zeros(2)}})
    assert len(str(raised.value)) < 100_000


def test_integers_of_more_digits_than_python_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.parent / "other"
    for place, number in ((path, 10**5000), (other, -(10**5001))):
        bytecheckpoint.save(place, {"extra_states": {"n": number, "inside": [number, {"a": (number,)}]}})
    for arguments in (["inspect", str(path), "--values"], ["inspect", str(path), "--values", "--json"]):
        assert run(arguments) == 0
        assert hex(10**5000)[:50] in capsys.readouterr().out
    assert run(["diff", str(path), str(other)]) == 1
    capsys.readouterr()
    loaded: dict[str, Any] = {"extra_states": {}}
    bytecheckpoint.load(path, loaded)
    assert loaded["extra_states"]["n"] == 10**5000


# ---- what leads out of the folder of a checkpoint ----


@pytest.fixture
def elsewhere(saved: Path, tmp_path: Path) -> str:
    """The folder of a copy of the checkpoint, to which the catalog's URIs lead from now on."""
    other = tmp_path / "other" / "step"
    shutil.copytree(saved, other)
    catalog = decode((saved / CATALOG).read_bytes())
    files = [dataclasses.replace(file, name=f"file://{other}/{file.name}") for file in catalog.files]
    (saved / CATALOG).write_bytes(encode(catalog.with_files(files, catalog.file_sums)))
    return str(other)


def load_model(path: Path) -> None:
    bytecheckpoint.load(path, {"model": torch.nn.Linear(30, 20)})


def test_uris_that_lead_to_another_folder(saved: Path, elsewhere: str) -> None:
    """Only where the setting says so; nothing is opened or contacted before."""
    with pytest.raises(IncompatibleCheckpointError, match=rf"leads to file://{elsewhere}, outside .*trusted_folders"):
        load_model(saved)
    assert {finding.kind for finding in verify(resolve(saved)).findings} == {"unreadable"}
    for trusted in (os.path.dirname(elsewhere), f"/x, file://{elsewhere}/"):
        with using(trusted_folders=trusted):
            load_model(saved)
            assert verify(resolve(saved)).ok
    for trusted in (f"{elsewhere}/model/x", elsewhere[:-1], "/x"):
        with using(trusted_folders=trusted), pytest.raises(IncompatibleCheckpointError, match="trusted_folders"):
            load_model(saved)


@pytest.mark.parametrize(
    "folder", ["s3://bucket/x", "hdfs://host:1/x", "https://host/x", "file:///a/../b", "nothing://x"]
)
def test_uris_of_other_schemes_contact_nobody(saved: Path, folder: str) -> None:
    catalog = decode((saved / CATALOG).read_bytes())
    files = [dataclasses.replace(file, name=f"{folder}/{file.name}") for file in catalog.files]
    (saved / CATALOG).write_bytes(encode(catalog.with_files(files, catalog.file_sums)))
    with pytest.raises(IncompatibleCheckpointError, match="outside of the checkpoint"), using(trusted_folders="/a"):
        load_model(saved)


def test_the_word_of_a_cooldown(saved: Path, elsewhere: str) -> None:
    """It stands beside the step, so a step that comes from elsewhere cannot bring it along."""
    (saved / "cooldown.folders").write_text(f"{elsewhere}\n")
    with pytest.raises(IncompatibleCheckpointError, match="trusted_folders"):
        load_model(saved)
    (saved.parent / "cooldown.folders").write_text(f"/nowhere\n{os.path.dirname(elsewhere)}\n")
    load_model(saved)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_symbolic_links_that_lead_out(saved: Path, tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (name,) = [path for path in (saved / "model").iterdir() if "rank" in path.name]
    moved = name if what == "file" else name.parent
    shutil.move(moved, outside / moved.name)
    moved.symlink_to(outside / moved.name)
    with pytest.raises(IncompatibleCheckpointError, match=r"symbolic link to .*outside"):
        load_model(saved)
    with using(trusted_folders=str(outside)):
        load_model(saved)
    # A link of the user's own, to the folder of the checkpoint or inside of it, is no matter.
    (tmp_path / "link").symlink_to(saved)
    moved.unlink()
    shutil.move(outside / moved.name, saved / "kept")
    moved.symlink_to(saved / "kept")
    load_model(tmp_path / "link")
