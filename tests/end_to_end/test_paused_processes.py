"""Each process is stopped past all limits of silence and continued: none is taken for dead, and all
that was under way ends as it would have. Real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, children, is_alive
from waiting import wait_until

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

PAUSE_S = 3.0  # more than any of these limits
FLAGS = ("--engine-timeout-s", "2", "--grace-s", "1", "--stream-stall-s", "2")
FLAGS = (*FLAGS, "--dtype", "float32")  # so that texts do not depend on who runs beside
NUM_TOKENS = 100
HANG = (
    "{% if hang %}{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a template that never ends if it is told so."""
    folder = tmp_path_factory.mktemp("model") / "hangs"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(HANG + "{{ messages[0].content }}")
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("paused") / "server"
    with ServerProcess(folder, "--model", str(model), *FLAGS) as server:
        yield server


@st.function
def chain(s: st.ProgramState, tag: str) -> None:
    s += tag + st.gen("first", max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    s += " and " + st.gen("second", max_tokens=20, temperature=0, ignore_eos=True)


CLIENT = """
import sys
import stemma as st
@st.function
def chain(s):
    s += "apart" + st.gen("first", max_tokens=100, temperature=0, ignore_eos=True)
    s += " and " + st.gen("second", max_tokens=20, temperature=0, ignore_eos=True)
with st.Runtime(sys.argv[1]) as runtime:
    for line in sys.stdin:
        state = chain.stream(backend=runtime)
        next(state.text_iter("first"))
        print("streaming", flush=True)
        print(repr(state.text()), flush=True)
"""


class Client:
    """A process of its own that runs a program whenever it is asked to."""

    def __init__(self, endpoint: str) -> None:
        script = [sys.executable, "-P", "-c", CLIENT, endpoint]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(script, stdin=pipe, stdout=pipe, text=True)

    def begin(self) -> None:
        """Returns once it streams."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.line() == "streaming\n"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    client = Client(server.endpoint)
    yield client
    client.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def runtime(server: ServerProcess) -> Iterator[st.Runtime]:
    with st.Runtime(server.endpoint) as runtime:
        yield runtime


@dataclass
class Family:
    """The processes of a server, and a program's client apart from it."""

    server: ServerProcess
    client: Client
    runtime: st.Runtime

    def pids(self, name: str) -> list[int]:
        """The processes of this name."""
        engine = self.server.engine_pid
        return {
            "server": [self.server.process.pid],
            "engine": [engine],
            "grammar workers": children(engine),
            "client": [self.client.process.pid],
        }[name]


@pytest.fixture(scope="module")
def family(server: ServerProcess, client: Client, runtime: st.Runtime) -> Family:
    return Family(server, client, runtime)


class Work:
    """One of each kind of request, under way."""

    def __init__(self, family: Family) -> None:
        server = family.server
        self._client = family.client
        self._client.begin()
        self._pool = ThreadPoolExecutor(4)
        self._whole = self._pool.submit(server.generate, NUM_TOKENS, temperature=0)
        self._number = self._pool.submit(server.generate, 8, regex=_fresh_regex(), temperature=0)
        self._program = self._pool.submit(chain.run, "near", backend=family.runtime)
        self._is_streaming: Future[None] = Future()
        self._stream = self._pool.submit(self._read_stream, server)
        self._is_streaming.result(60)

    def _read_stream(self, server: ServerProcess) -> str:
        with server.stream(NUM_TOKENS, temperature=0) as events:
            self._is_streaming.set_result(None)
            texts = [event["choices"][0]["text"] for event in events if event.get("choices")]
        return "".join(texts)

    def results(self) -> dict[str, Any]:
        """All texts; raises what any of them raised."""
        number = self._number.result(60)
        assert number.status_code == 200, number.text
        assert number.json()["choices"][0]["text"].isdecimal()
        whole = self._whole.result(60)
        assert whole.status_code == 200, whole.text
        return {
            "whole": whole.json()["choices"][0]["text"],
            "stream": self._stream.result(60),
            "program": self._program.result(60).text(),
            "client": self._client.line(),
        }


_num_regexes = 0


def _fresh_regex() -> str:
    """One that is not compiled yet."""
    global _num_regexes
    _num_regexes += 1
    return rf"[0-9]{{4,{5 + _num_regexes}}}"


def pause(pids: list[int], seconds: float = PAUSE_S) -> None:
    """Stop processes for a while; they are continued in the same order. Grammar workers have
    nothing to lose: one that takes too long is replaced."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(family: Family) -> dict[str, Any]:
    return Work(family).results()


NAMES = ("server", "engine", "grammar workers", "client")
FAST = [("server",), ("engine",), ("client",), ("server", "engine"), NAMES]
SLOW = [pair for pair in (("grammar workers",), *permutations(NAMES, 2)) if pair not in FAST]
CASES = [*FAST, *(pytest.param(names, marks=pytest.mark.slow) for names in SLOW)]


@pytest.mark.parametrize("stopped", CASES, ids=" and ".join)
def test_who_is_stopped_and_continued_is_not_dead_and_all_ends_as_it_would_have(
    family: Family, undisturbed: dict[str, Any], stopped: tuple[str, ...]
) -> None:
    server, engine = family.server, family.server.engine_pid
    under_way = Work(family)
    pause([pid for name in stopped for pid in family.pids(name)])
    assert under_way.results() == undisturbed
    assert server.engine_pid == engine and server.process.poll() is None, server.log
    assert server.status("/health") == 200


def test_an_engine_that_is_stopped_is_not_healthy(server: ServerProcess) -> None:
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: server.status("/health") == 503)
        assert server.status("/live") == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    server.wait_healthy()
    assert server.engine_pid == engine


def test_an_engine_that_hangs_is_replaced(server: ServerProcess) -> None:
    before = server.engine_pid
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"hang": True},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 503 and "silent" in answer.json()["error"]["message"]
    server.wait_healthy()
    assert server.engine_pid != before and not is_alive(before)
