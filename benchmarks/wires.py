"""Ways to carry messages and arrays between ranks: `python -m benchmarks.wires [--leaves 63] [--mib 256]`.

One process is the root, another one holds all leaves, each on a thread of its own. Printed for this package's sockets and
for gloo, asyncio, gRPC and ZeroMQ (the last two where they are installed: `pip install grpcio pyzmq`):

- gather: the root gets 1 KiB from each leaf and answers each one; the root's microseconds of a core for each leaf.
- bulk: one leaf sends an array, which must lie in the root's memory at the end; core-seconds of both processes per GiB.
- death: a leaf forks a child, as a data loader does, and is killed while the child lives; seconds until the root knows.
- forks: how many of 25 children that are forked from the leaves at work die by a signal.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_MESSAGE = b"m" * 1024
_ROUNDS, _BULKS, _FORKS, _PIECE = 50, 4, 25, 2 << 20
_SECONDS = 30.0


class _Sockets:
    """This package's sockets."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        from bytecheckpoint.collectives.store_collective import StoreCollective

        self._store = _store(address)
        self._collective = StoreCollective(self._store, rank, size, timeout=_SECONDS, host="one")
        self._number = self._bulks = 0

    def gather(self) -> None:
        self._number += 1
        self._collective.gather_scatter(
            f"{self._number}", _MESSAGE, lambda all_: [_MESSAGE] * len(all_), timeout=_SECONDS
        )

    def bulk(self, array: Bytes) -> None:
        self._bulks += 1
        here = self._collective.rank == 0
        self._collective.exchange(
            f"bulk {self._bulks}", {} if here else {0: array}, {1: array} if here else {}, timeout=_SECONDS
        )


class _Gloo:
    """torch.distributed with gloo: a gather and a scatter."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        self._group = dist.ProcessGroupGloo(_store(address), rank, size, timedelta(seconds=_SECONDS))
        self._rank, self._size = rank, size
        self._own = torch.frombuffer(bytearray(_MESSAGE), dtype=torch.uint8)
        self._all = [torch.empty_like(self._own) for _ in range(size)]

    def gather(self) -> None:
        here = self._rank == 0
        self._group.gather([self._all] if here else [], [self._own]).wait()
        self._group.scatter([self._own], [self._all] if here else []).wait()

    def bulk(self, array: Bytes) -> None:
        tensor = torch.from_numpy(array)
        (self._group.recv([tensor], 1, 0) if self._rank == 0 else self._group.send([tensor], 0, 0)).wait()


class _Asyncio:
    """Streams of asyncio, each frame behind its length."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        self._rank = rank
        self._loop = asyncio.new_event_loop()
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._loop.run_until_complete(self._listen(size, address) if rank == 0 else self._connect(address))

    async def _listen(self, size: int, address: str) -> None:
        async def accept(*stream: Any) -> None:
            self._streams.append(stream)  # type: ignore[arg-type]

        self._server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=4 * _PIECE)
        _store(address).set("port", str(self._server.sockets[0].getsockname()[1]))
        while len(self._streams) < size - 1:
            await asyncio.sleep(0.01)

    async def _connect(self, address: str) -> None:
        port = int(_store(address).get("port"))
        self._streams = [await asyncio.open_connection("127.0.0.1", port, limit=4 * _PIECE)]

    def gather(self) -> None:
        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._rank:
                writer.write(_MESSAGE)
            await reader.readexactly(len(_MESSAGE))

        async def all_() -> None:
            await asyncio.gather(*(one(*stream) for stream in self._streams))
            for _, writer in self._streams if self._rank == 0 else ():
                writer.write(_MESSAGE)

        self._loop.run_until_complete(all_())

    def bulk(self, array: Bytes) -> None:
        async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begun = False
            while not begun or done[0] < array.size:
                piece = await reader.read(min(_PIECE, array.size - done[0]))
                if not piece:
                    return
                array[done[0] : done[0] + len(piece)] = np.frombuffer(piece, np.uint8)
                done[0] += len(piece)
                begun = True

        async def send() -> None:
            _, writer = self._streams[0]
            for at in range(0, array.size, _PIECE):
                writer.write(memoryview(array[at : at + _PIECE]))
                await writer.drain()

        async def first() -> None:
            # Whichever leaf sends.
            tasks = [asyncio.ensure_future(receive(*stream)) for stream in self._streams]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        done = [0]
        self._loop.run_until_complete(send() if self._rank else first())


