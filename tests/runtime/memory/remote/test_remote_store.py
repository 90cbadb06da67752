"""What holds of every server: who waits for whom, and what is believed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kv_blocks import LAYOUT, save_all, sequence, wait_for
from waiting import PATIENCE_S, wait_until

from stemma.runtime.memory.disk.block_key import Block
from stemma.runtime.memory.disk.block_store import StoreMode
from stemma.runtime.memory.remote.remote_store import News, RemoteStore


class HeldClient:
    """A server in this process that has to be asked; `get` waits while the test holds it."""

    name = "a test"
    ask: Callable[[Sequence[bytes]], list[bool]] | None

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.ask = lambda keys: [key in self.values for key in keys]
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.num_reading = 0
        self.is_full = False
        self._closed = threading.Event()

    def get(self, key: bytes) -> bytes | None:
        self.num_reading += 1
        assert self.may_go_on.wait(PATIENCE_S)
        return self.values.get(key)

    def put(self, block: Block, value: bytes) -> bool:
        if not self.is_full:
            self.values[block.key] = value
        return not self.is_full

    def delete(self, key: bytes) -> None:
        self.values.pop(key, None)

    def news(self, cursor: bytes | None, wait: bool) -> News:
        if wait:
            self._closed.wait()
        return News([], b"", True)

    def close(self) -> None:
        self._closed.set()


def opened(client: HeldClient) -> RemoteStore:
    store = RemoteStore(client, LAYOUT)
    wait_until(lambda: store.mode is StoreMode.WRITER)
    return store


def ended(store: RemoteStore, client: HeldClient) -> None:
    client.close()
    store.close()


def test_a_request_for_which_nothing_is_there_does_not_wait_for_anothers_blocks() -> None:
    client = HeldClient()
    store = opened(client)
    save_all(store, sequence(1, 2, 3))
    client.may_go_on.clear()
    long = store.fetch(sequence(1, 2, 3))
    wait_until(lambda: client.num_reading == 1)
    cold = [store.fetch(sequence(number)) for number in (7, 8, 9)]
    assert not long.is_done and not any(fetch.is_done for fetch in cold)
    held, client.may_go_on = client.may_go_on, threading.Event()
    held.set()  # the first block comes, the second one is held
    wait_until(lambda: client.num_reading == 2)
    assert all(fetch.is_done and not fetch.payloads for fetch in cold) and not long.is_done
    client.may_go_on.set()
    assert len(wait_for(long, store)) == 3
    ended(store, client)


def test_a_fetch_that_is_released_while_it_is_asked_about_ends() -> None:
    client = HeldClient()
    store = opened(client)
    client.ask = lambda keys: [client.may_go_on.wait(PATIENCE_S) for _ in keys]
    client.may_go_on.clear()
    fetch = store.fetch(sequence(1))
    wait_until(lambda: not store._unasked)
    fetch.release()
    client.may_go_on.set()
    wait_until(lambda: fetch.is_done)
    assert store.num_fetches_ended == 1 and not client.num_reading
    ended(store, client)


def test_a_server_without_room_keeps_what_it_has_and_stays_in_use() -> None:
    client = HeldClient()
    store = opened(client)
    save_all(store, sequence(1))
    client.is_full = True
    save_all(store, sequence(1, 2))
    assert store.stats.num_dropped == 1 and store.note_use(sequence(1, 2)) == 1
    assert store.mode is StoreMode.WRITER
    ended(store, client)


def test_an_answer_that_does_not_come_ends_all_that_was_asked() -> None:
    client = HeldClient()
    store = opened(client)

    def nothing(keys: Sequence[bytes]) -> list[bool]:
        raise ConnectionError("gone")

    client.ask = nothing
    assert wait_for(store.fetch(sequence(1)), store) == []
    assert store.longest(sequence(1)) == 0, "it is used although it does not answer"
    ended(store, client)
