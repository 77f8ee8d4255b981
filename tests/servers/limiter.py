"""A proxy whose every connection carries so many bytes per second each way, as on a busy network."""

from __future__ import annotations

import asyncio
import contextlib
import threading

__all__ = ["Limiter"]

_STEP = 64 << 10


class Limiter:
    """One proxy before one server of this machine.

    Args:
        listen: host and port to listen on.
        target: host and port of the server.

    Attributes:
        up: bytes per second from the client to the server, for each connection; 0.0: as fast as it goes.
        down: the other way.
        cut: bytes from the client after which a connection breaks; 0: never.
        swallow: the server gets nothing of what the client sends.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.up = self.down = 0.0
        self.cut = 0
        self.swallow = False
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serving = asyncio.start_server(self._serve, *listen)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)

    def stop(self) -> None:
        """Take no more connections, and end the open ones."""

        async def end() -> None:
            self._server.close()
            # A connection that was accepted just before begins its task only now, or in a moment.
            for _ in range(3):
                while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                await asyncio.sleep(0.02)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        up = asyncio.create_task(self._pump(reader, far_writer, "up"))
        down = asyncio.create_task(self._pump(far_reader, writer, "down"))
        try:
            await asyncio.gather(up, down)
        except asyncio.CancelledError:
            pass  # `stop`
        finally:
            for end in (writer, far_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        free = self._loop.time()
        total = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(_STEP):
                if rate := getattr(self, direction):
                    free = max(free, self._loop.time()) + len(data) / rate
                    await asyncio.sleep(free - self._loop.time())
                total += len(data)
                if direction == "up" and self.cut and total > self.cut:
                    writer.transport.abort()
                    return
                if direction == "up" and self.swallow:
                    continue
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
