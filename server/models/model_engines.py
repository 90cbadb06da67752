"""The engines of all models as the HTTP server starts, drains and stops them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...errors import ModelLoadError, StemmaError
from .model_slot import ModelSlot

_T = TypeVar("_T")


class ModelEngines:
    """`http_server.Engines`; the first model's engine is started with the server. Thread-safe."""

    def __init__(self, slots: Sequence[ModelSlot]) -> None:
        self.slots = slots
        self.has_started = False  # the first model was ready once
        self.on_drain: Callable[[], None] = lambda: None  # called on the event loop

    def start(self) -> None:
        """Begin to start the first one's. Raises StemmaError where it cannot be."""
        first = self.slots[0]
        try:
            prepared = first.spec.prepare()
        except StemmaError as error:
            raise ModelLoadError(f"model {first.name!r}: {error}") from error
        first.note(prepared)
        first.start(prepared)

    def wait_started(self) -> None:
        """Return once that is ready. Raises EngineError where it never will be."""
        self.slots[0].wait_started()
        self.has_started = True

    def num_programs(self, timeout_s: float) -> int:
        """Programs that run, of all clients of all engines."""
        return sum(self._each(lambda slot: slot.num_programs(timeout_s)))

    def drain(self) -> None:
        """Accept no new programs; requests that wait for a model are refused."""
        for slot in self.slots:
            slot.drain()
        self.on_drain()

    def abandon(self, reason: str) -> None:
        """Fail everything that HTTP requests still wait for."""
        for slot in self.slots:
            slot.abandon(reason)

    def stop(self) -> None:
        """End all, at once."""
        self._each(lambda slot: slot.close())

    def _each(self, work: Callable[[ModelSlot], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self.slots), "model-engines") as threads:
            return list(threads.map(work, self.slots))
