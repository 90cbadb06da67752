"""Polls an engine once for all watchers, four times a second, only while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....errors import StemmaError
from ...generation.service import EngineLink
from ...protocol.server_sent_events import event
from .fleet_feed import FleetEvent, FleetFeed
from .watch_picture import Picture

POLL_S = 0.25
RETRY_S = 0.5  # while the engine cannot be asked
CALL_TIMEOUT_S = 10.0
_NO_WORDS = "the engine cannot be asked now"  # why may be the last lines of its log


class Watcher:
    """What one client has still to receive: never more than one event of what it watches, and one
    of all replicas.

    A client that reads too slowly gets the whole picture next, not the changes it missed.
    """

    def __init__(self, picture: Picture, namespace: str | None) -> None:
        """`namespace`: the only one it may read; None: everything."""
        self._picture = picture
        self._namespace = namespace
        self._waiting: bytes | None = None
        self._is_behind = True
        self._is_told = True  # what it watches has not changed since
        self._fleet: bytes | None = None
        self._is_news = asyncio.Event()

    async def take(self) -> bytes:
        """The next event, encoded."""
        await self._is_news.wait()
        if self._fleet is not None:
            fleet, self._fleet = self._fleet, None
            if self._is_told:
                self._is_news.clear()
            return fleet
        self._is_news.clear()
        self._is_told = True
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self._is_behind = False
            waiting = event(self._seen(self._picture.whole()), "state")
        return waiting

    def put_state(self, change: dict[str, Any]) -> None:
        """The picture has changed."""
        if self._waiting is not None or change["is_whole"]:
            self._is_behind = True
        self._waiting = None if self._is_behind else event(self._seen(change), "state")
        self._tell()

    def put_outage(self, reason: str) -> None:
        """The engine cannot be asked."""
        self._is_behind = True
        told = reason if self._namespace is None else _NO_WORDS
        self._waiting = event({"state": "down", "reason": told}, "engine")
        self._tell()

    def put_fleet(self, told: FleetEvent) -> None:
        """How all replicas are."""
        self._fleet = told.whole if self._namespace is None else told.numbers
        self._is_news.set()

    def _tell(self) -> None:
        self._is_told = False
        self._is_news.set()

    def _seen(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._namespace is None:
            return told
        return self._picture.seen_from(told, self._namespace)


class WatchFeed:
    """Owns the picture, its watchers, and the task that polls the engine."""

    def __init__(self, engine: EngineLink, replica: int | None = None) -> None:
        """`replica`: which one of several engines; None: the first that is ready."""
        self._engine = engine
        self._which = {} if replica is None else {"replica": replica}
        self._picture = Picture()
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watcher(self, namespace: str | None) -> Iterator[Watcher]:
        """A new watcher, for the duration of the block."""
        watcher = Watcher(self._picture, namespace)
        self._watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    async def _run(self) -> None:
        """Poll while anybody watches."""
        while self._watchers:
            try:
                answer = await self._ask()
            except StemmaError as error:
                for watcher in self._watchers:
                    watcher.put_outage(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            change = self._picture.take(answer)
            for watcher in self._watchers:
                watcher.put_state(change)
            await asyncio.sleep(POLL_S)

    async def _ask(self) -> dict[str, Any]:
        connection = self._engine.connection
        questions = self._picture.questions() | self._which
        answer = await connection.acall("watch", CALL_TIMEOUT_S, **questions)
        return {**answer, "model": connection.info["model"]}


class WatchFeeds:
    """Owns a feed for each engine that is watched, and the one of all replicas."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._feeds: dict[int | None, WatchFeed] = {}
        self._fleet = FleetFeed(engine)

    def __len__(self) -> int:
        return sum(map(len, self._feeds.values()))

    @contextmanager
    def watcher(self, replica: int | None, namespace: str | None) -> Iterator[Watcher]:
        """A new watcher, for the duration of the block."""
        feed = self._feeds.get(replica)
        if feed is None:
            feed = self._feeds[replica] = WatchFeed(self._engine, replica)
        try:
            with feed.watcher(namespace) as watcher, self._fleet.told_to(watcher):
                yield watcher
        finally:
            if not len(feed) and self._feeds.get(replica) is feed:
                del self._feeds[replica]
