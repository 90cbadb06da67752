"""Reads the log of steps that engines keep while somebody watches (docs/serve/watch.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ...frontend.client.backend import Backend

_LOOK_S = 0.3  # logs end 10 s after somebody has looked, and tell of 192 steps at a time

# Takes a replica's new steps, and how many were missed before them.
Take = Callable[[int, list[dict[str, Any]], int], None]


class StepWatch:
    """Looks while the block runs: `take` gets all steps from its begin to its end, in order."""

    def __init__(
        self, backend: Backend, num_replicas: int | None, take: Take, look_s: float = _LOOK_S
    ) -> None:
        """`num_replicas`: behind a router; None: an engine alone, which counts as replica 0."""
        self._backend = backend
        self._take = take
        self._look_s = look_s
        self._names = [{"replica": number} for number in range(num_replicas or 0)] or [{}]
        # What of each log was read: so that an answer has neither tree nor pool again.
        self._read: list[dict[str, Any]] = [{"run": None, "step": 0} for _ in self._names]
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        self._look(is_told=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        self._look()

    def _look_on(self) -> None:
        while not self._has_ended.wait(self._look_s):
            self._look()

    def _look(self, *, is_told: bool = True) -> None:
        for number, (names, read) in enumerate(zip(self._names, self._read, strict=True)):
            answer = self._backend.connection.call("watch", **names, **read)
            steps = answer["steps"]["items"]
            if is_told:
                self._take(number, steps, answer["steps"]["num_missed"])
            read |= {"run": answer["run"], "tree": answer["tree"]["version"]}
            if steps:
                read["step"] = steps[-1]["id"]
            if answer["pool"] is not None:
                read["pool"] = answer["pool"]["version"]
