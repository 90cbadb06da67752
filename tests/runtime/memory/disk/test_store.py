"""The store by itself: what was saved comes back, within the bound, or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_blocks import (
    FILE_BYTES,
    LAYOUT,
    fetched,
    open_store,
    payload_of,
    save_all,
    sequence,
    wait_for,
)
from waiting import PATIENCE_S, ready, wait_until

import stemma
from stemma.runtime.memory.disk.block_store import StoreMode
from stemma.runtime.memory.disk.folder import StoreFolder
from stemma.runtime.memory.disk.store import DiskStore


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def file_of(folder: Path, key: bytes) -> Path:
    return StoreFolder(folder, LAYOUT).path_of(key)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- saving and fetching --------------------------------------------------------------------------


def test_what_was_saved_comes_back_at_once_and_after_a_restart(tmp_path: Path) -> None:
    blocks = sequence(1, 2, 3)
    store = open_store(tmp_path)
    assert store.mode is StoreMode.WRITER and store.longest(blocks) == 0
    save_all(store, blocks)
    assert store.longest(blocks) == 3 and fetched(store, blocks) == 3
    store.close()
    store = open_store(tmp_path)
    assert store.longest([*blocks, *sequence(9)]) == 3 and fetched(store, blocks) == 3
    assert fetched(store, blocks[1:]) == 2, "a fetch may begin behind what is cached elsewhere"
    assert store.longest(sequence(1, 2, 4)) == 2
    store.close()


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, sequence(1, namespace="a"))
    assert store.longest(sequence(1, namespace="b")) == 0
    store.close()


def test_another_layout_finds_nothing_and_harms_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, sequence(1))
    other = DiskStore(tmp_path, replace(LAYOUT, model_revision="other"), max_bytes=1 << 20)
    assert other.mode is StoreMode.WRITER, "each layout has a writer of its own"
    assert other.longest(sequence(1)) == 0
    assert fetched(store, sequence(1)) == 1
    other.close()
    store.close()


def test_a_block_whose_parent_is_not_here_is_not_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = sequence(1, 2)
    assert not store.save(second, payload_of(second))
    assert store.stats.num_dropped == 1
    save_all(store, [first, second])
    store.close()


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_pending_bytes=3 * LAYOUT.block_bytes)
    stuck = threading.Event()
    write_file = store._write_file
    store._write_file = lambda *args: (stuck.wait(PATIENCE_S), write_file(*args))[1]  # type: ignore
    blocks = sequence(1, 2, 3, 4, 5)
    assert store.num_accepted() == 3
    accepted = [store.save(block, payload_of(block)) for block in blocks]
    assert accepted == [True] * 3 + [False] * 2 and store.stats.num_dropped == 2
    assert store.num_accepted() == 0
    assert store.note_use(blocks) == 3, "what is on its way need not be saved again"
    assert store.longest(blocks) == 0, "and cannot be fetched yet"
    stuck.set()
    assert store.flush(PATIENCE_S) and store.longest(blocks) == 3
    store.close()


def test_saving_twice_writes_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, sequence(1))
    save_all(store, sequence(1))
    assert store.stats.num_saved == 1
    store.close()


def test_close_writes_what_waits(tmp_path: Path) -> None:
    blocks = sequence(*range(20))
    store = open_store(tmp_path)
    for block in blocks:
        store.save(block, payload_of(block))
    store.close()
    assert len(files_of(tmp_path)) == 20
    (late,) = sequence(99)
    assert not store.save(late, payload_of(late)) and store.mode is StoreMode.OFF


def test_fetches_hold_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_fetch_bytes=3 * LAYOUT.block_bytes)
    blocks, others = sequence(1, 2, 3, 4, 5), sequence(6, 7)
    save_all(store, [*blocks, *others])
    first = store.fetch(blocks)
    assert len(wait_for(first, store)) == 3, "of more than fit only the first"
    second = store.fetch(others)
    assert not ready([store], 0.1) and not second.is_done
    first.release()
    assert len(wait_for(second, store)) == 2
    second.release()
    second.release()
    assert fetched(store, blocks[:3]) == 3
    store.close()


def test_a_fetch_can_be_cancelled_at_any_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_fetch_bytes=2 * LAYOUT.block_bytes)
    blocks = sequence(1, 2)
    save_all(store, blocks)
    for _ in range(50):
        fetches = [store.fetch(blocks) for _ in range(3)]
        for fetch in fetches:
            fetch.release()
    assert fetched(store, blocks) == 2, "nothing is left that counts"
    store.close()


# --- the bound ------------------------------------------------------------------------------------


def test_the_oldest_goes_first_and_parents_outlive_children(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_blocks=6)
    old, used, new = sequence(1, 2, 3), sequence(4, 5), sequence(6, 7, 8)
    save_all(store, old)
    save_all(store, used)
    assert store.note_use(old[:1]) == 1
    save_all(store, new)
    assert store.longest(new) == 3 and store.longest(old) == 1 and store.longest(used) == 2
    assert len(files_of(tmp_path)) == 6 and store.stats.num_evicted == 2
    store.close()


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_blocks=4)
    first, second = sequence(1, 2), sequence(3, 4)
    save_all(store, [*first, *second])
    assert fetched(store, first) == 2
    store.close()
    store = open_store(tmp_path, max_blocks=4)
    save_all(store, sequence(5))
    assert store.longest(first) == 2 and store.longest(second) == 1
    store.close()


def test_a_sequence_longer_than_the_bound_keeps_its_beginning(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_blocks=3)
    blocks = sequence(*range(6))
    for block in blocks:
        store.save(block, payload_of(block))
    assert store.flush(PATIENCE_S)
    assert store.longest(blocks) == 3 and len(files_of(tmp_path)) == 3
    store.close()


def test_a_smaller_bound_holds_from_the_start_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, sequence(*range(10)))
    store.close()
    store = open_store(tmp_path, max_blocks=4)
    assert len(files_of(tmp_path)) == 4 and store.longest(sequence(*range(10))) == 4
    store.close()


def test_the_journal_stays_small_over_many_uses(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("stemma.runtime.memory.disk.store._JOURNAL_SLACK", 50)
    store = open_store(tmp_path)
    save_all(store, sequence(1, 2))
    for _ in range(500):
        store.note_use(sequence(1, 2))
    assert store.flush(PATIENCE_S)
    (journal,) = tmp_path.rglob("journal")
    assert journal.stat().st_size < 60 * 80
    store.close()
    store = open_store(tmp_path)
    assert fetched(store, sequence(1, 2)) == 2
    store.close()


# --- damage ---------------------------------------------------------------------------------------

HEADER_BYTES = 1132
CUTS = [0, 1, 7, 8, 100, 104, 1000, 1128, 1131, 1132, 1133, 2000, FILE_BYTES - 5, FILE_BYTES - 1]


@pytest.mark.parametrize("cut", CUTS)
def test_a_torn_block_is_dropped_and_nothing_behind_it_is_returned(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = sequence(1, 2, 3)
    store = open_store(tmp_path)
    save_all(store, blocks)
    os.truncate(file_of(tmp_path, blocks[1].key), cut)
    assert fetched(store, blocks) == 1
    assert store.stats.num_corrupt == 1 and len(warnings_of(caplog)) == 1
    assert store.longest(blocks) == 1
    assert store.flush(PATIENCE_S) and not file_of(tmp_path, blocks[1].key).exists()
    save_all(store, [blocks[1]])
    assert fetched(store, blocks) == 3, "saved again, it serves those behind it again"
    store.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bit=st.integers(0, 8 * FILE_BYTES - 1), grown=st.booleans())
def test_no_flipped_bit_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, bit: int, grown: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    (block,) = sequence(1)
    store = open_store(folder)
    save_all(store, [block])
    path = file_of(folder, block.key)
    data = bytearray(path.read_bytes())
    if grown:
        data += b"\0"
    else:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    assert fetched(store, [block]) == 0 and store.stats.num_corrupt == 1
    store.close()


def test_a_file_of_zeros_is_dropped(tmp_path: Path) -> None:
    """What a file system may leave of a file that was not synced before the power failed."""
    (block,) = sequence(1)
    store = open_store(tmp_path)
    save_all(store, [block])
    file_of(tmp_path, block.key).write_bytes(bytes(FILE_BYTES))
    assert fetched(store, [block]) == 0 and store.stats.num_corrupt == 1
    store.close()


def test_a_file_under_the_name_of_another_is_dropped(tmp_path: Path) -> None:
    first, second = sequence(1)[0], sequence(2)[0]
    store = open_store(tmp_path)
    save_all(store, [first, second])
    file_of(tmp_path, first.key).write_bytes(file_of(tmp_path, second.key).read_bytes())
    assert fetched(store, [first]) == 0 and fetched(store, [second]) == 1
    store.close()


def test_a_key_that_stands_for_other_tokens_is_refused(tmp_path: Path) -> None:
    """As if two blocks' hashes were the same."""
    (block,) = sequence(1)
    store = open_store(tmp_path)
    save_all(store, [block])
    other = block._replace(token_ids=sequence(2)[0].token_ids)
    fetch = store.fetch([other])
    assert wait_for(fetch, store) == [] and store.stats.num_corrupt == 1
    store.close()


