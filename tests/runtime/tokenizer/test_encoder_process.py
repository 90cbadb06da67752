"""The process that encodes very long texts: the same ids, and what happens when it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import BACKTRACKS, make_backtracking, make_byte_tokenizer
from waiting import stop

from stemma import piped_process
from stemma.errors import EngineError, InvalidRequest, PromptTooLong
from stemma.piped_process import PipedProcess
from stemma.runtime.tokenizer import encoder_process
from stemma.runtime.tokenizer.encoder_process import EncoderProcess


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[EncoderProcess]:
    encoder = EncoderProcess(make_backtracking(make_byte_tokenizer(tmp_path)))
    yield encoder
    encoder.close()


def pid_of(encoder: EncoderProcess) -> int:
    assert encoder._process is not None
    return encoder._process.pid


def test_ids_and_errors_come_back_and_the_process_stays(encoder: EncoderProcess) -> None:
    assert encoder.encode("naïve <eos>", 100).tolist() == list("naïve <eos>".encode())
    first = pid_of(encoder)
    with pytest.raises(PromptTooLong, match="5 tokens > 3 maximum"):
        encoder.encode("hello", 4)
    with pytest.raises(InvalidRequest, match=r"cannot take this text: .*retry-limit"):
        encoder.encode(BACKTRACKS, 1000)
    assert encoder.encode("", 0).tolist() == []
    assert pid_of(encoder) == first


def test_a_process_that_was_killed_while_idle_is_replaced(encoder: EncoderProcess) -> None:
    encoder.encode("a", 1)
    first = pid_of(encoder)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert encoder.encode("a", 1).tolist() == [97]
    assert pid_of(encoder) != first


def test_a_process_that_is_started_while_it_closes_is_not_waited_for(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: Any, **environment: str) -> PipedProcess:
        encoder._is_closed = True  # `close` begins here, and there is none to kill yet
        return PipedProcess(*args, **environment)

    monkeypatch.setattr(encoder_process, "PipedProcess", started)
    with pytest.raises(EngineError, match="the runtime is being stopped"):
        encoder.encode("a", 1)
    assert encoder._process is None


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (signal.SIGPROF, InvalidRequest, "takes more than 60 s"),
        (signal.SIGKILL, EngineError, "has ended .exit code -9"),
    ],
)
def test_a_process_that_ends_over_a_text_fails_that_text_alone(
    encoder: EncoderProcess,
    number: signal.Signals,
    kind: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder.encode("a", 1)
    with monkeypatch.context() as patch:

        def killed(_: object) -> None:
            os.kill(pid_of(encoder), number)

        patch.setattr(piped_process, "read_frame", killed)
        with pytest.raises(kind, match=message):
            encoder.encode("a", 1)
    assert encoder.encode("b", 1).tolist() == [98]


def test_a_process_that_was_stopped_is_replaced(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped_process, "LOOK_S", 0.05)
    encoder.encode("a", 1)
    first = pid_of(encoder)
    stop(first)
    assert encoder.encode("b" * 200_000, 200_000).tolist() == [98] * 200_000
    assert pid_of(encoder) != first


def test_a_process_without_time_to_run_fails_its_text_alone(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder.encode("a", 1)
    with monkeypatch.context() as starved:
        starved.setattr(piped_process, "LOOK_S", 0.01)
        starved.setattr(encoder_process, "WALL_LIMIT_S", 0.1)
        starved.setattr(encoder_process, "LIMIT_S", 0.1)
        starved.setattr(piped_process.PipedProcess, "_is_stopped", lambda _: False)
        stop(pid_of(encoder))
        with pytest.raises(EngineError, match=r"too busy .* try again"):
            encoder.encode("a", 1)
    assert encoder.encode("b", 1).tolist() == [98]


def test_a_process_that_has_grown_is_replaced(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by any text."""
    code = (
        "from stemma.runtime.tokenizer import encoder_worker\n"
        "encoder_worker.MAX_GROWTH_BYTES = -(2**40); encoder_worker.main()"
    )

    def soon_grown(command: list[str], *args: int, **environment: str) -> PipedProcess:
        return PipedProcess([sys.executable, "-P", "-c", code, command[-1]], *args, **environment)

    monkeypatch.setattr(encoder_process, "PipedProcess", soon_grown)
    pids = set()
    for _ in range(5):
        assert encoder.encode("a", 1).tolist() == [97]
        pids.add(pid_of(encoder))
    assert len(pids) == 5


def test_a_closed_one_starts_no_process(encoder: EncoderProcess) -> None:
    encoder.encode("a", 1)
    encoder.close()
    with pytest.raises(EngineError, match="being stopped"):
        encoder.encode("a", 1)
    assert encoder._process is None


def test_a_process_that_cannot_start_is_an_error(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(EngineError, match="no process for long texts can be started"):
        encoder.encode("a", 1)
