"""How all replicas are, asked of the router once a second while somebody watches.

Rates are taken here, from counters that never fall (`cluster/counters.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

from ....errors import EngineError
from ...generation.service import EngineLink
from ...protocol.server_sent_events import event

POLL_S = 1.0
CALL_TIMEOUT_S = 10.0
HIT_RATE_S = 10.0  # as of one engine
_UNTOLD = frozenset({"stats", "uptime_s"})
_WORDS = frozenset({"why"})  # an engine's last ones, from its log


class FleetListener(Protocol):
    """Who is to be told."""

    def put_fleet(self, told: FleetEvent) -> None:
        """The newest event."""


class FleetEvent(NamedTuple):
    """How all replicas are, encoded for who may see everything, and for who sees of others only
    numbers."""

    whole: bytes
    numbers: bytes

    @classmethod
    def of(cls, replicas: Sequence[dict[str, Any]]) -> Self:
        """From the reports."""
        numbers = [{n: each[n] for n in each if n not in _WORDS} for each in replicas]
        return cls(*(event({"replicas": told}, "fleet") for told in (replicas, numbers)))


class FleetFeed:
    """Owns the task that asks, and what was heard last."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._listeners: set[FleetListener] = set()
        self._rates = FleetRates()
        self._newest: FleetEvent | None = None
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def told_to(self, listener: FleetListener) -> Iterator[None]:
        """For the duration of the block."""
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        elif self._newest is not None:
            listener.put_fleet(self._newest)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    async def _run(self) -> None:
        """Ask while anybody listens. What cannot be asked is told of by who watches it."""
        self._newest = None
        while self._listeners:
            try:
                replicas = await self._ask()
            except EngineError:
                replicas = None
            if replicas is not None:
                self._newest = FleetEvent.of(self._rates.add_to(replicas))
                for listener in self._listeners:
                    listener.put_fleet(self._newest)
            await asyncio.sleep(POLL_S)

    async def _ask(self) -> list[dict[str, Any]] | None:
        """None: there is one engine, and no router."""
        connection = self._engine.connection
        if "num_replicas" not in connection.info:
            return None
        replicas: list[dict[str, Any]] = (await connection.acall("fleet", CALL_TIMEOUT_S))[
            "replicas"
        ]
        return replicas


class _Sample(NamedTuple):
    now_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


class FleetRates:
    """What replicas did of late, from one report to the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: dict[int, deque[_Sample]] = {}

    def add_to(self, replicas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The reports, each with `rates`: `output_tokens` a second since the report before, and
        `hit_rate` of the prompts of the last seconds, None where there were none."""
        return [
            {
                **{name: value for name, value in told.items() if name not in _UNTOLD},
                "rates": self._of(told["replica"], told.get("stats") or {}),
            }
            for told in replicas
        ]

    def _of(self, number: int, stats: dict[str, int]) -> dict[str, float | None]:
        samples = self._samples.setdefault(number, deque())
        counts = (stats.get(name, 0) for name in _Sample._fields[1:])
        samples.append(_Sample(self._clock(), *counts))
        newest, before = samples[-1], samples[-2] if len(samples) > 1 else samples[-1]
        while len(samples) > 1 and samples[1].now_s <= newest.now_s - HIT_RATE_S:
            samples.popleft()
        num_prompt = newest.num_prompt_tokens - samples[0].num_prompt_tokens
        num_cached = newest.num_cached_tokens - samples[0].num_cached_tokens
        num_made = newest.num_generated_tokens - before.num_generated_tokens
        seconds = newest.now_s - before.now_s
        return {
            "output_tokens": round(num_made / seconds, 1) if seconds else 0.0,
            "hit_rate": round(num_cached / num_prompt, 4) if num_prompt else None,
        }