def test_a_file_that_vanished_is_only_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = sequence(1, 2)
    store = open_store(tmp_path)
    save_all(store, blocks)
    file_of(tmp_path, blocks[0].key).unlink()
    assert fetched(store, blocks) == 0
    assert store.stats.num_lost == 1 and store.stats.num_corrupt == 0
    assert not warnings_of(caplog)
    store.close()


@pytest.mark.parametrize("damage", ["removed", "cut", "zeros", "foreign"])
def test_without_its_journal_the_store_finds_its_files_again(tmp_path: Path, damage: str) -> None:
    blocks = sequence(1, 2, 3)
    store = open_store(tmp_path)
    save_all(store, blocks)
    store.close()
    (journal,) = tmp_path.rglob("journal")
    if damage == "removed":
        journal.unlink()
    elif damage == "cut":
        os.truncate(journal, journal.stat().st_size - 30)
    else:
        journal.write_bytes(bytes(1000) if damage == "zeros" else b"a shopping list")
    store = open_store(tmp_path)
    assert fetched(store, blocks) == 3
    store.close()


def test_at_the_start_what_is_no_block_is_removed_or_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = sequence(1, 2)
    store = open_store(tmp_path)
    save_all(store, blocks)
    store.close()
    shard = file_of(tmp_path, blocks[0].key).parent
    half_written = file_of(tmp_path, blocks[0].key).with_suffix(".tmp")
    half_written.write_bytes(b"half")
    false_block = shard / (shard.name + "0" * 62 + ".kv")
    false_block.write_bytes(b"no block")
    foreign = [shard / "notes.txt", shard / "short.kv", shard.parent / "zz", tmp_path / "aa"]
    for path in foreign:
        path.write_text("mine")
    (shard.parent / "0g").mkdir()
    store = open_store(tmp_path)
    assert fetched(store, blocks) == 2
    assert not half_written.exists() and not false_block.exists()
    assert all(path.read_text() == "mine" for path in foreign)
    assert len(warnings_of(caplog)) == 1
    store.close()


