"""Saves with and without fingerprints, and fingerprints of live states and of checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm
from benchmarks.state import Tensors, dense, size_of
from bytecheckpoint.engine.tensor_bytes import flat_bytes
from bytecheckpoint.tools import compare, fingerprint

__all__ = ["fingerprints"]


def fingerprints(bench: Bench) -> None:
    """Measure what fingerprints cost in a save, and what they spare in a comparison."""
    state = dense(bench.options.nbytes)
    path = bench.folder / "step"
    for name in ("one", "two"):
        _save(f"{bench.folder}/{name}", state, fingerprint=True)()
    arms = [
        Arm("save", _save(path, state, fingerprint=False)),
        Arm("save with fingerprints", _save(path, state, fingerprint=True)),
        Arm("fingerprint of the live state", lambda: bool(fingerprint({"model": state})) and None),
        Arm("fingerprint of the files", lambda: bool(fingerprint(path, recompute=True)) and None),
        Arm("xxh3 of each tensor", lambda: _hash(state)),
        Arm("diff by fingerprints", lambda: _equal(bench, fingerprints=True)),
        Arm("diff, all read", lambda: _equal(bench, fingerprints=False)),
    ]
    bench.measure("fingerprints", size_of(state), arms)
    bench.clear_all()


def _save(path: object, state: Tensors, *, fingerprint: bool) -> Callable[[], None]:
    def run() -> None:
        bytecheckpoint.configure(fingerprint=fingerprint)
        bytecheckpoint.save(str(path), {"model": state}).result()
        bytecheckpoint.configure(fingerprint=False)

    return run


def _hash(state: Tensors) -> None:
    for tensor in state.values():
        xxhash.xxh3_128_digest(flat_bytes(tensor).numpy())


def _equal(bench: Bench, *, fingerprints: bool) -> None:
    assert compare(bench.folder / "one", bench.folder / "two", fingerprints=fingerprints).equal
