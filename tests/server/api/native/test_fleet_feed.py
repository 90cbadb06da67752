"""How all replicas are: asked once for all who watch, with rates of what they did since."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from waiting import until

from stemma.errors import EngineError
from stemma.server.api.native import fleet_feed
from stemma.server.api.native.fleet_feed import FleetEvent, FleetFeed, FleetRates
from stemma.server.api.native.watch_feed import Watcher
from stemma.server.api.native.watch_picture import Picture


def report(number: int, prompt: int, cached: int, made: int) -> dict[str, Any]:
    stats = {"num_prompt_tokens": prompt, "num_cached_tokens": cached, "num_generated_tokens": made}
    return {"replica": number, "state": "ready", "stats": stats, "uptime_s": 1.0}


def test_rates_are_of_each_replica_by_itself() -> None:
    now_s = 100.0
    rates = FleetRates(lambda: now_s)
    (first,) = rates.add_to([report(3, 100, 50, 10)])
    assert first["rates"] == {"output_tokens": 0.0, "hit_rate": None}
    assert first["state"] == "ready" and "stats" not in first and "uptime_s" not in first
    now_s = 102.0
    told, new = rates.add_to([report(3, 180, 110, 40), report(4, 9, 9, 9)])
    assert told["rates"] == {"output_tokens": 15.0, "hit_rate": 0.75}
    assert new["rates"] == {"output_tokens": 0.0, "hit_rate": None}
    now_s = 113.0
    (later,) = rates.add_to([report(3, 200, 110, 40)])
    assert later["rates"] == {"output_tokens": 0.0, "hit_rate": 0.0}  # of the last 10 s
    (lost,) = rates.add_to([{"replica": 5, "state": "lost", "stats": None}])
    assert lost["rates"] == {"output_tokens": 0.0, "hit_rate": None}


class Listener:
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def put_fleet(self, told: FleetEvent) -> None:
        name, data = told.whole.decode().split("\n")[:2]
        assert name == "event: fleet"
        self.heard.append(orjson.loads(data.removeprefix("data: ")))


def test_the_router_is_asked_once_for_all_and_only_while_somebody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_feed, "POLL_S", 0.001)
    asked: list[str] = []

    async def acall(method: str, timeout_s: float) -> dict[str, Any]:
        asked.append(method)
        if len(asked) == 2:
            raise EngineError("no router")
        return {"replicas": [report(0, 0, 0, 0)]}

    connection = SimpleNamespace(acall=acall, info={"num_replicas": 1})

    async def play() -> None:
        feed = FleetFeed(SimpleNamespace(connection=connection))  # type: ignore[arg-type]
        first, second = Listener(), Listener()
        with feed.told_to(first):
            await until(lambda: len(first.heard) > 2)
            with feed.told_to(second):
                assert second.heard == first.heard[-1:]  # at once
        assert set(asked) == {"fleet"} and len(asked) <= len(first.heard) + 2
        await until(feed._task.done)  # type: ignore[union-attr]

    asyncio.run(play())


def test_of_one_engine_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_feed, "POLL_S", 0.001)

    class OneEngine:
        num_looks = 0

        @property
        def connection(self) -> Any:
            self.num_looks += 1
            return SimpleNamespace(info={})

    async def play() -> None:
        engine, listener = OneEngine(), Listener()
        with FleetFeed(engine).told_to(listener):
            await until(lambda: engine.num_looks > 2)
        assert not listener.heard

    asyncio.run(play())


def test_a_watcher_has_one_event_of_the_fleet_and_one_of_what_it_watches() -> None:
    async def play() -> None:
        watcher = Watcher(Picture(), None)
        watcher.put_outage("it is away")
        for number in range(3):
            watcher.put_fleet(FleetEvent(b"fleet %d" % number, b""))
        assert await watcher.take() == b"fleet 2"
        assert b"it is away" in await watcher.take()
        taking = asyncio.ensure_future(watcher.take())
        await asyncio.sleep(0)
        assert not taking.done()
        watcher.put_fleet(FleetEvent(b"fleet 3", b""))
        assert await taking == b"fleet 3"

    asyncio.run(play())


def test_who_sees_one_namespace_is_told_numbers_and_no_words_of_an_engine() -> None:
    lost = {"replica": 0, "state": "lost", "num_calls": 2, "why": "it ended:\n secret path"}

    async def play() -> None:
        watchers = [Watcher(Picture(), namespace) for namespace in (None, "key/a")]
        for watcher in watchers:
            watcher.put_fleet(FleetEvent.of([lost]))
        whole, numbers = [await watcher.take() for watcher in watchers]
        assert b"secret path" in whole and b"secret" not in numbers
        assert b'"num_calls":2' in numbers and b'"state":"lost"' in numbers
        for watcher in watchers:
            watcher.put_outage("it ended:\n secret path")
        whole, numbers = [await watcher.take() for watcher in watchers]
        assert b"secret path" in whole and b"secret" not in numbers and b"down" in numbers

    asyncio.run(play())
