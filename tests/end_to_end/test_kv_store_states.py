"""--kv-store on folders in any state: engines say what they say without one, and go on.

In float64, where a stored prefix and a computed one may not differ in a single token. Engines with
their gateways run in threads of this process; where one is killed, in processes of their own.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_thread import serving
from waiting import wait_until

import stemma as st
from stemma.frontend.client.backend import Backend

TEXT = "".join(f"Rule {number}: {number * 7919 % 1000} comes first. " for number in range(40))
QUESTIONS = ("Which?", "Why?")
OPTIONS: dict[str, Any] = {"max_model_len": 4096, "max_total_tokens": 8192, "dtype": "float64"}


@st.function
def answer(s: st.ProgramState, question: str) -> None:
    s += TEXT + question
    s += st.gen("x", max_tokens=16, temperature=0.8, ignore_eos=True)


def texts(backend: Backend) -> list[str]:
    """What is answered, one after the other."""
    return [answer.run(question, backend=backend, seed=5)["x"] for question in QUESTIONS]


def store_of(backend: Backend) -> dict[str, Any]:
    info: dict[str, Any] = backend.get_server_info()["kv_store"]
    return info


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[str]:
    """Without a store."""
    with serving(checkpoint, **OPTIONS) as backend:
        return texts(backend)


@pytest.fixture(scope="module")
def full(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which an engine has left its answers' prefixes."""
    folder = tmp_path_factory.mktemp("store")
    with serving(checkpoint, kv_store=folder, **OPTIONS) as backend:
        texts(backend)
    assert len(blocks_in(folder)) >= 4
    return folder


def blocks_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def flip_bits(folder: Path) -> None:
    rng = random.Random(3)
    for path in blocks_in(folder)[::2]:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def cut(folder: Path) -> None:
    for number, path in enumerate(blocks_in(folder)):
        os.truncate(path, path.stat().st_size * number // 16)


def zero(folder: Path) -> None:
    for path in blocks_in(folder):
        path.write_bytes(bytes(path.stat().st_size))


def swap(folder: Path) -> None:
    """Each block under the name of another."""
    paths = blocks_in(folder)
    for path, data in zip(paths, [path.read_bytes() for path in reversed(paths)]):
        path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip_bits, cut, zero, swap])
def test_a_damaged_store_changes_no_answer_is_named_and_is_mended(
    checkpoint: Path,
    full: Path,
    truth: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    folder = shutil.copytree(full, tmp_path / "store")
    damage(folder)
    with serving(checkpoint, kv_store=folder, **OPTIONS) as backend:
        assert texts(backend) == truth
        assert store_of(backend)["num_corrupt"] > 0 and store_of(backend)["mode"] == "writer"
    dropped = [r.getMessage() for r in caplog.records if "was dropped" in r.getMessage()]
    assert dropped and all(str(folder) in message for message in dropped)
    with serving(checkpoint, kv_store=folder, **OPTIONS) as backend:
        assert texts(backend) == truth
        assert store_of(backend)["num_restored_tokens"] >= 256


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "another file"])
def test_a_damaged_journal_changes_no_answer_and_loses_no_block(
    checkpoint: Path, full: Path, truth: list[str], tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(full, tmp_path / "store")
    (journal,) = folder.rglob("journal")
    data = journal.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]
    damaged = {"cut": data[:middle], "flipped": flipped, "another file": b"PK\x03\x04" * 99}
    if damage == "gone":
        journal.unlink()
    else:
        journal.write_bytes(damaged[damage])
    with serving(checkpoint, kv_store=folder, **OPTIONS) as backend:
        assert texts(backend) == truth
        assert store_of(backend)["num_restored_tokens"] >= 3 * 256


def test_a_disk_that_becomes_full_changes_no_answer_and_is_named_once(
    checkpoint: Path,
    truth: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = 3  # blocks
    real = os.writev

    def writev(descriptor: int, buffers: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, buffers)

    with serving(checkpoint, kv_store=tmp_path, **OPTIONS) as backend:
        monkeypatch.setattr(os, "writev", writev)
        assert texts(backend) == truth
        wait_until(lambda: store_of(backend)["mode"] == "failed")
        assert texts(backend) == truth
    monkeypatch.undo()
    named = [r for r in caplog.records if "No space left" in r.getMessage()]
    assert len(named) == 1 and named[0].levelno >= logging.WARNING
    with serving(checkpoint, kv_store=tmp_path, **OPTIONS) as backend:  # there is space again
        assert texts(backend) == truth
        assert store_of(backend)["mode"] == "writer"


def test_a_path_that_is_no_folder_serves_without_a_store(
    checkpoint: Path, truth: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with serving(checkpoint, kv_store=tmp_path / "file", **OPTIONS) as backend:
        assert texts(backend) == truth and store_of(backend)["mode"] == "off"
    assert str(tmp_path / "file") in caplog.text


def test_models_that_share_a_folder_do_not_see_each_others_blocks(
    checkpoint: Path, full: Path, truth: list[str], tmp_path: Path
) -> None:
    """Of one shape and one tokenizer; also where one's blocks lie in the place of the other's."""
    folder = shutil.copytree(full, tmp_path / "store")
    other = make_checkpoint(tmp_path / "other", init_std=0.3, seed=12, max_position_embeddings=4096)
    with serving(other, **OPTIONS) as backend:
        others_truth = texts(backend)
    assert others_truth != truth
    (own,) = folder.iterdir()
    with serving(other, kv_store=folder, **OPTIONS) as backend:
        assert texts(backend) == others_truth
        assert store_of(backend)["num_restored_tokens"] == 0
    (others,) = set(folder.iterdir()) - {own}
    for path in blocks_in(own):
        target = others / path.relative_to(own)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    for model, expected in ((other, others_truth), (checkpoint, truth)):
        with serving(model, kv_store=folder, **OPTIONS) as backend:
            assert texts(backend) == expected
            assert store_of(backend)["num_restored_tokens"] > 0


def test_of_two_engines_on_a_folder_the_reader_takes_over_when_the_writer_is_killed(
    checkpoint: Path, truth: list[str], tmp_path: Path
) -> None:
    with running(checkpoint, tmp_path) as first, running(checkpoint, tmp_path) as second:
        assert (store_of(first)["mode"], store_of(second)["mode"]) == ("writer", "reader")
        assert texts(first) == truth
        wait_until(lambda: store_of(second)["num_blocks"] >= 4)
        assert texts(second) == truth and store_of(second)["num_restored_tokens"] >= 3 * 256
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: store_of(second)["mode"] == "writer")
        assert texts(second) == truth and store_of(second)["num_corrupt"] == 0


@contextmanager
def running(checkpoint: Path, store: Path) -> Iterator[st.Engine]:
    with st.Engine(checkpoint, num_threads=1, kernels="reference", kv_store=store, **OPTIONS) as e:
        yield e
