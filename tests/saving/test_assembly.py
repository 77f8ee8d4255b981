"""Views that ask for whole tensors: ranks join the boxes of cut ones before they write, or all of them do not."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import Catalog, TensorTable, row_order
from bytecheckpoint.representation.dtypes import safetensors_code
from bytecheckpoint.saving.messages import SaveStep, reply_tag, tag
from bytecheckpoint.saving.step_view import StepView, ViewOfSave
from bytecheckpoint.tools import repair, verify
from bytecheckpoint.tuning import tuned
from bytecheckpoint.world import world_of
from tests.support.catalogs import catalog_at
from tests.support.layouts import Leaf, bits, coded, grid_boxes
from tests.support.settings import using
from tests.support.variants import crossed

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
_DTYPES += [torch.bool, torch.int8, torch.int16, torch.int64, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _settings() -> Any:
    with using(writer="thread", timeout=20.0):
        yield


class Whole(StepView, ViewOfSave):
    """Asks for whole tensors in the state "model", and has no files."""

    whole = "model"

    def of(self, states: Mapping[str, object], selection: Any) -> ViewOfSave:
        return self

    def describe(self, catalog: Catalog, named: Any) -> tuple[dict[str, bytes], Catalog]:
        return {}, catalog

    def write(self, *_: Any) -> None:
        raise AssertionError("there is nothing to write")


def rows_of(path: Path, state: str) -> dict[str, int]:
    """Return the number of rows of each tensor of a state."""
    catalog = catalog_at(path)
    found = Counter(catalog.fqn[t] for t in catalog.boxes.tensor.tolist() if catalog.state[t] == state)
    return {fqn: count for fqn, count in found.items() if fqn}  # the others are trees of plain values


_Layout = dict[str, tuple[tuple[int, ...], torch.dtype, list[list[Any]]]]


def layout(choose: random.Random, world: int, *, many: bool = False) -> _Layout:
    """Return tensors with random shapes and dtypes, cut by random grids; some boxes are on several ranks, some empty."""
    found = {}
    for number in range(choose.randint(1, 7)):
        shape = tuple(choose.randint(0 if choose.random() < 0.1 else 1, 9) for _ in range(choose.randint(0, 3)))
        if many:  # tensors of equal rows
            shape = (choose.randint(1, 9), *choose.choice(((4,), (2, 3), ())))
        cuts = [sorted(choose.randint(0, n) for _ in range(choose.choice((0, 0, 1, 2)))) for n in shape]
        boxes: list[list[Any]] = [[] for _ in range(world)]
        for box in grid_boxes(shape, cuts):
            for rank in choose.sample(range(world), choose.randint(1, world)):
                boxes[rank].append(box)
        found[f"w{number}"] = shape, choose.choice(_DTYPES[:: 5 if many else 1]), boxes
    return found


def states(tensors: Mapping[str, Any], rank: int, *, strided: bool = False) -> dict[str, Any]:
    """Return a model and an optimizer of one layout."""
    found: dict[str, Any] = {}
    for salt, state in enumerate(("model", "moments")):
        found[state] = {
            name: Leaf(shape, boxes[rank]).fill(coded(shape, dtype, salt), strided)
            for name, (shape, dtype, boxes) in tensors.items()
            if boxes[rank]
        }
    return {**found, "extra_states": {"rank": rank}}


@pytest.mark.parametrize(("seed", "mode"), crossed(range(6), ["sync", "async", "background", "upload"]))
def test_cut_tensors_lie_whole(tmp_path: Path, seed: int, mode: str) -> None:
    choose = random.Random(f"{seed}{mode}")
    world = choose.randint(1, 4)
    tensors = layout(choose, world)
    options: dict[str, Any] = {"async_checkpoint": True} if mode in ("async", "background") else {}
    url = f"fsspec+file://{tmp_path}" if mode == "upload" else str(tmp_path)
    if mode == "background":
        options["staging"] = "background"

    def save(collective: Collective) -> list[Any]:
        found = []
        for name in ("plain", "first", "second"):
            own = states(tensors, collective.rank, strided=choose.random() < 0.5)
            view = {} if name == "plain" else {"view": Whole()}
            report = bytecheckpoint.save(f"{url}/{name}", own, **view, **options).result()
            found.append(report)
        return found

    sizes = {"assembly_bytes": choose.choice((1, 40, 1 << 20)), "max_entries_per_file": choose.choice((2, 1000))}
    with tuned(**sizes), using(fingerprint=True):
        reports = ThreadWorld(world).run(save, timeout=60)
    assert [[report.plan_cached for report in found] for found in reports] == [[False, False, True]] * world
    assert all(report.fingerprint == reports[0][0].fingerprint for found in reports for report in found)
    for name in ("first", "second"):
        assert set(rows_of(tmp_path / name, "model").values()) <= {1}
        assert rows_of(tmp_path / name, "moments") == rows_of(tmp_path / "plain", "moments")
        assert verify(tmp_path / name).ok
        (tmp_path / name / "metadata.parquet").unlink()
        repair(tmp_path / name)
        checkpoint = bytecheckpoint.open(tmp_path / name)
        for salt, state in enumerate(("model", "moments")):
            for fqn, (shape, dtype, _) in tensors.items():
                assert torch.equal(bits(checkpoint[f"{state}/{fqn}"][...]), bits(coded(shape, dtype, salt))), fqn
    nbytes = [sum(f.stat().st_size for f in (tmp_path / name).rglob("*.safetensors")) for name in ("plain", "second")]
    assert nbytes[1] <= nbytes[0]


class Named(Whole):
    """Asks for tensors of another program: rows of those of "model" in turn, joined ones, and transposed ones.

    Args:
        full: whole tensors of the state.
        seed: seed of the choices.
    """

    names = "another program's"

    def __init__(self, full: Mapping[str, torch.Tensor], seed: object) -> None:
        self.full = full
        self.wanted: dict[str, torch.Tensor] = {}
        self.files: list[dict[str, str]] = []  # of each save, on rank 0
        choose = random.Random(f"names{seed}")
        slabs: list[tuple[str, list[tuple[str, int, int]]]] = []
        for name in sorted(full):
            cuts = sorted({0, full[name].shape[0], *(choose.randint(0, full[name].shape[0]) for _ in range(3))})
            pieces = [(name, a, b) for a, b in itertools.pairwise(cuts)]
            pieces = [piece for piece in pieces if choose.random() < 0.9]
            choose.shuffle(pieces)
            count = choose.randint(1, max(len(pieces), 1))
            slabs += [(f"hf.{name}.{k}", pieces[k::count]) for k in range(count)]
        fits: dict[Any, list[Any]] = {}
        for new, pieces in slabs:
            if pieces:
                fits.setdefault((full[pieces[0][0]].dtype, full[pieces[0][0]].shape[1:]), []).append((new, pieces))
        self._tensors = []
        for group in fits.values():
            while group:
                (new, pieces), *group = group
                if group and choose.random() < 0.3:
                    pieces, group = pieces + group[0][1], group[1:]
                self._tensors.append((new, pieces, choose.random() < 0.2 and full[pieces[0][0]].ndim > 1))
        for new, pieces, turned in self._tensors:
            if not turned and safetensors_code(str(full[pieces[0][0]].dtype).removeprefix("torch.")) is not None:
                self.wanted[new] = torch.cat([full[name][a:b] for name, a, b in pieces])

    def shown(self, catalog: Catalog) -> Catalog:
        """Return the tensors as boxes of the stored ones."""
        places = {catalog.fqn[k]: int(catalog.byte_offset[k]) for k in range(catalog.count)}
        boxes, offsets, strides, shapes = [], [], [], []
        for number, (_, pieces, turned) in enumerate(self._tensors):
            rest, at = list(self.full[pieces[0][0]].shape[1:]), 0
            for name, a, b in pieces:
                tensor = self.full[name]
                boxes.append((number, [at, *[0] * len(rest)], [b - a, *rest]))
                offsets.append(places[name] + a * math.prod(rest) * tensor.element_size())
                strides.append([*tensor.stride()][::-1] if turned else [*tensor.contiguous().stride()])
                at += b - a
            shapes.append([at, *rest])
        width = max(catalog.boxes.ndim, 1)
        count = len(shapes)
        table = TensorTable.of(
            states=["model"] * count,
            fqns=[new for new, _, _ in self._tensors],
            slots=[""] * count,
            dtypes=[str(self.full[pieces[0][0]].dtype).removeprefix("torch.") for _, pieces, _ in self._tensors],
            shapes=np.array([shape + [1] * (width - len(shape)) for shape in shapes], np.int64).reshape(count, width),
            ndims=np.array([len(shape) for shape in shapes], np.int64),
            owner=np.full(count, -1, np.int32),
            requires_grad=np.zeros(count, bool),
        )
        none = np.zeros(len(boxes), np.int64)
        rows = BoxTable.build([b[0] for b in boxes], [b[1] for b in boxes], [b[2] for b in boxes], width)
        order = row_order(rows)
        order = np.arange(len(boxes)) if order is None else order
        made = Catalog.build(
            table, boxes=rows, file=none.astype(np.int32), byte_offset=np.array(offsets, np.int64), byte_length=none,
            files=catalog.files, sums=catalog.file_sums,
        )  # fmt: skip
        steps = np.array([s + [1] * (width - len(s)) for s in strides], np.int64).reshape(len(boxes), width)
        return replace(made, strides=steps[order])

    def describe(self, catalog: Catalog, named: Any) -> tuple[dict[str, bytes], Catalog]:
        self.files.append(dict(named()))
        return {}, catalog


@pytest.mark.parametrize(("seed", "mode"), crossed(range(6), ["sync", "async", "background", "upload"]))
def test_files_hold_tensors_of_another_program(tmp_path: Path, seed: int, mode: str) -> None:
    choose = random.Random(f"{seed}{mode}")
    world = choose.randint(1, 4)
    tensors = {
        name: found for name, found in layout(choose, world, many=True).items() if 0 not in found[0] and len(found[0])
    }
    full = {name: coded(shape, dtype, 0) for name, (shape, dtype, _) in tensors.items()}
    options: dict[str, Any] = {"async_checkpoint": True} if mode in ("async", "background") else {}
    url = f"fsspec+file://{tmp_path}" if mode == "upload" else str(tmp_path)
    if mode == "background":
        options["staging"] = "background"
    views = [Named(full, seed) for _ in range(world)]

    def save(collective: Collective) -> list[Any]:
        own = [states(tensors, collective.rank, strided=strided) for strided in (False, True)]
        view = views[collective.rank]
        reports = [bytecheckpoint.save(f"{url}/{k}", own[k], view=view, **options).result() for k in (0, 1)]
        return [*reports, bytecheckpoint.save(f"{url}/plain", own[0]).result()]

    sizes = {"assembly_bytes": choose.choice((1, 40, 1 << 20)), "max_entries_per_file": choose.choice((2, 1000))}
    with tuned(**sizes), using(fingerprint=True):
        reports = ThreadWorld(world).run(save, timeout=60)
    assert all(report.fingerprint == reports[0][2].fingerprint for found in reports for report in found)
    assert [report.plan_cached for report in reports[0]] == [False, True, False]
    view = views[0]
    for k, files in enumerate(view.files):
        found: dict[str, torch.Tensor] = {}
        for file in {*files.values()}:
            found |= load_file(tmp_path / str(k) / file)
        assert files.keys() == view.wanted.keys()
        assert found.keys() == view.wanted.keys()
        assert not [name for name, value in found.items() if not torch.equal(bits(value), bits(view.wanted[name]))]
        assert verify(tmp_path / str(k)).ok
        for again in (False, True):
            if again:
                (tmp_path / str(k) / "metadata.parquet").unlink()
                repair(tmp_path / str(k))
            checkpoint = bytecheckpoint.open(tmp_path / str(k))
            for salt, state in enumerate(("model", "moments")):
                for fqn, (shape, dtype, _) in tensors.items():
                    assert torch.equal(bits(checkpoint[f"{state}/{fqn}"][...]), bits(coded(shape, dtype, salt))), fqn
        assert catalog_bytes(tmp_path / str(k)) == catalog_bytes(tmp_path / "plain")


def catalog_bytes(path: Path) -> int:
    return int(catalog_at(path).byte_length.sum())


def rows(rank: int, world: int, salt: int = 0) -> dict[str, Any]:
    """Return a tensor that is cut by rows, one cut by columns and one on all ranks."""
    found: dict[str, Any] = {"copy": coded((100,), torch.int64, salt)}
    for name, dim in (("rows", 0), ("columns", 1)):
        full = coded((4 * world, 4 * world), torch.float32, salt)
        offsets, lengths = [0, 0], [4 * world, 4 * world]
        offsets[dim], lengths[dim] = 4 * rank, 4
        found[name] = Leaf(tuple(full.shape), [(tuple(offsets), tuple(lengths))]).fill(full, False)
    return found


def check(path: Path, world: int, salt: int, whole: bool) -> None:
    checkpoint = bytecheckpoint.open(path)
    for name in ("rows", "columns"):
        assert torch.equal(checkpoint[f"model/{name}"][...], coded((4 * world, 4 * world), torch.float32, salt))
    assert torch.equal(checkpoint["model/copy"][...], coded((100,), torch.int64, salt))
    assert set(rows_of(path, "model").values()) == ({1} if whole else {1, world})
    assert verify(path).ok


@pytest.mark.parametrize("staging", ["blocking", "background", None])
def test_all_ranks_write_boxes_if_one_has_a_new_state(tmp_path: Path, staging: str | None) -> None:
    """Rank 1 has no cached plan at step 1; the others have staged for an assembly by then."""
    options: dict[str, Any] = {} if staging is None else {"async_checkpoint": True, "staging": staging}

    def run(collective: Collective) -> list[bool]:
        cached = []
        for step in range(4):
            model = rows(collective.rank, 3, step)
            if collective.rank == 1 and step == 1:
                model["late"] = coded((7,), torch.float64, step)
            states = {"model": model, "extra_states": {"step": step, "rank": collective.rank}}
            handle = bytecheckpoint.save(tmp_path / str(step), states, view=Whole(), **options)
            cached.append(handle.result().plan_cached)
        return cached

    assert ThreadWorld(3).run(run, timeout=60) == [
        [False, True, True, True],
        [False, False, True, True],
        [False, True, True, True],
    ]
    for step in range(4):
        check(tmp_path / str(step), 3, step, whole=step != 1)
        assert ("model/late" in bytecheckpoint.open(tmp_path / str(step))) == (step == 1)


def test_all_ranks_write_boxes_if_one_gives_no_view(tmp_path: Path) -> None:
    def run(collective: Collective) -> None:
        for step in range(5):
            view = (
                Whole() if step in (0, 4) or (step > 1 and collective.rank) else None
            )  # a cached plan without, and one with
            bytecheckpoint.save(tmp_path / str(step), {"model": rows(collective.rank, 2, step)}, view=view)

    ThreadWorld(2).run(run, timeout=60)
    for step in range(5):
        check(tmp_path / str(step), 2, step, whole=step in (0, 4))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_ranks_write_boxes_if_one_lacks_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    limits = {"rank": 1}

    def run(collective: Collective) -> None:
        pools = world_of(collective).resources.pools
        real = {name: getattr(pools, name) for name in ("acquire_whole", "acquire_joining")}

        def acquire(name: str, *args: Any) -> Any:
            return None if collective.rank == limits["rank"] else real[name](*args)

        for name in real:
            setattr(pools, name, partial(acquire, name))
        for step in range(3):
            if step == 2:
                limits["rank"] = -1
            states = {"model": rows(collective.rank, 2, step)}
            bytecheckpoint.save(tmp_path / str(step), states, view=Whole(), async_checkpoint=mode == "async").result()

    ThreadWorld(2).run(run, timeout=60)
    for step in range(3):
        check(tmp_path / str(step), 2, step, whole=step == 2)
    assert caplog.text.count("rank 1 lacks the staging memory") == 2


@pytest.mark.parametrize("options", [{}, {"async_checkpoint": True}])
def test_a_rank_may_hold_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(collective: Collective) -> None:
        states = {"model": rows(collective.rank, 2) if collective.rank < 2 else {}}
        bytecheckpoint.save(tmp_path, states, view=Whole(), **options).result()

    ThreadWorld(3).run(run, timeout=60)
    check(tmp_path, 2, 0, whole=True)


def test_a_cached_plan_needs_one_message_more(tmp_path: Path) -> None:
    sent: list[str] = []

    def run(collective: Collective) -> None:
        original = collective.send

        def send(to: int, name: str, payload: bytes) -> None:
            sent.append(name)
            original(to, name, payload)

        collective.send = send  # type: ignore[method-assign]
        for step in range(2):
            bytecheckpoint.save(tmp_path / str(step), {"model": rows(collective.rank, 3, step)}, view=Whole())

    ThreadWorld(3).run(run, timeout=60)
    steps = [
        (1, SaveStep.FIRST),
        (1, SaveStep.REPORT),
        (1, SaveStep.ASSEMBLY),
        (2, SaveStep.FIRST),
        (2, SaveStep.ASSEMBLY),
    ]
    messages = Counter(name for name in sent if "/assembly/" not in name or name.endswith("/reply"))
    assert messages == {name(*step): 3 for step in steps for name in (tag, reply_tag)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_while_tensors_are_joined_ends_the_save(tmp_path: Path, rank: int) -> None:
    failing = {"on": True}

    def run(collective: Collective) -> list[str]:
        original, messages = collective.exchange, []

        def exchange(*args: Any, **options: Any) -> None:
            if failing["on"] and collective.rank == rank:
                raise bytecheckpoint.CheckpointError("the network is gone")
            original(*args, **options)

        collective.exchange = exchange  # type: ignore[method-assign]
        for step in range(2):
            states = {"model": rows(collective.rank, 2, step)}
            try:
                bytecheckpoint.save(tmp_path / str(step), states, view=Whole())
            except bytecheckpoint.CheckpointError as error:
                messages.append(str(error))
            failing["on"] = False
        return messages

    found = ThreadWorld(2).run(run, timeout=60)
    assert all(len(messages) == 1 for messages in found), found
    assert "the network is gone" in found[rank][0]
    assert not (tmp_path / "0" / "metadata.parquet").exists()
    assert not list((tmp_path / "0").rglob("*.safetensors"))
    check(tmp_path / "1", 2, 1, whole=True)
