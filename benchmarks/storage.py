"""Throughput of the storages: `python -m benchmarks.storage [--short] [--places hdfs hdfs-limited s3 ...] [--size MIB]`.

Measures writes and reads of one file and of many, by 1 to 16 threads, beside the storage's own client or plain tool in
the same run; the bytes that a load reads and needs; and the requests to the NameNode. Places that end in "-limited" are
behind a proxy that limits the bytes per second of each connection. scripts/install-servers.sh installs the servers, which
the tests use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

import bytecheckpoint
from benchmarks.measure import Arm, Extras, Result, World, measure
from benchmarks.report import table
from benchmarks.storage_places import PLACES, Peer, Place
from bytecheckpoint import loading
from bytecheckpoint._distribution import DISTRIBUTION
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.testing import content
from bytecheckpoint.storage.testing.wrappers import Meter, MeteredStorage

__all__ = ["main"]

_CHUNK = 8 << 20
_FILES = 32


class Bench:
    """The cases for one place.

    Args:
        place: the storage.
        nbytes: bytes of the file, or of all files together.
        rounds: repetitions of each arm.
        threads: numbers of threads.
    """

    def __init__(self, place: Place, nbytes: int, rounds: int, threads: list[int]) -> None:
        self._place = place
        self._rounds = rounds
        self._threads = threads
        self._data = content(nbytes)
        self._out = np.ones_like(self._data)
        self._number = 0

    def run(self) -> Iterator[Result]:
        """Run all cases, one after the other."""
        yield from self._measure("write one file", self._write_arms())
        yield from self._measure("read one file", self._read_arms())
        yield from self._measure("write many files", self._write_many_arms())
        yield from self._measure("read many files", self._read_many_arms())
        yield from self._measure("load", [Arm("bytecheckpoint", *self._load())])
        if self._place.operations is not None:
            arms = self._counted_arms(self._place.operations)
            yield from measure(World(), "requests per file", self._place.name, 0, arms, 1, warm=True)

    def _measure(self, case: str, arms: list[Arm]) -> list[Result]:
        return measure(World(), case, self._place.name, self._data.nbytes, arms, self._rounds)

    # --- one file ---------------------------------------------------------------------------------------------

    def _write(self, storage: Storage, name: str, threads: int) -> None:
        """Write a file as the engine does: chunks from several threads, the first bytes last."""
        data = self._data
        writer = storage.create(NewFile(name, len(data), stable=True))

        def write_chunk(start: int) -> None:
            writer.write_at(start, [memoryview(data)[start : start + _CHUNK]])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write_chunk, range(_CHUNK, len(data), _CHUNK)))
        write_chunk(0)
        writer.finish(len(data))
        storage.sync([name])

    def _write_arms(self) -> list[Arm]:
        arms = []
        for threads in self._threads:
            url = self._place.fresh()

            def run(url: str = url, threads: int = threads) -> None:
                self._write(resolve(url), "model/file", threads)

            arms.append(Arm(self._name(threads), run, after=lambda url=url: _empty(url)))
        return arms + [self._peer_arm(peer.name, peer.write, peer) for peer in self._place.peers]

    def _name(self, threads: int) -> str:
        return (
            "bytecheckpoint"
            if threads == self._threads[-1]
            else f"bytecheckpoint, {threads} thread{'s' if threads > 1 else ''}"
        )

    def _peer_arm(self, name: str, call: Callable[[str, object], None], peer: Peer) -> Arm:
        target = peer.target()
        return Arm(name, lambda: call(target, self._data), after=lambda: peer.remove(target))

    def _read_arms(self) -> list[Arm]:
        url = self._place.fresh()
        self._write(resolve(url), "model/file", self._threads[-1])
        arms = []
        for threads in self._threads:

            def run(threads: int = threads) -> None:
                reader = resolve(url).open("model/file")
                step = max(reader.preferred_bytes, _CHUNK)

                def read_chunk(start: int) -> None:
                    reader.read_into(start, [memoryview(self._out)[start : start + step]])

                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read_chunk, range(0, reader.size, step)))
                reader.close()

            arms.append(Arm(self._name(threads), run, before=self._blank, after=self._check))
        for peer in self._place.peers:
            target = peer.target()
            peer.write(target, self._data)
            arms.append(Arm(peer.name, lambda peer=peer, target=target: peer.read(target, self._out)))
        return arms

    def _blank(self) -> None:
        self._out[:] = 1

    def _check(self) -> None:
        assert np.array_equal(self._out, self._data), "what was read is not what was written"

    # --- many files -------------------------------------------------------------------------------------------

    def _part(self, number: int) -> NDArray[np.uint8]:
        length = self._data.nbytes // _FILES
        return self._data[number * length : (number + 1) * length]

    def _write_many(self, storage: Storage, threads: int) -> None:
        def write_file(number: int) -> None:
            part = self._part(number)
            writer = storage.create(NewFile(f"model/{number}", len(part), stable=True))
            writer.write_at(0, [memoryview(part)])
            writer.finish(len(part))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write_file, range(_FILES)))
        storage.sync([f"model/{number}" for number in range(_FILES)])

    def _write_many_arms(self) -> list[Arm]:
        arms = []
        for threads in self._threads:
            url = self._place.fresh()

            def run(url: str = url, threads: int = threads) -> None:
                self._write_many(resolve(url), threads)

            arms.append(Arm(self._name(threads), run, after=lambda url=url: _empty(url)))
        for peer in self._place.peers:
            targets = [peer.target() for _ in range(_FILES)]

            def write(peer: Peer = peer, targets: list[str] = targets) -> None:
                peer.write_many(targets, [self._part(number) for number in range(_FILES)])

            arms.append(Arm(peer.name, write, after=lambda peer=peer, targets=targets: [*map(peer.remove, targets)]))
        return arms

    def _read_many_arms(self) -> list[Arm]:
        url = self._place.fresh()
        self._write_many(resolve(url), self._threads[-1])
        arms = []
        for threads in self._threads:

            def run(threads: int = threads) -> None:
                storage = resolve(url)

                def read_file(number: int) -> None:
                    length = self._data.nbytes // _FILES
                    reader = storage.open(f"model/{number}")
                    reader.read_into(0, [memoryview(self._out)[number * length : (number + 1) * length]])
                    reader.close()

                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read_file, range(_FILES)))

            arms.append(Arm(self._name(threads), run, before=self._blank, after=self._check))
        outs = np.split(self._out, _FILES)
        for peer in self._place.peers:
            targets = [peer.target() for _ in range(_FILES)]
            peer.write_many(targets, [self._part(number) for number in range(_FILES)])
            arms.append(Arm(peer.name, lambda peer=peer, targets=targets: peer.read_many(targets, outs)))
        return arms

    # --- requests to the server -------------------------------------------------------------------------

    def _counted_arms(self, operations: Callable[[], Mapping[str, int]]) -> list[Arm]:
        def counted(call: Callable[[], object], files: int) -> Callable[[], Extras]:
            def run() -> Extras:
                before = operations()
                call()
                after = operations()
                found = {name: after[name] - before.get(name, 0) for name in after}
                return {name: count / files for name, count in found.items() if count}

            return run

        url, read = self._place.fresh(), self._place.fresh()
        self._write(resolve(read), "model/file", 1)
        reader = Arm("bytecheckpoint, read", counted(lambda: resolve(read).read("model/file"), 1))
        arms = [
            Arm("bytecheckpoint, one file", counted(lambda: self._write(resolve(url), "model/file", 4), 1)),
            Arm(f"bytecheckpoint, {_FILES} files", counted(lambda: self._write_many(resolve(url), 4), _FILES)),
            reader,
        ]
        for arm in arms[:2]:
            arm.after = lambda: _empty(url)
        for peer in self._place.peers:
            target = peer.target()
            write = counted(lambda peer=peer, target=target: peer.write(target, self._data), 1)
            arms.append(
                Arm(f"{peer.name.partition(',')[0]}, one file", write, after=lambda p=peer, t=target: p.remove(t))
            )
        return arms

    # --- a load -----------------------------------------------------------------------------------------------

    def _load(self) -> tuple[Callable[[], Extras], Callable[[], None]]:
        """Return a load through a meter, which reports the bytes that it read and those that the files hold."""
        url = self._place.fresh()
        tensor = torch.from_numpy(self._data.view(np.float32).copy()).reshape(64, -1)
        bytecheckpoint.save(url, {"model": {"w": tensor, "b": tensor[0].clone()}})
        stored = sum(size for name, size in resolve(url).list() if "/" in name)
        loaded = {"w": torch.empty_like(tensor), "b": torch.empty_like(tensor[0])}

        def run() -> Extras:
            meter = Meter()
            real = loading.resolve_storage
            loading.resolve_storage = lambda path: MeteredStorage(real(path), meter)
            try:
                bytecheckpoint.load(url, {"model": loaded})
            finally:
                loading.resolve_storage = real
            assert meter.bytes("read_into") <= stored, "bytes were read twice"
            return {"stored bytes": float(stored), "read bytes": float(meter.bytes("read_into"))}

        def before() -> None:
            for value in loaded.values():
                value.zero_()

        return run, before


def _empty(url: str) -> None:
    storage = resolve(url)
    storage.delete([name for name, _ in storage.list()])


def _measure_place(name: str, nbytes: int, rounds: int, threads: list[int]) -> list[Result]:
    folder = Path(tempfile.mkdtemp(prefix="bench-storage-"))
    try:
        with ExitStack() as stack:
            place = stack.enter_context(PLACES[name](folder))
            return list(Bench(place, nbytes, rounds, threads).run())
    except pytest.skip.Exception as reason:
        print(f"{name}: not measured, {reason}")
        return []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _about(nbytes: int) -> dict[str, Any]:
    packages = (DISTRIBUTION, "hdfs-native", "obstore")
    return {
        "versions": {package: version(package) for package in packages},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "state_mib": nbytes >> 20,
        "load_average": [round(value, 1) for value in os.getloadavg()],
    }


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("--short", action="store_true", help="64 MiB, two rounds")
    parser.add_argument("--size", type=int, default=0, help="MiB of the file, or of all files together")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--places", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    arguments = parser.parse_args()
    nbytes = (arguments.size or (64 if arguments.short else 256)) << 20
    rounds = arguments.rounds or (2 if arguments.short else 5)
    results: list[Result] = []
    for name in arguments.places:
        found = _measure_place(name, nbytes, rounds, arguments.threads)
        results += found
        about = _about(nbytes)
        if found:
            table(found, about)
        # A place takes minutes: the results so far survive the interruption of a later one.
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {"about": about, "results": [asdict(r) for r in results]}
        (arguments.out / "storage.json").write_text(json.dumps(record, indent=1))
    return int(any(r.error for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