class _Grpc:
    """gRPC with generic handlers, so without the cost of its messages' encoding. Each leaf has a channel of its own."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        import grpc

        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._rank, self._size = rank, size
        if rank == 0:
            from concurrent.futures import ThreadPoolExecutor

            self._barrier = threading.Barrier(size)
            self._target: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
            self._filled: queue.SimpleQueue[None] = queue.SimpleQueue()
            calls = {
                "gather": grpc.unary_unary_rpc_method_handler(self._answer),
                "bulk": grpc.stream_unary_rpc_method_handler(self._receive),
            }
            self._server = grpc.server(ThreadPoolExecutor(size + 1), options=options)
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("r", calls),))
            port = self._server.add_insecure_port("127.0.0.1:0")
            self._server.start()
            _store(address).set("port", str(port))
        else:
            self._channel = grpc.insecure_channel(f"127.0.0.1:{int(_store(address).get('port'))}", options=options)
            self._gather = self._channel.unary_unary("/r/gather")
            self._bulk = self._channel.stream_unary("/r/bulk")

    def _answer(self, request: bytes, context: Any) -> bytes:
        self._barrier.wait(_SECONDS)
        return _MESSAGE

    def _receive(self, pieces: Any, context: Any) -> bytes:
        array, at = self._target.get(), 0
        for piece in pieces:
            array[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        self._filled.put(None)
        return b""

    def gather(self) -> None:
        if self._rank:
            self._gather(_MESSAGE, timeout=_SECONDS)
        else:
            self._barrier.wait(_SECONDS)

    def bulk(self, array: Bytes) -> None:
        if self._rank:
            self._bulk((array[at : at + _PIECE].tobytes() for at in range(0, array.size, _PIECE)), timeout=_SECONDS)
        else:
            self._target.put(array)
            self._filled.get()


class _ZeroMq:
    """ZeroMQ, a router and dealers, with its own heartbeats for deaths."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        import zmq

        self._zmq = zmq
        self._rank, self._size = rank, size
        self._socket = zmq.Context.instance().socket(zmq.ROUTER if rank == 0 else zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(_SECONDS * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 18_000)
        if rank == 0:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            _store(address).set("port", str(self._socket.bind_to_random_port("tcp://127.0.0.1")))
        else:
            self._socket.connect(f"tcp://127.0.0.1:{int(_store(address).get('port'))}")

    def gather(self) -> None:
        if self._rank:
            self._socket.send(_MESSAGE)
            self._socket.recv()
            return
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._monitor, self._zmq.POLLIN)
        names: list[bytes] = []
        while len(names) < self._size - 1:
            ready = dict(poller.poll(_SECONDS * 1000))
            if self._monitor in ready or not ready:
                raise ConnectionError("a leaf is gone")
            names.append(self._socket.recv_multipart()[0])
        for name in names:
            self._socket.send_multipart([name, _MESSAGE])

    def bulk(self, array: Bytes) -> None:
        for at in range(0, array.size, _PIECE):
            part = array[at : at + _PIECE]
            if self._rank:
                self._socket.send(part, copy=False)
            else:
                part[:] = np.frombuffer(self._socket.recv_multipart(copy=False)[1], np.uint8)


_WIRES: dict[str, Callable[[int, int, str], Any]] = {
    "sockets": _Sockets, "gloo": _Gloo, "asyncio": _Asyncio, "grpc": _Grpc, "zmq": _ZeroMq
}  # fmt: skip


def _store(address: str) -> dist.TCPStore:
    """Return a client of the store: one for each rank, as it lets the threads that share it wait for each other."""
    return dist.TCPStore("127.0.0.1", int(address), is_master=False, timeout=timedelta(seconds=_SECONDS))


