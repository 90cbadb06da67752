"""The index against a plain model; the journal against damage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import LAYOUT, sequence

from stemma.runtime.memory.disk.block_key import Block
from stemma.runtime.memory.disk.index import StoreIndex
from stemma.runtime.memory.disk.journal import ADDED, GONE, USED, Journal, JournalReader, Record

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "lose", "evict"]), PATHS), max_size=60))
def test_the_oldest_is_always_the_least_recently_used_leaf(
    ops: list[tuple[str, list[int]]],
) -> None:
    index = StoreIndex()
    last_use: dict[bytes, int] = {}
    parents: dict[bytes, bytes | None] = {}

    def leaves(keep: bytes | None = None) -> Iterable[bytes]:
        inner = {parents[key] for key in last_use}
        return [key for key in last_use if key not in inner and key != keep]

    def use(blocks: list[Block], now: int) -> None:
        for block in reversed(blocks):
            if block.key not in last_use:
                return
            last_use[block.key] = now

    for now, (op, path) in enumerate(ops):
        blocks = sequence(*path)
        tip = blocks[-1]
        parents.update((block.key, block.parent) for block in blocks)
        if op == "add":
            index.add(tip.key, tip.parent)
            last_use[tip.key] = now
            use(blocks, now)
        elif op == "use":
            index.touch(tip.key)
            use(blocks, now)
        elif op == "lose":
            index.remove(tip.key)
            last_use.pop(tip.key, None)
        else:
            found = index.oldest(keep=tip.key)
            times = [last_use[key] for key in leaves(tip.key)]
            assert (found is None) == (not times)
            if found is not None:
                assert found in leaves(tip.key) and last_use[found] == min(times)
                index.remove(found)
                del last_use[found]
        assert index.keys() == set(last_use)
        num_found = index.longest(blocks)
        assert all(block.key in last_use for block in blocks[:num_found])
        assert num_found == len(blocks) or blocks[num_found].key not in last_use


def test_what_stands_behind_a_lost_block_is_found_again_when_it_comes_back() -> None:
    index, blocks = StoreIndex(), sequence(1, 2, 3)
    for block in blocks:
        index.add(block.key, block.parent)
    index.remove(blocks[1].key)
    assert index.longest(blocks) == 1
    index.add(blocks[1].key, blocks[1].parent)
    assert index.longest(blocks) == 3


def test_a_block_that_claims_to_be_its_own_ancestor_ends_nothing() -> None:
    """Only a forged file can say so: a key is a hash of its parent's."""
    index, (first, second) = StoreIndex(), sequence(1, 2)
    index.add(first.key, second.key)
    index.add(second.key, first.key)
    index.touch(first.key)
    assert index.oldest() is not None


# --- the journal ----------------------------------------------------------------------------------


def write_journal(path: Path, blocks: list[Block]) -> Journal:
    journal = Journal(path, LAYOUT.digest)
    journal.rewrite([])
    for block in blocks:
        journal.append(Record(ADDED, block.key, block.parent))
    return journal


def read_journal(path: Path) -> list[Record]:
    return JournalReader(path, LAYOUT.digest).read()[1]


def test_the_journal_tells_what_was_written_and_what_came_since(tmp_path: Path) -> None:
    blocks, path = sequence(1, 2, 3), tmp_path / "journal"
    journal = write_journal(path, blocks)
    reader = JournalReader(path, LAYOUT.digest)
    records = [Record(ADDED, block.key, block.parent) for block in blocks]
    assert reader.read() == (True, records)
    assert reader.read() == (False, [])
    journal.append(Record(USED, blocks[0].key))
    journal.append(Record(GONE, blocks[2].key))
    assert reader.read()[1] == [Record(USED, blocks[0].key), Record(GONE, blocks[2].key)]
    journal.rewrite([(blocks[0].key, None)])
    assert reader.read() == (True, records[:1])
    journal.close()


@pytest.mark.parametrize("content", [None, b"", b"STEMMAJ1", b"something else" * 20])
def test_no_journal_or_a_foreign_one_is_an_empty_one(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "journal").write_bytes(content)
    assert read_journal(tmp_path / "journal") == []


def test_a_journal_of_another_layout_is_an_empty_one(tmp_path: Path) -> None:
    write_journal(tmp_path / "journal", sequence(1)).close()
    assert JournalReader(tmp_path / "journal", bytes(16)).read() == (True, [])


@settings(deadline=None)
@given(st.data())
def test_a_cut_or_flipped_journal_loses_no_more_than_the_records_that_were_hit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-journal"
    blocks = sequence(1, 2, 3, 4, 5)
    write_journal(path, blocks).close()
    records = read_journal(path)
    whole = path.read_bytes()
    head_bytes, record_bytes = 24, (len(whole) - 24) // 5
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:cut])
        num_left = max(0, cut - head_bytes) // record_bytes
        assert read_journal(path) == records[:num_left]
    else:
        bit = data.draw(st.integers(8 * head_bytes, 8 * len(whole) - 1))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        hit = (bit // 8 - head_bytes) // record_bytes
        assert read_journal(path) == records[:hit] + records[hit + 1 :]


def test_a_record_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path, blocks = tmp_path / "journal", sequence(1, 2)
    write_journal(path, blocks).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    reader = JournalReader(path, LAYOUT.digest)
    assert len(reader.read()[1]) == 1
    with open(path, "ab") as file:
        file.write(whole[-10:])
        os.fsync(file.fileno())
    assert reader.read() == (False, [Record(ADDED, blocks[1].key, blocks[1].parent)])
