"""Processes are killed and stopped again and again beside a hostile client: what is alive goes on
with the right texts, what was killed is there again, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq
from server_process import ServerProcess, children, num_files
from waiting import wait_until

import stemma as st
from stemma.frontend.protocol import wire

FLAGS = ("--engine-timeout-s", "8", "--grace-s", "1", "--dtype", "float32")
LONGEST_PAUSE_S = 9.0  # more than these limits


@st.function
def short(s: st.ProgramState) -> None:
    s += "Once" + st.gen("x", max_tokens=8, temperature=0, ignore_eos=True)


class Hostile:
    """Sends rubbish and work that it never takes, over ZeroMQ and HTTP, until it is closed."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._flood, self._hang_up)]
        for thread in self._threads:
            thread.start()

    def _flood(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 10)
            socket.connect(self._server.endpoint)
            gen = ["gen", 0, 0, None, "x", {"max_tokens": 50, "ignore_eos": True}]
            number = 0
            while not self._is_over.wait(0.02):
                number += 1
                programs = [{"program": number, "ops": [gen], "create": {"stream": True}}]
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(wire.encode("hello"), zmq.NOBLOCK)
                    socket.send_multipart([b"\xff" * 100], zmq.NOBLOCK)
                    parts = wire.encode("ops", n=number, ack=0, programs=programs)
                    socket.send_multipart(parts, zmq.NOBLOCK)

    def _hang_up(self) -> None:
        while not self._is_over.wait(0.05):
            with contextlib.suppress(httpx.HTTPError, AssertionError, StopIteration):
                with self._server.stream(200):
                    pass

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


class Cycles:
    """A server that lives through what is done to its processes."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = folder
        self._rng = rng
        self.server = ServerProcess(folder, *FLAGS)
        self._runtime = st.Runtime(self.server.endpoint, timeout_s=60.0)
        self._expected = (self._text(), short.run(backend=self._runtime).text())

    def _text(self) -> str:
        answer = self.server.generate(8, temperature=0)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def once(self) -> None:
        """One fault, and then all is as before."""
        with contextlib.closing(Hostile(self.server)):
            engine = self.server.engine_pid
            faults = (self._pause, self._pause, self._kill_engine, self._kill_workers)
            fault = self._rng.choice(faults)
            fault()
            self.server.wait_healthy()
            is_new = self.server.engine_pid != engine
            assert is_new is (fault == self._kill_engine), self.server.log
            wait_until(self._is_right)

    def _is_right(self) -> bool:
        try:
            program = short.run(backend=self._runtime).text()
        except st.StemmaError:  # its engine was killed: known before its successor is
            return False
        assert (self._text(), program) == self._expected
        return True

    def _pause(self) -> None:
        engine = self.server.engine_pid
        family = [self.server.process.pid, engine, *children(engine)]
        stopped = self._rng.sample(family, self._rng.randint(1, len(family)))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0, LONGEST_PAUSE_S))
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):  # a grammar worker, which is replaced
                os.kill(pid, signal.SIGCONT)

    def _kill_engine(self) -> None:
        engine = self.server.engine_pid
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: engine not in children(self.server.process.pid))
        wait_until(lambda: bool(children(self.server.process.pid)))

    def _kill_workers(self) -> None:
        for pid in children(self.server.engine_pid):
            os.kill(pid, signal.SIGKILL)

    def replace_server(self) -> None:
        """`kill -9` of the whole server, and another one at the same address."""
        self.server.process.kill()
        self.server.process.wait()
        self.server = ServerProcess(self._folder, *FLAGS)
        wait_until(self._is_right)

    @property
    def num_files(self) -> int:
        return num_files(self.server.process.pid)

    def close(self) -> None:
        self._runtime.shutdown()
        with self.server:
            pass


@pytest.fixture
def cycles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cycles]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the server, whose leftovers are counted
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cycles = Cycles(tmp_path / "server", random.Random(7))
    yield cycles
    cycles.close()
    assert not list(tmp_path.glob("stemma-engine-*")), "folders are left"
    assert not list((tmp_path / "server").glob("*.ipc*")), "sockets or locks are left"


@pytest.mark.parametrize("num_cycles", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_and_pauses_beside_a_hostile_client_harm_nobody_else(
    cycles: Cycles, num_cycles: int
) -> None:
    files = cycles.num_files
    for number in range(num_cycles):
        cycles.once()
        if number % 25 == 1:
            cycles.replace_server()
            files = cycles.num_files
    wait_until(lambda: cycles.num_files <= files + 8)