@pytest.mark.parametrize("damage", ["removed", "cut", "zeros"])
def test_a_journal_damaged_under_an_open_store_costs_no_block(tmp_path: Path, damage: str) -> None:
    blocks = sequence(1, 2, 3)
    store = open_store(tmp_path)
    save_all(store, blocks)
    (journal,) = tmp_path.rglob("journal")
    if damage == "removed":
        journal.unlink()
    elif damage == "cut":
        os.truncate(journal, 0)
    else:
        journal.write_bytes(bytes(journal.stat().st_size))
    save_all(store, sequence(4))
    assert fetched(store, blocks) == 3 and store.mode is StoreMode.WRITER
    store.close()
    store = open_store(tmp_path)
    assert fetched(store, blocks) == 3 and fetched(store, sequence(4)) == 1
    store.close()


def test_a_writer_killed_at_any_time_leaves_whole_blocks_within_the_bound(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(stemma.__file__).parent / "tests" / "support")!r})
from kv_blocks import *
from itertools import count
from pathlib import Path
store = open_store(Path({str(tmp_path)!r}), max_blocks=20)
print("open", flush=True)
for number in count():
    for block in sequence(number % 50, number % 7):
        store.save(block, payload_of(block))
    store.flush(60.0)
"""
    for delay_s in (0.0, 0.03, 0.1):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"open\n"
            time.sleep(delay_s)
            writer.kill()
        num_files = len(files_of(tmp_path))
        store = open_store(tmp_path, max_blocks=20)
        assert store.mode is StoreMode.WRITER and store.stats.num_corrupt == 0
        assert store.describe()["num_blocks"] == len(files_of(tmp_path)) == num_files <= 20
        for number in range(350):
            blocks = sequence(number % 50, number % 7)
            assert fetched(store, blocks) == store.longest(blocks)
        save_all(store, sequence(99))
        store.close()


# --- many processes -------------------------------------------------------------------------------


def test_a_second_store_only_reads_and_sees_what_the_first_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_store(tmp_path)
    reader = open_store(tmp_path, follow_s=0.02)
    assert reader.mode is StoreMode.READER
    assert len(warnings_of(caplog)) == 1 and "another process" in warnings_of(caplog)[0]
    blocks = sequence(1, 2, 3)
    assert not reader.save(blocks[0], payload_of(blocks[0])) and reader.num_accepted() == 0
    save_all(writer, blocks)
    wait_until(lambda: reader.longest(blocks) == 3)
    assert fetched(reader, blocks) == 3
    file_of(tmp_path, blocks[1].key).unlink()  # as the writer gives blocks up
    assert fetched(reader, blocks) == 1
    writer.close()
    wait_until(lambda: reader.mode is StoreMode.WRITER)
    save_all(reader, sequence(1, 2, 9))
    reader.close()


def test_a_reader_and_a_writer_at_their_bound_never_read_a_wrong_block(tmp_path: Path) -> None:
    """The writer gives blocks up while the reader, with an old index, fetches them."""
    writer = open_store(tmp_path, max_blocks=8)
    reader = open_store(tmp_path, follow_s=0.005)
    num_fetched = 0
    for round_ in range(60):
        blocks = sequence(round_ % 7, round_ % 5, round_ % 3)
        for block in blocks:
            writer.save(block, payload_of(block))
        writer.flush(60.0)
        num_fetched += fetched(reader, sequence(round_ % 7, (round_ + 1) % 5, round_ % 2))
    assert num_fetched and reader.stats.num_corrupt == 0
    reader.close()
    writer.close()


# --- disks that fail ------------------------------------------------------------------------------


def test_a_full_disk_ends_the_writing_with_one_warning(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    save_all(store, sequence(1))
    real_writev = os.writev

    def full(descriptor: int, buffers: list[memoryview]) -> int:
        if sum(map(len, buffers)) < 1000:
            raise OSError(28, "No space left on device")
        return real_writev(descriptor, [buffers[0][:500]])

    monkeypatch.setattr(os, "writev", full)
    blocks = sequence(1, 2, 3)
    for block in blocks:
        store.save(block, payload_of(block))
    assert store.flush(PATIENCE_S)
    assert store.mode is StoreMode.FAILED and len(warnings_of(caplog)) == 1
    assert "No space left" in warnings_of(caplog)[0]
    assert not store.save(blocks[1], payload_of(blocks[1]))
    assert fetched(store, blocks) == 1, "what was there can still be read"
    assert not list(tmp_path.rglob("*/*.tmp"))
    store.close()


def test_a_limit_on_file_sizes_ends_the_writing_only(tmp_path: Path) -> None:
    """The same with the system's own error."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(stemma.__file__).parent / "tests" / "support")!r})
