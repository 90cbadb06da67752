"""A TCP proxy on this host that adds latency, or breaks what goes through it.

Each direction gets half of `latency_s`, so a round trip takes that much longer. What one side sends
is read at once and passed on after the delay, in order: latency, not bandwidth, is what it limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self

CHUNK_BYTES = 256 * 1024


class TcpProxy:
    """Listens at `port` on loopback and forwards to `target_port`, within the `with` block."""

    def __init__(self, target_port: int, latency_s: float = 0.0) -> None:
        """`latency_s`: added to a round trip."""
        self.port = 0
        self.num_accepted = 0
        self._target_port = target_port
        self._delay_s = latency_s / 2
        self._is_open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def cut(self, *, come_back: bool = True) -> None:
        """Break every connection; with `come_back=False` new ones are refused until `restore`."""
        self._is_open = come_back
        self._loop.call_soon_threadsafe(self._abort_all)

    def restore(self) -> None:
        """Accept connections again."""
        self._is_open = True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._has_begun.set()
        await self._stop.wait()
        server.close()
        self._abort_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_open:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        self.num_accepted += 1
        with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
            await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward incoming data, each piece after the delay."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        passing = asyncio.create_task(self._pass_on(pieces, writer))
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK_BYTES):
                pieces.put_nowait((self._loop.time() + self._delay_s, piece))
        pieces.put_nowait((self._loop.time() + self._delay_s, b""))
        await passing

    async def _pass_on(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                if not piece:
                    break
                writer.write(piece)
        writer.close()
        self._writers.discard(writer)
