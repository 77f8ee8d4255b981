"""The benchmark's synthetic jobs, small: the same columns, judged by their results and not by time."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import planning as bench
from benchmarks import planning_saves as saves
from bytecheckpoint.planning.coverage import missing_volume, overlapping
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.planning.replicas import group_equal
from bytecheckpoint.planning.save_plan import plan_save
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.representation.shards import TensorKey


def test_a_small_405b_job_is_written_once_and_level() -> None:
    tp, dp, pp, layers = 2, 5, 2, 4
    rows = bench.dense_405b(tp, dp, pp, layers)
    plan = bench.plan_save(rows, tp * dp * pp)
    first = np.unique(plan.group, return_index=True)[1]
    boxes, element = rows.boxes.take(first), rows.element[first]
    assert len(overlapping(boxes)) == 0
    holders = np.unique(plan.group * 1000 + rows.rank)
    assert np.isin(np.arange(len(boxes)) * 1000 + plan.writer, holders).all()
    assert (np.diff(plan.writer[plan.order]) >= 0).all()

    # Everything is there: the whole of each tensor lacks nothing.
    tensors = int(boxes.tensor.max()) + 1
    total = np.zeros((tensors, 2), np.int64)
    np.maximum.at(total, boxes.tensor, boxes.offsets + boxes.lengths)
    whole = BoxTable(np.arange(tensors), np.zeros_like(total), total)
    assert not missing_volume(whole, intersect(boxes, whole)).any()
    assert whole.volumes().sum() == boxes.volumes().sum()

    # Within one (tp, pp) group all copies of the model are equal in size, so are the optimizer's shares.
    written = np.bincount(plan.writer, boxes.volumes() * element, tp * dp * pp)
    replicas = written.reshape(pp, dp, tp)
    largest = (boxes.volumes() * element)[boxes.tensor < tensors // 4].max()
    assert (np.ptp(replicas, axis=1) <= largest).all()


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_small_fsdp_catalog_serves_other_world_sizes(by_rank: bool) -> None:
    tensors, shards = 7, 50
    catalog = bench.fsdp_catalog(tensors, shards, by_rank=by_rank)
    assert np.unique(group_equal(catalog)).size == len(catalog)
    assert len(overlapping(catalog)) == 0
    wanted = bench.wanted_by(np.arange(33), 33, tensors, 220 * shards)
    found = bench.load(catalog, wanted)
    assert len(found) <= tensors * (shards + 33)
    assert found.volumes().sum() == catalog.volumes().sum()


def test_a_small_405b_job_commits_the_planned_catalog() -> None:
    tp, dp, pp, layers = 2, 5, 2, 4
    world = tp * dp * pp
    rows = bench.dense_405b(tp, dp, pp, layers)
    plan = bench.plan_save(rows, world)
    ranks, lines = saves.play_save(bench.dense_job(rows, layers))
    assert {line.label.partition(":")[0] for line in lines} == {"ranks", "coordinator"}
    assert len(ranks.outcomes) == world
    catalog = decode(ranks.catalog)  # which checks that the rows tile every file
    tensors = np.flatnonzero(catalog.owner == -1)
    stored = np.isin(catalog.boxes.tensor, tensors)
    assert int(stored.sum()) == int(plan.group.max()) + 1 + 1  # the hyperparameters
    assert catalog.find_one(TensorKey("optimizer", "layers.3.mlp.down.weight", "exp_avg_sq")) >= 0
    whole = BoxTable(tensors, np.zeros_like(catalog.shapes[tensors]), catalog.shapes[tensors])
    assert not missing_volume(whole, intersect(catalog.boxes, whole)).any()
    # Every rank's own random state.
    assert [len(catalog.of_state(state)) for state in ("extra_states", "model")] == [world, layers * 9 + 2]


def test_a_small_fsdp_checkpoint_is_planned_and_its_catalog_survives() -> None:
    tensors, shards = 7, 50
    boxes = bench.fsdp_catalog(tensors, shards)
    plan = plan_save(saves.fsdp_tables(boxes, tensors, shards))
    catalog = saves.fsdp_file(boxes, tensors, shards)
    again = decode(encode(catalog))
    assert (plan.rank == np.repeat(np.arange(shards), tensors)).all()
    order = np.lexsort((plan.boxes.offsets[:, 0], plan.boxes.tensor))
    for ours, theirs in ((plan.boxes.offsets[order], boxes.offsets), (plan.nbytes[order], again.byte_length)):
        assert (ours == theirs).all()
    # The files are laid out as the plan has them.
    data_offset = again.files[0].data_offset
    assert (plan.offset[order] + data_offset == again.byte_offset).all() and (plan.file[order] == again.file).all()
