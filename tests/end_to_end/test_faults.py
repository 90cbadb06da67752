"""A whole server in which a write, a thread's start, a send or an allocation fails: each request
ends once, with its result or a clear error, and the server goes on with all that it had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import faulty_process
import httpx
import pytest
from server_process import ServerProcess, num_files
from waiting import wait_until

import stemma as st

HANGS_S = 240.0
LONG = "word " * 4_000  # tokenized on a thread, and more than the context holds
KINDS = ("write", "thread", "send", "page")


class FaultyServer(ServerProcess):
    """`stemma serve` with a host tier, a disk store and a small pool, in which calls fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flags = ["--max-total-tokens", "1024", "--host-kv-tokens", "512"]
        flags += ["--kv-store", str(folder / "kv"), "--chunked-prefill-size", "128"]
        flags += ["--speculate", "off"]  # so that an answer has as many events as tokens
        popen = subprocess.Popen

        def started(command: list[str], **options: Any) -> Any:
            flags = command[command.index("serve") + 1 :]
            command = [sys.executable, faulty_process.__file__, str(folder), "serve", *flags]
            return popen(command, **options)

        subprocess.Popen = started  # type: ignore[assignment, misc]
        try:
            super().__init__(folder, *flags)
        finally:
            subprocess.Popen = popen  # type: ignore[misc]

    def arm(self, pid: int, kind: str, number: int) -> None:
        """Have the process's `number`th call of a kind fail."""
        (self.folder / "fault").write_text(f"{kind} {number}")
        for name in ("armed", "failed"):
            (self.folder / f"{name}.{pid}").unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        wait_until((self.folder / f"armed.{pid}").exists)

    def has_failed(self, pid: int) -> bool:
        """Whether the call came."""
        return (self.folder / f"failed.{pid}").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path_factory.mktemp("faulty")) as server:
        server.wait_healthy()
        yield server


# --- what clients ask, and how it may end ---------------------------------------------------------


def is_error(body: Any) -> bool:
    """Whether a body, or an event, tells a client what went wrong."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and bool(error.get("message"))


def asked(server: FaultyServer, path: str = "/v1/completions", **body: Any) -> bool:
    """Whether it was answered well; else it has a clear error."""
    answer = httpx.post(server.url + path, json=body, timeout=HANGS_S)
    if answer.status_code == 200:
        return True
    assert answer.status_code in (400, 429, 500, 502, 503) and is_error(answer.json()), answer.text
    return False


def completion(server: FaultyServer, number: int) -> bool:
    return asked(server, prompt=f"One {number}", max_tokens=12, ignore_eos=True)


def several(server: FaultyServer, number: int) -> bool:
    return asked(server, prompt=f"Samples {number}", n=3, max_tokens=8, ignore_eos=True)


def constrained(server: FaultyServer, number: int) -> bool:
    return asked(server, prompt="A number:", regex=f"{number}[0-9]{{3}}", max_tokens=8)


def chat(server: FaultyServer, number: int) -> bool:
    messages = [{"role": "user", "content": f"Hello {number}. " + "A word. " * 60}]
    return asked(server, "/v1/chat/completions", messages=messages, max_tokens=8)


def too_long(server: FaultyServer, number: int) -> bool:
    assert not asked(server, prompt=f"{number}{LONG}", max_tokens=4)
    return True


def streamed(server: FaultyServer, number: int) -> bool:
    body = {"prompt": f"Stream {number}", "max_tokens": 24, "ignore_eos": True, "stream": True}
    url, events = server.url + "/v1/completions", []
    with httpx.stream("POST", url, json=body, timeout=HANGS_S) as answer:
        if answer.status_code != 200:
            assert is_error(json.loads(answer.read()))
            return False
        for line in filter(None, answer.iter_lines()):
            events.append(line.removeprefix("data: "))
    last = [json.loads(event) for event in events if event != "[DONE]"][-1]
    is_whole = events[-1] == "[DONE]" and not is_error(last)
    assert is_whole != is_error(last), events[-2:]
    return is_whole


def program(server: FaultyServer, number: int) -> bool:
    @st.function
    def forks(s: st.ProgramState) -> None:
        s += f"Program {number} " + st.gen("a", max_tokens=8, ignore_eos=True)
        branches = s.fork(2)
        branches += " and " + st.gen("b", max_tokens=8, ignore_eos=True)
        branches.join()

    try:
        with st.Runtime(server.endpoint) as backend:
            return len(forks.run(backend=backend)["b"]) == 2
    except (st.ProgramError, st.EngineError) as error:
        assert str(error)
        return False


ASKED: tuple[Callable[[FaultyServer, int], bool], ...] = (
    completion, several, constrained, chat, too_long, streamed, program
)  # fmt: skip


def play(server: FaultyServer, number: int) -> list[bool]:
    """All at once; raises what no client should see."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        futures = {pool.submit(ask, server, number): ask.__name__ for ask in ASKED}
        hung = [futures[f] for f in wait(futures, HANGS_S).not_done]
        assert not hung, f"no end of {hung}: {server.log}"
        return [future.result() for future in futures]


