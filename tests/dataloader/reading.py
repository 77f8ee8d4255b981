"""Sources read as a loader reads them."""

from __future__ import annotations

import pickle
import random
from typing import Any

from bytecheckpoint.dataloader.sources.base import Cursor, Source


def drain(cursor: Cursor, most: int = 10**9) -> list[Any]:
    documents: list[Any] = []
    while len(documents) < most:
        try:
            documents.append(next(cursor))
        except StopIteration:
            break
    return documents


def epoch_of(source: Source, streams: int, epoch: int = 0, seed: int = 0) -> list[Any]:
    return [document for s in range(streams) for document in drain(source.cursor(s, streams, epoch, seed))]


def assert_exact_restarts(source: Source, streams: int, epoch: int = 1, *, trials: int = 4) -> list[Any]:
    """Read all streams in turns, go on from their states with a worker's copy, and return the documents by stream."""
    whole = [drain(source.cursor(s, streams, epoch, 7)) for s in range(streams)]
    copied = pickle.loads(pickle.dumps(source))
    chance = random.Random(streams)
    for _ in range(trials):
        cursors = [source.cursor(s, streams, epoch, 7) for s in range(streams)]
        read: list[list[Any]] = [[] for _ in cursors]
        for _ in range(3):  # the second restart is from a cursor that went on from a state itself
            for _ in range(chance.randrange(len(whole[0]) + 1)):
                stream = chance.randrange(streams)
                read[stream] += drain(cursors[stream], 1)
            states = pickle.loads(pickle.dumps([cursor.state() for cursor in cursors]))
            cursors = [copied.cursor(s, streams, epoch, 7, state) for s, state in enumerate(states)]
        for stream, cursor in enumerate(cursors):
            assert read[stream] + drain(cursor) == whole[stream]
    return whole
