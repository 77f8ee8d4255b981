"""The captured state of one rank, and the layout of its files."""

from __future__ import annotations

import numpy as np
import torch

from bytecheckpoint.planning.local_table import describe
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.names import new_generation
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.saving.capture import CapturedState, content_digest, signature
from bytecheckpoint.saving.file_layout import FileOrigin, lay_out_rows, lay_out_values
from bytecheckpoint.saving.messages import escaped, unescaped

ORIGIN = FileOrigin(rank=3, world_size=4, generation=new_generation("world", 1))


def shard(name: str, data: torch.Tensor, state: str = "model", *, by_content: bool = False) -> LiveShard:
    shape = tuple(data.shape)
    dtype = str(data.dtype).removeprefix("torch.")
    return LiveShard(TensorKey(state, name), dtype, shape, (0,) * len(shape), shape, data, by_content=by_content)


def test_shards_and_values_are_told_apart() -> None:
    own = shard("rng", torch.ones(3), "extra_states", by_content=True)
    states = [LiveState("model", [shard("w", torch.ones(2))]), LiveState("extra_states", [own], tree=b"tree")]
    state = CapturedState.of(states)
    assert [s.key.fqn for s in state.shards] == ["w"]
    assert [v.key for v in state.values] == [own.key, TensorKey("extra_states", "", VALUES_SLOT)]
    assert [v.nbytes for v in state.values] == [12, 4]
    record = state.values[0].record((1, 64))
    assert (record.file, record.offset, record.nbytes, record.shape) == (1, 64, 12, (3,))
    assert state.values[0].record().file == -1
    state.release()
    assert not state.shards and not state.values


def test_a_digest_knows_dtype_shape_and_bytes() -> None:
    digests = {
        content_digest(torch.zeros(4), "float32"),
        content_digest(torch.zeros(2, 2), "float32"),
        content_digest(torch.zeros(4, dtype=torch.int32), "int32"),
        content_digest(torch.ones(4), "float32"),
    }
    assert len(digests) == 4
    assert content_digest(torch.zeros(4), "float32") in digests


def test_a_signature_is_that_of_the_layout() -> None:
    one, other = describe([shard("w", torch.zeros(4))]), describe([shard("w", torch.ones(4))])
    assert signature(one) == signature(other), "content does not matter"
    assert signature(describe([shard("w", torch.zeros(5))])) != signature(one)
    assert signature(describe([shard("v", torch.zeros(4))])) != signature(one)


def test_each_state_has_a_file_and_data_sections_are_aligned() -> None:
    shards = [shard("a", torch.ones(3)), shard("b", torch.ones(2)), shard("c", torch.ones(5), "optimizer")]
    files, sources = lay_out_rows(shards, np.arange(3), ORIGIN)
    assert [(f.state, f.part, f.values) for f in files] == [("model", 0, False), ("optimizer", 0, False)]
    assert [(f.image.start, f.image.nbytes, f.image.shards) for f in files] == [(0, 20, [0, 1]), (4096, 20, [2])]
    assert files[0].image.starts.tolist() == [0, 12]
    assert sources == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_values_stand_largest_elements_first_and_know_their_places() -> None:
    tensors = [torch.ones(3, dtype=torch.uint8), torch.ones(2, dtype=torch.float64), torch.ones(1)]
    owned = [shard(str(i), t, "extra_states", by_content=True) for i, t in enumerate(tensors)]
    values = CapturedState.of([LiveState("extra_states", owned)]).values
    files, places = lay_out_values(values, ORIGIN, first=7, position=8192, part=1)
    assert [(f.state, f.part, f.values, f.image.start) for f in files] == [("extra_states", 1, True, 8192)]
    assert files[0].image.shards == [8, 9, 7]
    assert places == [(0, 20), (0, 0), (0, 16)]


def test_keys_travel_with_any_name() -> None:
    key = TensorKey("model", "a\udc80/b", "é")
    assert unescaped(escaped(key)) == key
    "".join(escaped(key)).encode()