# --- what must hold after it ----------------------------------------------------------------------


def info(server: FaultyServer) -> dict[str, Any]:
    with st.Runtime(server.endpoint) as backend:
        return backend.get_server_info()


def is_whole(server: FaultyServer) -> bool:
    """Nothing runs, and no page is lost."""
    now = info(server)
    is_idle = not (now["num_running"] or now["num_waiting"])
    return is_idle and now["free_tokens"] + now["evictable_tokens"] == now["total_tokens"]


def held(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return num_files(pid), len(os.listdir(f"/proc/{pid}/task"))


def check_fault(server: FaultyServer, of_engine: bool, kind: str, number: int) -> bool:
    """Whether the fault came to pass; nothing is lost or leaked by it."""
    pid = server.engine_pid if of_engine else server.process.pid
    server.arm(pid, kind, number)
    play(server, number)
    has_failed = server.has_failed(pid)
    assert server.process.poll() is None, server.log
    server.wait_healthy()
    server.arm(server.process.pid, *faulty_process.NO_FAULT)
    server.arm(server.engine_pid, *faulty_process.NO_FAULT)
    assert all(play(server, number)), server.log
    wait_until(lambda: is_whole(server))
    return has_failed


def check_sweep(server: FaultyServer, numbers: dict[str, tuple[int, ...]], of_engine: bool) -> int:
    """Returns how many faults came to pass."""
    for number in range(3):  # whatever is started or opened once
        assert all(play(server, number))
    pid = server.engine_pid if of_engine else server.process.pid
    num_files_before, num_threads_before = held(pid)
    num_failed = 0
    for kind, those in numbers.items():
        for number in those:
            if not check_fault(server, of_engine, kind, number):
                break
            num_failed += 1
            print(kind, number, flush=True)
    if (server.engine_pid if of_engine else server.process.pid) == pid:
        wait_until(lambda: held(pid)[0] <= num_files_before + 2)
        wait_until(lambda: held(pid)[1] <= num_threads_before + 4)
    return num_failed


@pytest.mark.parametrize(
    ("of_engine", "numbers"),
    [(True, {"write": (1,), "send": (3,), "page": (1, 4)}), (False, {"send": (1, 2)})],
    ids=["engine", "server"],
)
def test_a_fault_harms_only_its_own_requests(
    server: FaultyServer, numbers: dict[str, tuple[int, ...]], of_engine: bool
) -> None:
    pid = server.engine_pid
    assert check_sweep(server, numbers, of_engine) == sum(map(len, numbers.values()))
    assert server.engine_pid == pid, "the engine has ended: " + server.log


@pytest.mark.slow
@pytest.mark.parametrize("of_engine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_harms_only_its_own_requests(
    server: FaultyServer, kind: str, of_engine: bool
) -> None:
    pid = server.engine_pid
    num_failed = check_sweep(server, {kind: tuple(range(1, 60))}, of_engine)
    assert server.engine_pid == pid, "the engine has ended: " + server.log
    print(f"{num_failed} faults of kind {kind}, of_engine={of_engine}")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["write", "thread", "page"])
@pytest.mark.parametrize("role", ["serve", "runtime"])
def test_a_server_with_a_fault_as_it_starts_serves_or_says_why_not(
    tmp_path: Path, role: str, kind: str, number: int
) -> None:
    (tmp_path / f"fault.{role}").write_text(f"{kind} {number}")
    try:
        server = FaultyServer(tmp_path)
    except AssertionError as ended:  # it ended, with this log
        assert "stemma serve: " in str(ended) or "error: " in str(ended), str(ended)
        return
    (tmp_path / f"fault.{role}").unlink()
    with server:
        server.wait_healthy()
        play(server, 1)
        server.wait_healthy()
        assert all(play(server, 2)), server.log
        server.arm(server.process.pid, *faulty_process.NO_FAULT)  # if it has not come until now