def _core() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _leaves(wire: str, leaves: int, size: int, address: str, mode: str) -> None:
    """Be all leaves; print the core-seconds of the bulk transfers, or the number of lost children."""
    results: dict[str, float] = {}
    alive: list[Any] = []

    def leaf(rank: int) -> None:
        own = _WIRES[wire](rank, leaves + 1, address)
        alive.append(own)
        for _ in range(_ROUNDS):
            own.gather()
        if rank == 1 and mode == "work":
            array = np.ones(size, np.uint8)
            own.bulk(array)
            begun = _core()
            for _ in range(_BULKS):
                own.bulk(array)
        if mode == "work":
            _store(address).get("filled")
            own.gather()
        if rank == 1 and mode == "work":
            results["leaf"] = _core() - begun
        while mode == "forks":
            own.gather()

    threads = [threading.Thread(target=leaf, args=(rank,), daemon=True) for rank in range(1, leaves + 1)]
    for thread in threads:
        thread.start()
    if mode == "forks":
        time.sleep(1.0)
        results["forks"] = sum(_ended_by_signal() for _ in range(_FORKS))
        print(json.dumps(results), flush=True)
        os._exit(0)
    for thread in threads:
        thread.join()
    if mode == "death" and os.fork():
        time.sleep(0.5)
        print(json.dumps({"killed": time.time()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * _SECONDS if mode == "death" else 1.0)
    print(json.dumps(results), flush=True)
    os._exit(0)


def _ended_by_signal() -> bool:
    """Fork a child that lives for a moment, and return whether a signal ended it."""
    child = os.fork()
    if child == 0:
        time.sleep(0.1)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _root(wire: str, leaves: int, size: int, address: str, mode: str) -> None:
    """Be the root, and print what it measures."""
    own = _WIRES[wire](0, leaves + 1, address)
    for _ in range(_ROUNDS // 5):
        own.gather()
    core = _core()
    for _ in range(_ROUNDS - _ROUNDS // 5):
        own.gather()
    scale = (_ROUNDS - _ROUNDS // 5) * leaves
    found: dict[str, Any] = {"gather us": (_core() - core) / scale * 1e6}
    if mode == "work":
        array = np.zeros(size, np.uint8)
        own.bulk(array)
        begun, core = time.perf_counter(), _core()
        for _ in range(_BULKS):
            own.bulk(array)
        found |= {"root": _core() - core, "bulk s": time.perf_counter() - begun}
        assert array.all()
        _store(address).set("filled", b"")
        own.gather()
        time.sleep(0.5)  # the answers travel
    else:
        try:
            while True:
                own.gather()
        except Exception as error:  # noqa: BLE001  each wire has its own
            found |= {"noticed": time.time(), "error": type(error).__name__}
    print(json.dumps(found), flush=True)
    os._exit(0)


def _run(wire: str, leaves: int, size: int, mode: str) -> dict[str, Any]:
    """Run the two processes, and return what both have found."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[str, Any] = {}
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.wires", role, wire, str(leaves), str(size), str(store.port), mode],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )
        for role in ("root", "leaves")
    ]  # fmt: skip
    try:
        if mode == "forks":
            programs.reverse()
        for program in programs:
            assert program.stdout is not None
            line = program.stdout.readline()
            found |= json.loads(line) if line else {}
            if mode == "forks":
                break
    finally:
        for program in programs:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    return found


def main() -> None:
    if sys.argv[1:2] in (["root"], ["leaves"]):
        role, wire, leaves, size, address, mode = sys.argv[1:]
        (_root if role == "root" else _leaves)(wire, int(leaves), int(size), address, mode)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=63)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--wires", nargs="+", default=[*_WIRES])
    arguments = parser.parse_args()
    print(f"{'':10}{'gather us':>12}{'core s/GiB':>12}{'s/GiB':>8}{'death s':>9}{'forks lost':>12}")
    for wire in arguments.wires:
        if wire in ("grpc", "zmq") and importlib.util.find_spec(wire) is None:
            print(f"{wire:10} not installed", flush=True)
            continue
        work = _run(wire, arguments.leaves, arguments.mib << 20, "work")
        gib = _BULKS * arguments.mib / 1024
        death = _run(wire, 1, 0, "death")
        noticed = f"{death['noticed'] - death['killed']:.2f}" if {"noticed", "killed"} <= death.keys() else "never"
        lost = _run(wire, 4, 0, "forks").get("forks", "all")
        print(
            f"{wire:10}{work['gather us']:>12.0f}{(work['root'] + work['leaf']) / gib:>12.2f}{work['bulk s'] / gib:>8.2f}"
            f"{noticed:>9}{lost:>12}", flush=True
        )  # fmt: skip


if __name__ == "__main__":
    main()
