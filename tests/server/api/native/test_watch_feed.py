"""The feed of those who watch: one picture for all, whole for the late, no texts of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from engine_harness import FAMILIES, EngineHarness
from starlette.requests import ClientDisconnect
from starlette.types import Message
from waiting import PATIENCE_S, until

from stemma.errors import EngineError
from stemma.runtime.gateway.observe.observer import Observer
from stemma.server.api.native import watch_feed
from stemma.server.api.native.watch import FeedResponse
from stemma.server.api.native.watch_feed import Watcher, WatchFeed
from stemma.server.api.native.watch_picture import OWNER, Picture, is_within


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token_id) for token_id in ids)


def watching(harness: EngineHarness) -> Observer:
    """Looks at the tree each time that it is asked."""
    return Observer(harness.engine, text_of, refreshes_a_second=float("inf"))


class Client:
    """Puts events together as the page does."""

    def __init__(self) -> None:
        self.nodes: dict[int, list[Any]] = {}
        self.texts: dict[str, str] = {}
        self.steps: list[int] = []

    def take(self, event: bytes) -> dict[str, Any]:
        name, data = event.decode().split("\n")[:2]
        assert name == "event: state"
        told: dict[str, Any] = orjson.loads(data.removeprefix("data: "))
        if told["is_whole"]:
            self.nodes, self.texts, self.steps = {}, {}, []
        for number, _ in told["tree"]["removed"]:
            self.nodes.pop(number, None)
            self.texts.pop(str(number), None)
        self.nodes |= {row[0]: row for row in told["tree"]["nodes"]}
        self.texts |= told["tree"]["texts"]
        self.steps += [step["id"] for step in told["steps"]["items"]]
        return told


def run_some(harness: EngineHarness, namespace: str = "") -> None:
    for family in FAMILIES:
        harness.submit(family[: 10 + len(harness.requests)], namespace=namespace)
    harness.run()


def test_who_is_late_is_given_the_whole_picture_and_then_changes() -> None:
    harness, picture = EngineHarness(num_pages=90), Picture()
    watched = watching(harness)
    quick, slow = Watcher(picture, None), Watcher(picture, None)
    quick_client, slow_client = Client(), Client()

    async def play() -> None:
        for number in range(8):
            run_some(harness)
            change = picture.take(watched.watch(**picture.questions()))
            for watcher in (quick, slow):
                watcher.put_state(change)
            told = quick_client.take(await quick.take())
            assert told["is_whole"] == (number == 0)
            if number % 3 == 2:
                assert slow_client.take(await slow.take())["is_whole"]
                assert (slow_client.nodes, slow_client.texts) == (
                    quick_client.nodes, quick_client.texts
                )  # fmt: skip
        assert (
            quick_client.steps
            == list(range(1, harness.engine.scheduler.stats.num_steps + 1))[
                -len(quick_client.steps) :
            ]
        )

    asyncio.run(play())


def test_another_engine_is_another_picture() -> None:
    picture, client = Picture(), Client()
    watcher = Watcher(picture, None)

    async def play() -> None:
        for _ in range(2):
            harness = EngineHarness()
            watched = watching(harness)
            watcher.put_state(picture.take(watched.watch(**picture.questions())))
            run_some(harness)
            watcher.put_state(picture.take(watched.watch(**picture.questions())))
            told = client.take(await watcher.take())
            assert told["is_whole"]
            assert len(client.nodes) == len(harness.engine.scheduler.kv_cache.tree.nodes())

    asyncio.run(play())


def test_of_another_namespace_only_numbers_are_seen() -> None:
    harness, picture = EngineHarness(num_pages=400), Picture()
    watched = watching(harness)
    picture.take(watched.watch(**picture.questions()))
    for name in ("mine", "mine#salt", "theirs"):
        run_some(harness, name)
    harness.submit([1, 2, 3], namespace="theirs", client="somebody", max_tokens=40)
    harness.step()
    change = picture.take(watched.watch(**picture.questions()))
    for event in (change, picture.whole()):
        seen = picture.seen_from(event, "mine")
        roots = {int(number): name for number, name in seen["tree"]["roots"].items()}
        assert sorted(map(str, roots.values())) == ["None", "mine", "mine#salt"]
        nodes = {row[0]: row for row in seen["tree"]["nodes"]}
        assert len(nodes) == len(event["tree"]["nodes"])
        with_text = {nodes[int(number)][2] for number in seen["tree"]["texts"]}
        assert with_text == {number for number, name in roots.items() if name}
        assert all(row[OWNER] is None for row in nodes.values() if not roots[row[2]])
        assert b"theirs" not in orjson.dumps(seen) and b"somebody" not in orjson.dumps(seen)
        assert seen["queue"]["running"][0]["prompt"] == 3


@pytest.mark.parametrize(
    ("name", "own", "is_seen"),
    [
        ("", "", True),
        ("#salt", "", False),
        ("a", "a", True),
        ("a#s", "a", True),
        ("ab", "a", False),
    ],
)
def test_a_namespace_is_seen_with_its_salted_parts(name: str, own: str, is_seen: bool) -> None:
    assert is_within(name, own) is is_seen


def test_rates_are_of_the_last_second() -> None:
    harness, picture = EngineHarness(), Picture()
    watched = watching(harness)
    picture.take(watched.watch(**picture.questions()))
    harness.submit(FAMILIES[0][:40], max_tokens=9)
    harness.run()
    harness.submit(FAMILIES[0][:40], max_tokens=2)
    harness.run()
    rates = picture.take(watched.watch(**picture.questions()))["rates"]
    assert (rates["prefill_tokens"], rates["decode_tokens"]) == (41, 8 + 1)
    assert rates["steps"] == harness.engine.scheduler.stats.num_steps
    assert rates["hit_rate"] == pytest.approx(39 / 80, abs=1e-4)
    assert 0 < rates["busy"] <= 1


def test_the_engine_is_asked_once_for_all_and_only_while_somebody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_feed, "POLL_S", 0.01)
    monkeypatch.setattr(watch_feed, "RETRY_S", 0.01)
    harness = EngineHarness()
    watched = watching(harness)
    num_asked, is_gone = 0, threading.Event()

    async def acall(method: str, timeout_s: float, **args: Any) -> dict[str, Any]:
        nonlocal num_asked
        assert method == "watch"
        num_asked += 1
        if is_gone.is_set():
            raise EngineError("it is being started again")
        return watched.watch(**args)

    connection = SimpleNamespace(acall=acall, info={"model": "fake"})

    async def play() -> None:
        feed = WatchFeed(SimpleNamespace(connection=connection))  # type: ignore[arg-type]
        with feed.watcher(None) as first, feed.watcher(None) as second:
            for _ in range(3):
                await first.take()
                await second.take()
            assert num_asked <= 4 and len(feed) == 2
            is_gone.set()
            while b"event: state" in (event := await first.take()):
                pass
            assert b'"state":"down","reason":"it is being started again"' in event
            is_gone.clear()
            while b"event: engine" in (event := await first.take()):
                pass
            assert b'"is_whole":true' in event
        assert feed._task is not None and not len(feed)
        await until(feed._task.done)

    asyncio.run(play())


def test_a_reader_that_takes_nothing_is_hung_up_on() -> None:
    ended: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"event: state\ndata: {}\n\n"
        finally:
            ended.append(True)

    async def nothing_comes() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message.get("body"):
            await asyncio.Event().wait()  # the connection takes no more

    async def run() -> None:
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises((OSError, ClientDisconnect)):
            await FeedResponse(events(), 0.05)(scope, nothing_comes, send)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert ended
