"""Processes of a divided model, and of roles apart, are killed at random beside programs and
streams: what is said is what one process says, a failure tells that the engine has ended, and
nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from mixtures import make_mixture
from server_process import ServerProcess, num_files
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.bench.harness.process_meter import process_tree

FLAGS = ("--dtype", "float64", "--kernels", "reference", "--num-threads", "1")
SCHEMES = (
    "--tp-size 2",
    "--pp-size 2",
    "--tp-size 2 --pp-size 2",
    "--tp-size 2 --ep-size 2",
    "--pp-size 2 --kv-store kv",
    "--cp-size 2",
    "--tp-size 2 --cp-size 2",
    "--replicas 3 --prefill-replicas 1",
)
NUM_JOBS = 6
NUM_CLIENTS = 2  # of either kind
KINDS = ("program", "stream")
# The last of them: of a busy machine. Whoever hangs for good is found behind the last kill.
CLEAR = re.compile(r"the engine|engines in a row have ended|of the model has ended|no reply within")
SHARED_MEMORY = Path("/dev/shm")
LONG = "The quick brown fox jumps over the lazy dog. " * 30
NAP_S = 0.1


@st.function
def story(s: st.ProgramState, number: int) -> None:
    s += f"Story {number}: {LONG}"
    forks = s.fork(2)
    for index, fork in enumerate(forks):
        fork += f" ({index})" + st.gen("text", max_tokens=12, temperature=0.7, ignore_eos=True)
    forks.join("concate_and_append")
    s += st.gen("end", regex=r"[a-z]{4}\d", temperature=0.7)


def said_by_program(backend: st.Runtime, number: int) -> str:
    return story.run(number=number, seed=number, backend=backend).text()


class Failed(Exception):
    """A stream's error, or that of its beginning."""


def said_by_stream(server: ServerProcess, number: int, is_right: Callable[[str], bool]) -> str:
    """`is_right`: asked of what has come up to each event."""
    body = {"prompt": f"Tale {number}: {LONG}", "max_tokens": 32, "ignore_eos": True}
    body |= {"temperature": 0.7, "seed": number, "stream": True}
    text = ""
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        if answer.status_code != 200:
            raise Failed(answer.read().decode())
        for line in answer.iter_lines():
            if not line.startswith("data: "):  # nothing, or a comment
                continue
            if line == "data: [DONE]":
                return text
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed(str(event["error"]))
            text += event["choices"][0]["text"]
            assert is_right(text), text
    raise AssertionError(f"a stream ended without its last event: {text}")


class Clients:
    """Ask a server again and again, in threads, until they are told to stop."""

    def __init__(self, server: ServerProcess, one_process: ServerProcess) -> None:
        self.num_right: Counter[str] = Counter()
        self.failures: list[str] = []
        self._server = server
        self._is_over = threading.Event()
        self._undisturbed_since = time.monotonic()
        self._pool = ThreadPoolExecutor(2 * NUM_CLIENTS)
        numbers = range(NUM_JOBS)
        with st.Runtime(one_process.endpoint, timeout_s=PATIENCE_S) as backend:
            self._programs = [said_by_program(backend, number) for number in numbers]
        self._streams = [said_by_stream(one_process, number, lambda _: True) for number in numbers]
        self._running = [
            self._pool.submit(run, random.Random(seed))
            for seed in range(NUM_CLIENTS)
            for run in (self._run_programs, self._run_streams)
        ]

    def _run_programs(self, rng: random.Random) -> None:
        with st.Runtime(self._server.endpoint, timeout_s=PATIENCE_S) as backend:
            while not self._is_over.is_set():
                number = rng.randrange(NUM_JOBS)
                self._retried("program", lambda n=number: self._run_program(backend, n, rng))

    def _run_program(self, backend: st.Runtime, number: int, rng: random.Random) -> None:
        if rng.random() < 0.5:
            backend.flush_cache()
        assert said_by_program(backend, number) == self._programs[number]

    def _run_streams(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            number = rng.randrange(NUM_JOBS)
            self._retried("stream", lambda n=number: self._run_stream(n))

    def _run_stream(self, number: int) -> None:
        whole = self._streams[number]
        assert said_by_stream(self._server, number, whole.startswith) == whole

    def note_kill(self) -> None:
        """From now on an engine is to come up."""
        self._undisturbed_since = time.monotonic()

    def _retried(self, kind: str, call: Callable[[], None]) -> None:
        """Until it succeeds."""
        while True:
            try:
                call()
                self.num_right[kind] += 1
                return
            except (st.StemmaError, Failed) as error:
                assert CLEAR.search(str(error)), f"a failure that tells nothing: {error!r}"
                end = self._undisturbed_since + PATIENCE_S
                assert time.monotonic() < end, f"no engine for too long: {error!r}"
                self.failures.append(f"{kind}: {error}")
                time.sleep(NAP_S)

    def wait_answered(self) -> None:
        """Until either kind has been answered once more."""
        before = dict(self.num_right)

        def are_answered() -> bool:
            self.raise_errors()
            return all(self.num_right[kind] > before.get(kind, 0) for kind in KINDS)

        wait_until(are_answered)

    def raise_errors(self) -> None:
        for each in self._running:
            if each.done():
                each.result()

    def stop(self) -> None:
        self._is_over.set()
        self._pool.shutdown()
        self.raise_errors()


def kill_some(server: ServerProcess, rng: random.Random) -> None:
    """One or two processes of the engine, most often while it serves."""
    if rng.random() < 0.8:
        server.wait_healthy()
    time.sleep(rng.uniform(0.0, 2.0))
    wait_until(lambda: len(process_tree(server.process.pid)) > 1)
    family = process_tree(server.process.pid)[1:]
    for pid in rng.sample(family, min(len(family), rng.choice((1, 1, 1, 2)))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_with(marker: str) -> list[str]:
    """The command lines of all that were started with it in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kills_at_random_lose_nothing_and_leave_nothing(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int = 12
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = []
    if "--ep-size" in scheme:
        shape: dict[str, Any] = {"has_tokenizer": True, "max_position_embeddings": 2048}
        make_mixture(tmp_path / "model", "Mixtral", **shape)
        model = ["--model", str(tmp_path / "model")]
    shared = set(SHARED_MEMORY.iterdir())
    with ServerProcess(tmp_path / "one", *FLAGS, *model) as one_process:
        monkeypatch.setenv("TMPDIR", str(folder))
        server = ServerProcess(tmp_path / "many", *FLAGS, *model, *scheme.split())
        rng = random.Random(scheme)
        with server:
            clients = Clients(server, one_process)
            try:
                clients.wait_answered()
                files = num_files(server.process.pid)
                for _ in range(num_kills):
                    kill_some(server, rng)
                    clients.note_kill()
                    clients.raise_errors()
                    if rng.random() < 0.5:
                        clients.wait_answered()
                server.wait_healthy()
                clients.wait_answered()
            finally:
                clients.stop()
            wait_until(lambda: num_files(server.process.pid) <= files)
            with st.Runtime(server.endpoint) as backend:
                backend.flush_cache()
                info = backend.get_server_info()
                assert info["free_tokens"] == info["total_tokens"]
    print(f"{scheme}: {dict(clients.num_right)}, {Counter(clients.failures)}")
    wait_until(lambda: not processes_with(f"TMPDIR={folder}"))
    assert not list(folder.iterdir()), "files are left"
    assert not list((tmp_path / "many").glob("*.ipc*")), "sockets or locks are left"
    wait_until(lambda: set(SHARED_MEMORY.iterdir()) <= shared)