from kv_blocks import *
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(Path({str(tmp_path)!r}))
save_all(store, sequence(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
store.save(sequence(2)[0], payload_of(sequence(2)[0]))
assert store.flush(60.0)
assert fetched(store, sequence(1)) == 1
print(store.mode.value)
store.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "failed\n" and done.stderr.count("is only read now") == 1


def test_a_folder_that_vanishes_ends_the_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "store")
    save_all(store, sequence(1))
    shutil.rmtree(tmp_path / "store")
    store.save(sequence(2)[0], payload_of(sequence(2)[0]))
    assert store.flush(PATIENCE_S) and store.mode is StoreMode.FAILED
    assert fetched(store, sequence(1)) == 0
    assert len(warnings_of(caplog)) == 1
    store.close()


def test_a_path_that_is_no_folder_turns_the_store_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = open_store(tmp_path / "file")
    assert store.mode is StoreMode.OFF and len(warnings_of(caplog)) == 1
    assert not store.save(sequence(1)[0], payload_of(sequence(1)[0]))
    assert store.longest(sequence(1)) == 0 and store.fetch(sequence(1)).is_done
    assert store.flush(PATIENCE_S)
    store.close()


def test_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    save_all(store, sequence(1))
    store.close()

    def denied(self: StoreFolder) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(StoreFolder, "try_lock", denied)
    store = open_store(tmp_path)
    assert store.mode is StoreMode.FAILED and len(warnings_of(caplog)) == 1
    assert fetched(store, sequence(1)) == 1
    store.close()


def test_a_defect_in_the_writer_does_not_reach_the_engine(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(store, "_write_file", lambda *args: 1 / 0)
    store.save(sequence(1)[0], payload_of(sequence(1)[0]))
    assert store.flush(PATIENCE_S) and store.mode is StoreMode.FAILED
    assert "ZeroDivisionError" in warnings_of(caplog)[0]
    store.close()
