"""Registry of running generations, by id, so that they can be aborted; and the sweep over streams.

Lives on the server's asyncio loop; counts may be read on any thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...frontend.protocol.awake_clock import AwakeClock
from ..protocol.caller import Caller
from ..protocol.pieces import Outcome, Used
from ..protocol.task import Task
from ..settings import ServerSettings
from .event_queue import EventQueue
from .generation import Generation
from .stream import EventStream

log = logging.getLogger(__name__)

SWEEPS_A_LIMIT = 4  # a limit in seconds is enforced to within a quarter of it
MAX_SWEEP_S = 1.0


class ActiveRequests:
    """The registry of one application's generations and streams."""

    def __init__(self, settings: ServerSettings, on_cut: Callable[[str], None]) -> None:
        """`on_cut`: called for each stream that was cut off, with the reason's name."""
        self._settings = settings
        self._on_cut = on_cut
        shortest_s = min(settings.stream_ping_s, settings.stream_stall_s)
        self._sweep_s = min(MAX_SWEEP_S, shortest_s / SWEEPS_A_LIMIT)
        self.clock = AwakeClock(2 * self._sweep_s)  # of the limits of streams
        self._events: EventQueue | None = None
        self._generations: dict[Generation, None] = {}
        self._by_id: dict[str, dict[Generation, None]] = {}
        self._streams: dict[EventStream, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_requests(self) -> int:
        """Requests that the engine has not finished."""
        return len(self._generations)

    @property
    def num_streams(self) -> int:
        """How many of these are being streamed."""
        return len(self._streams)

    def abort(self, id: str | None, caller: Caller) -> int:
        """End requests of a caller's tenant now with their output so far: those with an id (the
        reply's or the client's own), or all (None). Returns how many there were."""
        found = self._generations if id is None else self._by_id.get(id, {})
        own = [g for g in found if g.caller.tenant == caller.tenant]
        for generation in own:
            generation.abort()
        return len(own)

    def begin(
        self,
        task: Task,
        caller: Caller,
        reply_id: str,
        on_outcome: Callable[[Outcome], None],
        on_used: Callable[[Used], None],
    ) -> Generation:
        """Register a generation until `end`; `on_outcome` is called for each outcome, `on_used` at
        the end of each of its programs, which may be after `end`."""
        loop = asyncio.get_running_loop()
        if self._events is None or self._events.loop is not loop:
            self._events = EventQueue(loop)
        generation = Generation(self._events, task, caller, reply_id, on_outcome, on_used)
        self._generations[generation] = None
        for id in _ids(generation):
            self._by_id.setdefault(id, {})[generation] = None
        return generation

    def end(self, generation: Generation) -> None:
        """Close it and remove it."""
        generation.close()
        self._generations.pop(generation, None)
        for id in _ids(generation):
            same = self._by_id.get(id, {})
            same.pop(generation, None)
            if not same:
                self._by_id.pop(id, None)

    # --- streams ----------------------------------------------------------------------------------

    @contextmanager
    def streaming(self, stream: EventStream) -> Iterator[None]:
        """Watch a stream while it is sent, then end its generation."""
        self._streams[stream] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)
        try:
            yield
        finally:
            del self._streams[stream]
            self.end(stream.generation)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._sweep_s, self._sweep) if self._streams else None
        now = self.clock.read()
        for stream in list(self._streams):
            reason = stream.check(now, self._settings)
            if reason is not None:
                self._on_cut(reason.name.lower())
                log.warning("cut off stream %s: %s", stream.reply_id, reason.value)
                stream.cut()


def _ids(generation: Generation) -> set[str]:
    rid = generation.task.rid
    return {generation.reply_id} if rid is None else {generation.reply_id, rid}
