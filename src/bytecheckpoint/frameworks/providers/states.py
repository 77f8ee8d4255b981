"""Capture and load states that are streamed in pieces (`StateProvider`)."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.objects.capture import PROVIDER, encode_value, is_stateful, saved_provider
from bytecheckpoint.frameworks.objects.reader import ValueReader
from bytecheckpoint.frameworks.providers.base import PieceReader, StateProvider
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.representation.shards import LiveState

__all__ = ["capture_provider", "load_provider"]


def capture_provider(state_name: str, live: Any) -> LiveState:
    """Describe the plain values of a provider, which the save asks for pieces later.

    Raises:
        UsageError: the provider lacks a method, or something cannot be stored.
    """
    if not callable(getattr(live, "load_pieces", None)):
        raise UsageError(f"{state_name}: a {type(live).__name__} has __bytecheckpoint_pieces__, and no load_pieces")
    state = LiveState(state_name, provider=live)
    marked = {PROVIDER: type(live).__name__, "state_dict": live.state_dict() if is_stateful(live) else None}
    state.tree = encode_value(state_name, marked, state.shards)
    return state


def load_provider(state_name: str, live: StateProvider, saved: SavedStates, destination: Destination) -> None:
    """Plan the load of a provider: first its plain values, then its pieces, before anything else is installed."""
    tree = saved.tree(state_name)
    if tree is None:
        destination.missing.append(state_name)
        return
    reader = ValueReader(state_name, saved, destination, live)
    marked = reader.read(tree)
    if not saved_provider(marked):
        raise IncompatibleCheckpointError(
            f"{state_name}: the checkpoint holds no pieces for a {type(live).__name__}: load it into an object of the "
            "class that was saved"
        )
    value = marked["state_dict"]
    reader.request_tensors()
    destination.recognized.update(saved.keys(state_name))
    if (value is not None) != is_stateful(live):
        raise IncompatibleCheckpointError(
            f"{state_name}: the checkpoint has {'no' if value is None else 'a'} state_dict, unlike {type(live).__name__}: "
            "load it into an object of the class that was saved"
        )
    pieces = saved.pieces(state_name, reader.keys(), all_ranks=getattr(live, "of_all_ranks", False))
    destination.streamed += pieces
    described = [(p.tensor.key.fqn, dtype_named(p.tensor.dtype), p.tensor.global_shape, p.read) for p in pieces]

    def load() -> None:
        readers = {name: PieceReader(name, dtype, shape, read) for name, dtype, shape, read in described}
        try:
            if is_stateful(live):
                live.load_state_dict(reader.build(value, None))  # type: ignore[attr-defined]
            live.load_pieces(readers)
        except CheckpointError:
            raise
        except Exception as error:  # the program's own methods may raise anything
            raise IncompatibleCheckpointError(
                f"{state_name}: {type(live).__name__} rejects its saved pieces ({type(error).__name__}: {error}); "
                "load them into an object of the class that was saved"
            ) from error
        finally:
            for one in readers.values():
                one.close()

    destination.checks.append(load)
