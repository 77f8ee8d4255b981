"""Versions published at any layout, and followed at any other: equal bits, proven, with old weights kept on any error."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HuggingFaceView,
    IncompatibleCheckpointError,
    LoadOptions,
    SaveOptions,
    StorageConflictError,
    StorageFullError,
    UsageError,
)
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.publishing import Follower, Publisher
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.deltas.coding import PREFIX_BYTES, DeltaHead, decode_prefix, encode_head
from bytecheckpoint.storage.deltas.writing import DeltaStorage, KeptFiles
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tools import collect_garbage, fingerprint
from bytecheckpoint.tools.retirement import finish_retirement, retire, tombstones
from bytecheckpoint.tuning import tuned
from tests.loading.test_layouts import assert_holds, fused, module_of, sized, weights
from tests.saving.test_tiles import FSDP, TP, states
from tests.saving.test_tiles import check as check_tiles
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.layouts import Leaf
from tests.support.memory import hot_tier, new_memory
from tests.support.ranks import attempt, outcomes
from tests.support.variants import crossed
from tests.support.versions import Engine, Trainer, check, cut_by, fine


@pytest.mark.parametrize(
    ("published", "followed"),
    crossed([(1, 0, 1), (3, 0, 1), (2, 1, 1), (4, 1, 2)], [(2, 0, 1), (4, 0, 2), (3, 1, 1), (1, 0, 1)]),
)
def test_any_layout_follows_any_other(tmp_path: Path, published: Any, followed: Any) -> None:
    trainer = Trainer(tmp_path, *published)
    trainer.publish()
    engine = Engine(trainer.model, tmp_path, *followed)
    for report in fine(engine.update()):
        assert (report.step, report.versions, report.changed) == (1, 0, 0)
    engine.check()
    for share in (0.02, 0.0, 0.2, 0.01):
        assert all(report.bytes_written for report in trainer.publish(share))
        for report in fine(engine.update()):
            assert (report.step, report.versions, report.unproven) == (trainer.step, 1, ())
        engine.check()
    assert fine(engine.update()) == [None] * followed[0]
    for share in (0.01, 0.01, 0.01):
        trainer.publish(share)
    assert {report.versions for report in fine(engine.update())} == {3}
    engine.check()
    trainer.end()


def test_a_version_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 3)
    for share in (1.0, 0.02, 0.02):
        trainer.publish(share)
    trainer.end()
    path, cut = tmp_path / "step_00000003", cut_by(2, 1)
    assert sum(f.stat().st_size for f in path.rglob("*.delta")) < 0.2 * sum(
        f.stat().st_size for f in (tmp_path / "step_00000001").rglob("*.safetensors")
    )
    for rank in range(2):
        loaded = trainer.model.held(cut, rank, blank=True)
        bytecheckpoint.load(path, loaded)
        check(loaded, trainer.model)
    with bytecheckpoint.open(path) as checkpoint:
        assert torch.equal(checkpoint["model/w"][10:20, 3:], trainer.model.whole["w"][10:20, 3:])
    assert run(["verify", str(path)]) == 0
    assert run(["inspect", str(path)]) == 0
    assert run(["ls", str(tmp_path)]) == 0
    assert run(["diff", str(path), str(tmp_path / "step_00000002")]) == 1
    assert fingerprint(path) == fingerprint(path, recompute=True)
    with pytest.raises(UsageError, match="differences"):
        bytecheckpoint.tools.copy(path, tmp_path / "copy")
    shutil.move(tmp_path, f"{tmp_path}-moved")  # the folder of the versions may move as a whole
    assert run(["verify", f"{tmp_path}-moved/step_00000003"]) == 0


@given(share=st.floats(0, 1), rows=st.integers(1, 3000), seed=st.integers(0, 99), data=st.data())
def test_any_share_of_changes(share: float, rows: int, seed: int, data: st.DataObject) -> None:
    """Sparse, dense and whole segments, over several of them, read in any pieces through a chain of versions."""
    torch.manual_seed(seed)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.float64]))
    weight = torch.randint(-100, 100, (rows, 97)).to(dtype)
    with new_memory() as root, Publisher(root) as publisher:
        followed = {"model": {"w": torch.zeros_like(weight)}}
        follower = Follower(root)
        for step in range(1, 4):
            weight = torch.where(torch.rand(weight.shape) < share, weight + torch.tensor(step, dtype=dtype), weight)
            publisher.publish({"model": {"w": weight}}, step).result()
            follower.update(followed)
            assert torch.equal(followed["model"]["w"], weight)
        with bytecheckpoint.open(f"{root}/step_00000003") as found:
            low = data.draw(st.integers(0, rows))
            assert torch.equal(found["model/w"][low:], weight[low:])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Trainer, Engine]:
    """Two ranks that publish, and three that follow and have version 1."""
    trainer = Trainer(tmp_path, 2)
    trainer.publish()
    engine = Engine(trainer.model, tmp_path, 3, 1)
    fine(engine.update())
    return trainer, engine


@pytest.mark.parametrize(
    ("how", "rank"), crossed(["flip", "cut", "extend", "remove", "index", "prefix"], ["00000", "00001"])
)
def test_a_damaged_version_is_never_applied(pair: tuple[Trainer, Engine], how: str, rank: str) -> None:
    trainer, engine = pair
    trainer.publish()
    file = storage_file(Path(trainer.root) / "step_00000002", rank=rank)
    whole, before = file.read_bytes(), engine.snapshot()
    places = {"flip": PREFIX_BYTES + 20, "index": -20, "prefix": 12}
    damage(file, how if how in ("cut", "extend", "remove") else "flip", places.get(how, 0))
    found = engine.update()
    assert any(isinstance(error, CorruptCheckpointError) for error in found), found
    assert all(isinstance(error, CorruptCheckpointError) for error in found), found
    assert f"{file.parents[1]}" in str(found[0]) and rank in str(found[0])
    assert all(torch.equal(a, b) for a, b in zip(before, engine.snapshot(), strict=True))
    with pytest.raises(CorruptCheckpointError):
        bytecheckpoint.load(Path(trainer.root) / "step_00000002", trainer.model.held(cut_by(1, 0), 0, blank=True))
    file.write_bytes(whole)
    assert {report.versions for report in fine(engine.update())} == {1}
    engine.check()


BASES = (
    "../secret/model",
    "..",
    "/etc/passwd",
    "step_00000001/../../etc/passwd",
    "step_00000001/metadata.parquet",
    "own",
)


@pytest.mark.parametrize("base", BASES)
def test_a_base_that_is_no_storage_file_is_not_opened(tmp_path: Path, base: str) -> None:
    """Nor is a chain followed for ever that builds on itself."""
    trainer = Trainer(tmp_path, 1)
    trainer.publish()
    trainer.publish()
    trainer.end()
    file = storage_file(tmp_path / "step_00000002")
    data = file.read_bytes()
    offset, length, _ = decode_prefix(data[:PREFIX_BYTES])
    head = msgspec.msgpack.decode(data[offset : offset + length], type=DeltaHead)
    name = f"step_00000002/model/{file.name}" if base == "own" else base
    changed, prefix = encode_head(
        msgspec.structs.replace(head, base=name.ljust(len(head.base))[: len(head.base)]), offset
    )
    file.write_bytes(prefix + data[PREFIX_BYTES:offset] + changed.ljust(length, b"\0")[:length])
    states = trainer.model.held(cut_by(1, 0), 0, blank=True)
    with pytest.raises(CorruptCheckpointError, match="builds on"):
        bytecheckpoint.load(tmp_path / "step_00000002", states)


def test_long_chains(tmp_path: Path) -> None:
    weight = torch.zeros(400_000, dtype=torch.int8)
    with Publisher(tmp_path, full_every=None) as publisher:
        for step in range(1, 103):
            weight[step] = step
            publisher.publish({"model": {"w": weight.clone()}}, step)
    found = {"model": {"w": torch.zeros_like(weight)}}
    bytecheckpoint.load(tmp_path / "step_00000100", found)
    assert torch.equal(found["model"]["w"], weight.masked_fill(torch.arange(400_000) > 100, 0))
    assert [*(tmp_path / "step_00000101" / "model").glob("*.safetensors")], "the chain has ended"


def test_a_follower_that_was_changed_is_refused(pair: tuple[Trainer, Engine]) -> None:
    trainer, engine = pair
    trainer.publish()
    changed = engine.states[1]["model"]["w"].tensors[0]
    changed += 1
    before = engine.snapshot()
    found = engine.update()
    assert all(isinstance(error, CorruptCheckpointError) and "model/w" in str(error) for error in found), found
    assert all(torch.equal(a, b) for a, b in zip(before, engine.snapshot(), strict=True))


def test_versions_that_are_gone_or_of_another_publisher_are_loaded_whole(pair: tuple[Trainer, Engine]) -> None:
    trainer, engine = pair
    trainer.publish()
    trainer.publish()
    shutil.rmtree(Path(trainer.root) / "step_00000002")
    found = engine.update()  # version 3 builds on it
    assert all(isinstance(error, CorruptCheckpointError) and "missing" in str(error) for error in found), found
    trainer.end()  # the next publisher builds on nothing
    trainer.publish()
    assert {report.versions for report in fine(engine.update())} == {0}
    engine.check()
    trainer.publish()
    assert {report.versions for report in fine(engine.update())} == {1}
    engine.check()


# --- differences beside whole versions ---------------------------------------------------------------------------------


def followed_to_a_whole_version(path: Path, ranks: int = 2) -> tuple[Trainer, Engine]:
    """Return a trainer that has published version 4 whole, and an engine at version 3."""
    trainer = Trainer(path, ranks, full_every=3)
    engine = Engine(trainer.model, path, 3, 1)
    for _ in range(3):
        fine(trainer.publish())
        fine(engine.update())
    fine(trainer.publish())
    return trainer, engine


def test_followers_take_the_differences_beside_a_whole_version(tmp_path: Path) -> None:
    trainer, engine = followed_to_a_whole_version(tmp_path)
    new, folder = Engine(trainer.model, tmp_path, 3, 1), tmp_path / "step_00000004"
    whole = sum(report.bytes_read for report in fine(new.update()))
    reports = fine(engine.update())
    assert {(report.versions, report.unproven) for report in reports} == {(1, ())}
    assert sum(report.bytes_read for report in reports) < 0.4 * whole  # tensors are small, so the indices count
    engine.check()
    new.check()
    assert [len([*folder.rglob(f"*.{suffix}")]) for suffix in ("safetensors", "delta")] == [3, 2]  # one of values
    for folder in tmp_path.glob("step_*"):
        assert run(["verify", str(folder)]) == 0
    bytecheckpoint.tools.copy(tmp_path / "step_00000004", tmp_path / "copy")
    assert run(["diff", str(tmp_path / "step_00000004"), str(tmp_path / "copy")]) == 0


def test_followers_go_through_one_whole_version(tmp_path: Path) -> None:
    """By all differences on the way, but not through two: a load of the newest one takes no longer then."""
    trainer, first = followed_to_a_whole_version(tmp_path)
    second = Engine(trainer.model, tmp_path, 2, 0)
    fine(second.update(step=2))
    for _ in range(2):
        trainer.publish()
    fine(second.update())
    assert {report.versions for report in fine(first.update())} == {3}
    trainer.publish()  # whole
    fine(second.update(step=3))
    for engine, versions in ((first, 1), (second, 0)):
        assert {report.versions for report in fine(engine.update())} == {versions}
        engine.check()


@pytest.mark.parametrize("how", ["flip", "cut", "extend", "remove", "index", "prefix", "another"])
def test_differences_beside_a_whole_version_that_are_damaged_cost_time_only(tmp_path: Path, how: str) -> None:
    trainer, engine = followed_to_a_whole_version(tmp_path)
    file = next((tmp_path / "step_00000004" / "model").glob("rank-00001*.delta"))
    if how == "another":
        shutil.copy(next((tmp_path / "step_00000003" / "model").glob("rank-00001*.delta")), file)
    else:
        places = {"flip": PREFIX_BYTES + 20, "index": -20, "prefix": 12}
        damage(file, how if how in ("cut", "extend", "remove") else "flip", places.get(how, 0))
    assert run(["verify", str(tmp_path / "step_00000004")]) == 0
    for versions in (0, 1):
        assert {report.versions for report in fine(engine.update())} == {versions}
        engine.check()
        trainer.publish()


def test_a_follower_that_was_changed_loads_a_whole_version(tmp_path: Path) -> None:
    _, engine = followed_to_a_whole_version(tmp_path)
    changed = engine.states[1]["model"]["w"].tensors[0]
    changed += 1
    assert {report.versions for report in fine(engine.update())} == {0}
    engine.check()


def test_a_whole_version_that_is_damaged_too_is_never_applied(tmp_path: Path) -> None:
    _, engine = followed_to_a_whole_version(tmp_path)
    before = engine.snapshot()
    for suffix in ("delta", "safetensors"):
        damage(next((tmp_path / "step_00000004" / "model").glob(f"rank-00001*.{suffix}")), "flip", -20)
    assert all(isinstance(error, CorruptCheckpointError) for error in engine.update())
    assert all(torch.equal(a, b) for a, b in zip(before, engine.snapshot(), strict=True))


def test_differences_beside_a_whole_version_stay_and_go_with_it(tmp_path: Path) -> None:
    trainer, _ = followed_to_a_whole_version(tmp_path)
    trainer.end()
    folder = tmp_path / "step_00000004"
    assert collect_garbage(tmp_path, older_than=-60) == []
    assert len([*folder.rglob("*.delta")]) == 2
    assert not retire(resolve(folder), read_catalog(resolve(folder))[0].info["created"])
    for name in tombstones(resolve(folder)):
        finish_retirement(resolve(folder), name)
    assert not folder.exists()


def test_a_whole_version_without_its_catalog_is_repaired(tmp_path: Path) -> None:
    trainer, _ = followed_to_a_whole_version(tmp_path)
    (tmp_path / "step_00000004" / "metadata.parquet").unlink()
    assert collect_garbage(tmp_path, older_than=-60)[0].kept
    assert run(["repair", str(tmp_path / "step_00000004")]) == 0
    states = trainer.model.held(cut_by(1, 0), 0, blank=True)
    bytecheckpoint.load(tmp_path / "step_00000004", states)
    check(states, trainer.model)


def test_another_save_removes_the_differences_beside_the_files_it_replaces(tmp_path: Path) -> None:
    trainer, _ = followed_to_a_whole_version(tmp_path)
    bytecheckpoint.save(tmp_path / "step_00000004", trainer.model.held(cut_by(1, 0), 0)).result()
    assert not [*(tmp_path / "step_00000004").rglob("*.delta")]


def test_a_publisher_that_went_back(pair: tuple[Trainer, Engine]) -> None:
    trainer, engine = pair
    trainer.publish()
    fine(engine.update())
    trainer.step = 0
    assert all(isinstance(error, UsageError) and "ascend" in str(error) for error in trainer.publish())
    trainer.end()
    trainer.step = 1
    assert all(isinstance(error, UsageError) and "up to step 2" in str(error) for error in trainer.publish())
    shutil.rmtree(Path(trainer.root) / "step_00000002")
    found = engine.update()
    assert all(isinstance(error, IncompatibleCheckpointError) and "went back" in str(error) for error in found), found
    assert {report.step for report in fine(engine.update(step=1))} == {1}
    assert all(isinstance(error, CheckpointNotFoundError) for error in engine.update(step=7))


@pytest.mark.parametrize("call", ["write", "finish", "publish"])
def test_a_version_that_fails_is_followed_by_a_whole_one(
    pair: tuple[Trainer, Engine], call: str, monkeypatch: Any
) -> None:
    trainer, engine = pair
    faults = Faults().install(monkeypatch)
    faults.add(call, StorageFullError("no room"), rank=0)
    found = trainer.publish()
    assert any(isinstance(error, StorageFullError) for error in found)
    assert fine(engine.update()) == [None] * 3
    fine(trainer.publish())
    assert {report.versions for report in fine(engine.update())} == {0}
    engine.check()
    fine(trainer.publish())
    assert {report.versions for report in fine(engine.update())} == {1}
    engine.check()


def test_old_chains_go(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 2, full_every=3, keep=2, grace=0)
    engine = Engine(trainer.model, tmp_path, 2, 1)
    for _ in range(11):
        fine(trainer.publish())
        fine(engine.update())
        engine.check()
    trainer.end()
    committed = {int(p.parent.name[5:]) for p in tmp_path.glob("*/metadata.parquet")}
    assert {10, 11, 7, 8, 9} <= committed <= {4, 5, 6, 7, 8, 9, 10, 11}


def test_wrong_arguments(tmp_path: Path) -> None:
    for wrong in ({"full_every": 0}, {"keep": 0}, {"keep": None}, {"full_every": True}):
        with pytest.raises(UsageError):
            Publisher(tmp_path, **wrong)
    with pytest.raises(UsageError, match="incremental"):
        Publisher(tmp_path, options=SaveOptions(incremental=True))
    with pytest.raises(UsageError, match="view"):
        Publisher(tmp_path, options=SaveOptions(view=HuggingFaceView()))
    with pytest.raises(UsageError):
        Follower(tmp_path).update(3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError, match="no version"):
        Follower(tmp_path).update(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("back", [False, True])
def test_versions_are_followed_through_a_layout(tmp_path: Path, back: bool) -> None:
    """Names of Megatron from those of Hugging Face, with fused heads and padding, on ranks cut along columns; and back."""
    found = weights()
    engine = module_of(weights() if back else fused(weights()))
    follower = Follower(tmp_path, layout=sized())
    ranks = [{"model": column_of(fused(weights()), rank)} for rank in range(2)]
    followers = [Follower(tmp_path, layout=sized()) for _ in range(2)]

    def follow(collective: Collective) -> Any:
        return followers[collective.rank].update(ranks[collective.rank])

    with Publisher(tmp_path) as publisher:
        for step in (1, 2, 3):
            for tensor in found.values():
                tensor.view(-1)[step::17] += 1
            publisher.publish({"model": fused(found) if back else found}, step).result()
            report = follower.update(engine)
            assert report is not None and (report.versions, report.unproven) == (int(step > 1), ())
            assert_holds(engine, found if back else fused(found))
            if not back:
                for report in fine(outcomes(ThreadWorld(2), follow)):
                    assert (report.versions, report.unproven) == (int(step > 1), ())
                for rank, states in enumerate(ranks):
                    for name, leaf in states["model"].items():
                        assert torch.equal(leaf.tensors[0], column_of(fused(found), rank)[name].tensors[0]), name


def column_of(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Leaf]:
    """Return the last half of the columns of matrices for rank 1, the first for rank 0; vectors are on both."""
    found = {}
    for name, tensor in tensors.items():
        half = tensor.shape[-1] // 2
        box = ((0, half * rank), (tensor.shape[0], half)) if tensor.ndim > 1 else ((0,), tuple(tensor.shape))
        found[name] = Leaf(tuple(tensor.shape), [box]).fill(tensor, False)
    return found


def test_one_publisher_at_a_time(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    first, second = Publisher(tmp_path), Publisher(tmp_path)
    first.publish(model, 1).result()
    second.publish(model, 2).result()
    found: Any = None
    for step in range(3, 100):
        if isinstance(found := attempt(first.publish, model, step), Exception):
            break
        found.result()
        time.sleep(0.05)
    assert isinstance(found, StorageConflictError) and "another job manages" in str(found)
    second.publish(model, 100).result()
    assert Follower(tmp_path).update(model).step == 100  # type: ignore[union-attr]


def test_plain_values_travel_with_the_version(tmp_path: Path) -> None:
    """Their tensors are read whole: a load gives them new memory."""
    model, engine = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    states: dict[str, Any] = {"model": engine, "extra_states": {}}
    follower = Follower(tmp_path)
    with Publisher(tmp_path) as publisher:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight[step] += 1
            extra = {"step": step, "noise": torch.arange(5000.0) * step, "table": np.arange(3000) + step}
            publisher.publish({"model": model, "extra_states": extra}, step).result()
            report = follower.update(states)
            assert report is not None and report.versions == int(step > 1)
            assert torch.equal(engine.weight, model.weight)
            found = states["extra_states"]
            assert found["step"] == step and torch.equal(found["noise"], extra["noise"])
            assert np.array_equal(found["table"], extra["table"])


def test_a_file_that_is_written_twice_in_a_save(tmp_path: Path) -> None:
    """As those of ranks whose plan was not that of the others."""
    kept = KeptFiles()
    weight = torch.arange(3000)
    for number, whole in ((1, True), (2, False), (3, False)):
        weight[number] += 1
        storage = DeltaStorage(resolve(tmp_path / f"step_{number:08d}"), kept, whole=whole)
        create = storage.create

        def twice(request: Any, create: Any = create) -> Any:
            first = create(request)
            first.write_at(0, [memoryview(bytes(request.size))])
            first.abort()
            return create(request)

        storage.create = twice  # type: ignore[method-assign]
        bytecheckpoint.save(storage, {"model": {"w": weight}})
        kept.commit()
        found = {"model": {"w": torch.zeros_like(weight)}}
        bytecheckpoint.load(tmp_path / f"step_{number:08d}", found)
        assert torch.equal(found["model"]["w"], weight)


def test_a_save_that_fails_in_the_call(pair: tuple[Trainer, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = pair
    held = trainer.model.held
    monkeypatch.setattr(trainer.model, "held", lambda *_: {"model": {"w": object()}})
    assert all(isinstance(error, UsageError) for error in trainer.publish())
    monkeypatch.setattr(trainer.model, "held", held)
    for versions in (0, 1):
        fine(trainer.publish())
        assert {report.versions for report in fine(engine.update())} == {versions}
        engine.check()


def test_other_names_and_dtypes(tmp_path: Path) -> None:
    """A follower that sees other names follows by changes; one in another dtype loads each version whole."""
    model, cast = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30, dtype=torch.bfloat16)
    named = torch.nn.ModuleDict({"inner": torch.nn.Linear(40, 30)})
    first = Follower(tmp_path, options=LoadOptions(cast=True))
    second = Follower(tmp_path, options=LoadOptions(rename={"model/inner.": "model/"}))
    with Publisher(tmp_path) as publisher:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight[step] += 1
            publisher.publish(model, step).result()
            reports = first.update(cast), second.update(named)
            assert [report.versions for report in reports if report] == [0, int(step > 1)]
            assert torch.equal(cast.weight, model.weight.to(torch.bfloat16))
            assert torch.equal(named["inner"].weight, model.weight)


def test_tensors_beside_those_followed_come_and_go(tmp_path: Path) -> None:
    """Files of equal length then hold tensors at other places; empty tensors begin where others do."""
    held = {"model": {"a": torch.zeros(600), "b": torch.zeros(600)}}
    a, b, empty = torch.randn(600), torch.randn(600), torch.zeros(0)
    follower = Follower(tmp_path, options=LoadOptions(strict=False))
    versions = []
    with Publisher(tmp_path) as publisher:
        for step, order in enumerate((["a", "b"], ["b", "a"], ["b", "e", "a"], ["b", "e", "a"], ["b", "f", "a"]), 1):
            a, b = a.clone(), b.clone()
            a[0], b[step] = step, step
            tensors = {"a": a, "b": b, "e": empty, "f": empty}
            publisher.publish({"model": {name: tensors[name] for name in order}}, step).result()
            report = follower.update(held)
            assert report is not None and torch.equal(held["model"]["a"], a) and torch.equal(held["model"]["b"], b)
            versions.append((report.versions, report.unproven))
    assert versions == [(0, ()), (0, ()), (0, ()), (1, ()), (0, ())]


def test_a_version_on_the_way_need_not_fit(tmp_path: Path) -> None:
    whole = {"a": torch.randn(40), "b": torch.randn(40)}
    held = {"model": {name: torch.zeros(40) for name in whole}}
    follower = Follower(tmp_path)
    with Publisher(tmp_path) as publisher:
        publisher.publish({"model": whole}, 1).result()
        follower.update(held)
        publisher.publish({"model": {"a": whole["a"]}}, 2).result()
        with pytest.raises(IncompatibleCheckpointError, match="lacks model/b"):
            follower.update(held)
        whole["b"] += 1
        publisher.publish({"model": whole}, 3).result()
        assert follower.update(held) is not None
    assert torch.equal(held["model"]["b"], whole["b"])


def test_a_step_that_was_saved_anew_is_followed(tmp_path: Path) -> None:
    follower, held = Follower(tmp_path), {"model": {"w": torch.zeros(4)}}
    for value in (1.0, 2.0):
        bytecheckpoint.save(tmp_path / "step_00000001", {"model": {"w": torch.full((4,), value)}}, step=1)
        assert follower.update(held) is not None and follower.update(held) is None
        assert held["model"]["w"].tolist() == [value] * 4


def test_tensors_in_parts_of_one_memory_of_numpy(tmp_path: Path) -> None:
    memory, whole = np.zeros(100, np.float32), {"a": torch.randn(10), "b": torch.randn(90)}
    held = {"model": {"a": torch.from_numpy(memory[:10]), "b": torch.from_numpy(memory)[10:]}}
    follower = Follower(tmp_path)
    with Publisher(tmp_path) as publisher:
        for step in (1, 2):
            whole["b"][50] = step
            publisher.publish({"model": whole}, step).result()
            report = follower.update(held)
            assert report is not None and report.versions == step - 1
    assert np.array_equal(memory, torch.cat([*whole.values()]).numpy())


# --- catalogs and storages --------------------------------------------------------------------------------------------


def test_large_catalogs(tmp_path: Path) -> None:
    """Catalogs in groups, of which each rank reads what it needs."""
    with tuned(catalog_group_bytes=1, all_tables_bytes=0):
        trainer = Trainer(tmp_path, 4)
        fine(trainer.publish())
        engine = Engine(trainer.model, tmp_path, 3, 1)
        fine(engine.update())
        for _ in range(2):
            fine(trainer.publish())
            assert {(report.versions, report.unproven) for report in fine(engine.update())} == {(1, ())}
            engine.check()


def test_catalogs_with_tilings(tmp_path: Path) -> None:
    """Those of many ranks, which are of version 6."""
    publishers = [Publisher(tmp_path) for _ in range(FSDP * TP)]

    def publish(collective: Collective) -> list[Any]:
        rank = collective.rank
        both = (states(rank, FSDP, TP, salt=salt) for salt in (1, 2))
        return [publishers[rank].publish(one, one["extra_states"]["salt"]).result(60) for one in both]

    with tuned(tiled_rows=0, all_tables_bytes=0, catalog_group_bytes=1):
        fine(outcomes(ThreadWorld(FSDP * TP), publish))
        path = tmp_path / "step_00000002"
        assert b"bytecheckpoint06" in (path / "metadata.parquet").read_bytes()
        check_tiles(path, 2, 2, 1)
        assert fingerprint(path) == fingerprint(path, recompute=True)


def test_a_tier_keeps_versions_in_memory_and_flushes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"tier+file://{tmp_path}/run"
    with hot_tier(monkeypatch):
        trainer = Trainer(root, 1, full_every=2)
        engine = Engine(trainer.model, root, 1, 0)
        for versions in (0, 1, 1):  # the third version is whole
            fine(trainer.publish())
            assert {report.versions for report in fine(engine.update())} == {versions}
            engine.check()
        trainer.end()
        storage = resolve(f"{root}/step_00000003")
        assert isinstance(storage, TierStorage)
        assert any(name.endswith(".delta") for name, _ in storage.hot.list())
        catalog = storage.hot_folder.catalog()
        assert catalog is not None
        storage.hot_folder.remove_step(catalog)
        assert not any(name.startswith("model/") for name, _ in storage.hot.list())
    durable = Follower(tmp_path / "run")
    states = trainer.model.held(cut_by(1, 0), 0, blank=True)
    assert durable.update(states).step == 3  # type: ignore[union-attr]
    check(states, trainer.model)
    assert run(["verify", str(tmp_path / "run" / "step_00000003")]) == 0
