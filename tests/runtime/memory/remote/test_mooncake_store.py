"""Blocks in a Mooncake pool, a real one: a doubt is a miss, silence is computed, nothing waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kv_blocks import LAYOUT, PLAIN, fetched, payload_of, save_all, sequence, wait_for
from mooncake_pool import MooncakePool
from shared_kv import assert_the_second_engine_computes_less
from waiting import wait_until

from stemma.errors import InvalidRequest, MissingDependency
from stemma.runtime.memory.disk.block_file import packed
from stemma.runtime.memory.disk.block_key import Block, BlockLayout
from stemma.runtime.memory.disk.block_store import StoreMode
from stemma.runtime.memory.kv_layout import KVLayout
from stemma.runtime.memory.remote import mooncake_client
from stemma.runtime.memory.remote.mooncake_client import MooncakeAddress, MooncakeClient
from stemma.runtime.memory.remote.remote_store import RemoteStore


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakePool]:
    pool = MooncakePool(tmp_path, monkeypatch)
    yield pool
    pool.end()


@pytest.fixture
def pool(network: MooncakePool) -> MooncakePool:
    network.start()
    return network


def opened(pool: MooncakePool, layout: BlockLayout = LAYOUT) -> RemoteStore:
    store = RemoteStore(MooncakeClient(pool.url, layout), layout)
    wait_until(lambda: store.mode is StoreMode.WRITER)
    return store


def test_what_one_store_saves_another_finds(pool: MooncakePool) -> None:
    blocks = sequence(1, 2, 3)
    one, other = opened(pool), opened(pool)
    assert fetched(one, blocks) == 0 and one.note_use(blocks) == 0
    save_all(one, blocks)
    wait_until(lambda: fetched(other, [*blocks, *sequence(9)]) == 3)
    assert other.note_use(blocks) == 3
    assert other.stats.num_lost == other.stats.num_corrupt == 0
    for store in (one, other):
        store.close()
        assert store.mode is StoreMode.OFF and store.longest(blocks) == 0


def test_another_layouts_or_namespaces_blocks_are_never_found(pool: MooncakePool) -> None:
    one, other = opened(pool), opened(pool, replace(LAYOUT, model_revision="other"))
    save_all(one, sequence(1, 2))
    assert fetched(other, sequence(1, 2, layout=other.layout)) == 0
    assert fetched(one, sequence(1, 2, namespace="somebody else")) == 0
    one.close()
    other.close()


@pytest.mark.parametrize("damage", ["flip", "other", "shorter", "longer", "gone"])
def test_a_block_in_doubt_is_a_miss_and_saved_again(pool: MooncakePool, damage: str) -> None:
    blocks = sequence(1, 2, 3)
    store = opened(pool)
    save_all(store, blocks)
    harm(pool, blocks, damage)
    assert len(wait_for(store.fetch(blocks), store)) == 1
    assert store.stats.num_corrupt + store.stats.num_lost == 1 and store.note_use(blocks) == 1
    save_all(store, blocks)
    wait_until(lambda: fetched(store, blocks) == 3)  # a slow answer is a miss
    store.close()


def harm(pool: MooncakePool, blocks: list[Block], damage: str) -> None:
    """Put something else in the place of the second block."""
    width = {"shorter": 1, "longer": 4}.get(damage, PLAIN.num_vectors)
    layout = replace(LAYOUT, kv=KVLayout(1, (replace(PLAIN, num_vectors=width),)))
    client, own = MooncakeClient(pool.url, layout), MooncakeClient(pool.url, LAYOUT)
    client._prefix = own._prefix
    own.close()
    client.news(None, wait=False)
    right = blocks[2] if damage == "other" else blocks[1]
    value = bytearray(packed(layout, right, payload_of(right, layout)))
    value[-100] ^= damage == "flip"
    client.delete(blocks[1].key)
    assert damage == "gone" or client.put(blocks[1], bytes(value))
    client.close()


def test_a_master_that_is_silent_or_gone_is_computed_around_and_found_again(
    pool: MooncakePool,
) -> None:
    blocks = sequence(1, 2)
    store = opened(pool)
    save_all(store, blocks)
    pool.pause("mooncake_master")
    assert wait_for(store.fetch(blocks), store) == [], "it waited for a master that is stopped"
    wait_until(lambda: store.mode is StoreMode.FAILED)
    assert store.longest(blocks) == 0 and store.num_accepted() == 0
    pool.go_on("mooncake_master")
    wait_until(lambda: store.mode is StoreMode.WRITER and fetched(store, blocks) == 2)
    pool.kill("mooncake_master")
    assert wait_for(store.fetch(sequence(7)), store) == []
    wait_until(lambda: store.mode is StoreMode.FAILED)
    pool.start_master()
    wait_until(lambda: saves_again(store, blocks))
    wait_until(lambda: fetched(store, blocks) == 2)
    store.close()


def saves_again(store: RemoteStore, blocks: list[Block]) -> bool:
    """Whether the pool takes them; it has no room until the node has found its new master."""
    for block in blocks:
        store.save(block, payload_of(block))
    return store.flush(30.0) and store.note_use(blocks) == len(blocks)


def test_a_node_that_is_gone_takes_its_blocks_and_nothing_else(pool: MooncakePool) -> None:
    blocks = sequence(1, 2)
    store = opened(pool)
    save_all(store, blocks)
    pool.kill("mooncake_client")
    assert wait_for(store.fetch(blocks), store) == []
    pool.start_node()
    wait_until(lambda: saves_again(store, blocks) and fetched(store, blocks) == 2)
    store.close()


def test_a_worker_that_dies_is_replaced(pool: MooncakePool) -> None:
    blocks = sequence(1)
    client = MooncakeClient(pool.url, LAYOUT)
    store = RemoteStore(client, LAYOUT)
    wait_until(lambda: store.mode is StoreMode.WRITER)
    save_all(store, blocks)
    assert client._process is not None
    client._process.kill()
    wait_until(lambda: store.mode is StoreMode.FAILED)
    wait_until(lambda: store.mode is StoreMode.WRITER)
    wait_until(lambda: fetched(store, blocks) == 1)
    store.close()


def test_a_master_that_never_was_there_harms_nobody(network: MooncakePool) -> None:
    store = RemoteStore(MooncakeClient(network.url, LAYOUT), LAYOUT)
    assert store.longest(sequence(1)) == 0 and store.num_accepted() == 0
    assert wait_for(store.fetch(sequence(1)), store) == []
    assert store.describe()["mode"] == "failed"
    store.close()


@pytest.mark.parametrize("options", ["", "?protocol=rdma&devices=a,b&metadata=http://m:1/x"])
def test_an_address_is_read(options: str) -> None:
    address = MooncakeAddress.of("mooncake://[::1]" + options)
    assert (address.host, address.port) == ("::1", 50051)
    expected = ("rdma", "a,b", "http://m:1/x") if options else ("tcp", "", "P2PHANDSHAKE")
    assert (address.protocol, address.devices, address.metadata) == expected


@pytest.mark.parametrize(
    "rest", ["", "host:port", "host/0", "user@host", "host?protocol=x", "host?a=b", "host?tcp"]
)
def test_a_wrong_address_is_refused(rest: str) -> None:
    with pytest.raises(InvalidRequest, match=r"kv_store=.*mooncake://HOST:PORT"):
        MooncakeAddress.of("mooncake://" + rest)


_WITHOUT = """
import sys
sys.modules["mooncake"] = None
from stemma.runtime.memory.remote.mooncake_worker import main
main()
"""


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "WORKER_COMMAND", (sys.executable, "-P", "-c", _WITHOUT))
    with pytest.raises(MissingDependency, match=r"stemma-lm\[mooncake\]"):
        MooncakeClient("mooncake://localhost", LAYOUT)


def test_an_engine_says_the_same_with_kv_that_another_one_computed(
    checkpoint: Path, pool: MooncakePool
) -> None:
    assert_the_second_engine_computes_less(checkpoint, pool.url)
