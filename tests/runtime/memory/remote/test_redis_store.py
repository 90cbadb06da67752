"""Blocks in Redis: what one engine saves another finds; a doubt is a miss, silence is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from kv_blocks import LAYOUT, fetched, payload_of, save_all, sequence, wait_for
from redis_server import RedisServer
from shared_kv import assert_the_second_engine_computes_less
from waiting import wait_until

from stemma.errors import InvalidRequest
from stemma.runtime.memory.disk.block_key import BlockLayout
from stemma.runtime.memory.disk.block_store import StoreMode
from stemma.runtime.memory.remote.redis_client import RedisClient
from stemma.runtime.memory.remote.remote_store import RemoteStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.go_on()
    server.kill()


def opened(server: RedisServer, layout: BlockLayout = LAYOUT) -> RemoteStore:
    store = RemoteStore(RedisClient(server.url, layout), layout)
    wait_until(lambda: store.mode is StoreMode.WRITER)
    return store


def test_what_one_store_saves_another_finds(server: RedisServer) -> None:
    blocks = sequence(1, 2, 3)
    one, other = opened(server), opened(server)
    assert one.longest(blocks) == 0 and one.num_accepted() > 0
    save_all(one, blocks)
    wait_until(lambda: other.longest(blocks) == 3)
    assert fetched(other, blocks) == 3 and other.note_use(blocks) == 3
    late = opened(server)
    wait_until(lambda: late.longest([*blocks, *sequence(9)]) == 3)
    for store in (one, other, late):
        store.close()
        assert store.mode is StoreMode.OFF and not store.save(*another())


def test_another_layouts_blocks_are_never_found(server: RedisServer) -> None:
    one, other = opened(server), opened(server, replace(LAYOUT, model_revision="other"))
    save_all(one, sequence(1, 2))
    assert other.longest(sequence(1, 2, layout=other.layout)) == 0
    one.close()
    other.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "other", "gone"])
def test_a_block_in_doubt_is_a_miss_and_saved_again(server: RedisServer, damage: str) -> None:
    blocks = sequence(1, 2, 3)
    store, client = opened(server), server.client()
    save_all(store, blocks)
    name, other = (RedisClient(server.url, LAYOUT).name_of(block.key) for block in blocks[1:])
    data = bytearray(client.get(name))
    data[-100] ^= 1
    harm: dict[str, Any] = {
        "flip": bytes(data), "cut": bytes(data[:-1]),
        "other": client.get(other),
    }  # fmt: skip
    client.delete(name) if damage == "gone" else client.set(name, harm[damage])
    assert len(wait_for(store.fetch(blocks), store)) == 1
    assert store.stats.num_corrupt + store.stats.num_lost == 1 and store.longest(blocks) == 1
    save_all(store, blocks)
    assert fetched(store, blocks) == 3
    store.close()


def test_a_server_that_is_silent_or_gone_is_computed_around_and_found_again(
    server: RedisServer,
) -> None:
    blocks = sequence(1, 2)
    store = opened(server)
    save_all(store, blocks)
    server.pause()
    assert wait_for(store.fetch(blocks), store) == [], "it waited for a server that is stopped"
    wait_until(lambda: store.mode is StoreMode.FAILED)
    assert store.longest(blocks) == 0 and not store.save(*another())
    server.go_on()
    wait_until(lambda: store.mode is StoreMode.WRITER)
    assert fetched(store, blocks) == 2
    server.kill()
    wait_until(lambda: store.mode is StoreMode.FAILED)
    server.start()
    wait_until(lambda: store.mode is StoreMode.WRITER)
    assert store.longest(blocks) == 0, "its data was lost"
    save_all(store, blocks)
    assert fetched(store, blocks) == 2
    store.close()


def another() -> Any:
    """Another block, with its payload."""
    block = sequence(1, 2, 7)[2]
    return block, payload_of(block)


def test_a_server_that_never_was_there_harms_nobody(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    store = RemoteStore(RedisClient(f"unix://{tmp_path}/nobody.sock", LAYOUT), LAYOUT)
    assert store.longest(sequence(1)) == 0 and store.num_accepted() == 0
    assert wait_for(store.fetch(sequence(1)), store) == []
    assert store.describe()["mode"] == "failed"
    store.close()
    with pytest.raises(InvalidRequest, match="kv_store="):
        RedisClient("redis://host:port/x", LAYOUT)


def test_an_engine_says_the_same_with_kv_that_another_one_computed(
    checkpoint: Path, server: RedisServer
) -> None:
    assert_the_second_engine_computes_less(checkpoint, server.url)


def test_an_engine_goes_on_from_states_that_another_one_computed(
    tmp_path: Path, server: RedisServer
) -> None:
    types = ["conv", "full_attention", "conv"]
    folder = make_checkpoint(tmp_path / "model", "lfm2", num_layers=3, layer_types=types)
    assert_the_second_engine_computes_less(folder, server.url)
