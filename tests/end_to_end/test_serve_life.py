"""A server lives: it starts, its engine dies, it drains, it stops. Real processes, real kills."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, children, is_alive, num_files
from waiting import PATIENCE_S, wait_until

import stemma as st

LONG = 1900  # tokens; the context has 2048


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("life") / "server") as server:
        yield server


def test_it_prints_where_to_point_a_client(server: ServerProcess) -> None:
    lines = server.log.splitlines()
    curl = next(line for line in lines if "curl" in line)
    assert f"{server.url}/v1/chat/completions" in curl
    assert f"  page      {server.url}/" in lines
    assert any(server.endpoint in line for line in lines)


@pytest.mark.parametrize(
    "path", ["/health", "/health_generate", "/ping", "/ready", "/live", "/version"]
)
def test_a_server_that_works_says_so(server: ServerProcess, path: str) -> None:
    assert server.status(path) == 200


def test_a_head_without_end_is_refused(server: ServerProcess) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
        answer = b""
        try:
            for _ in range(100):
                client.sendall(b"x-long: " + b"y" * 10_000 + b"\r\n")
            answer = client.recv(4096)
        except ConnectionError:
            pass
    assert answer == b"" or answer.split()[1] in (b"431", b"400")
    assert server.status("/live") == 200


def test_a_port_that_is_taken_is_one_clear_line(server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "stemma", "serve", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot listen at" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stemma", "serve", "--port", "0"]
    command += ["--model", str(tmp_path / "no-such-model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no-such-model does not exist" in done.stderr and "Traceback" not in done.stderr


def test_an_engine_that_is_killed_fails_its_requests_at_once_and_is_there_anew(
    server: ServerProcess,
) -> None:
    before, files = server.engine_pid, num_files(server.process.pid)
    whole: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: whole.append(server.generate(LONG, n=8)))
    asking.start()
    with server.stream(LONG, n=8) as events:
        wait_until(lambda: running_programs(server) == 2)
        os.kill(before, signal.SIGKILL)
        *_, last = events
    asking.join()
    assert "SIGKILL" in last["error"]["message"] and "another one" in last["error"]["message"]
    assert whole[0].status_code == 503 and whole[0].headers["retry-after"], whole[0].text
    assert "SIGKILL" in whole[0].json()["error"]["message"]
    refused = server.generate()
    assert refused.status_code in (200, 503)
    if refused.status_code == 503:
        told = refused.json()["error"]["message"]  # by who notices first
        assert "restarted" in told or "another one is being started" in told
    server.wait_healthy()
    assert server.generate().status_code == 200
    assert server.process.poll() is None and server.engine_pid != before
    assert num_files(server.process.pid) <= files + 4, "each engine leaves files open"
    with st.Runtime(server.endpoint) as runtime:  # the address is the same
        assert runtime.get_server_info()["model"] == "stemma-tiny"


def running_programs(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.url}/server_info", timeout=120).json()["num_programs"])


def test_asked_to_stop_it_ends_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "server", "--drain-s", str(PATIENCE_S)) as server,
        st.Runtime(server.endpoint, timeout_s=5.0) as runtime,
    ):
        engine, story = server.engine_pid, Story(runtime)
        with server.stream(LONG) as events:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.status("/ready") == 503)
            refused = server.generate()
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
            assert "being stopped" in refused.json()["error"]["message"]
            assert server.status("/live") == server.status("/health") == 200
            with pytest.raises(st.ProgramError, match="takes no new programs"):
                Story(runtime).text()
            assert list(events)[-1] == {"done": True}
        assert len(story.text()) > 100
        assert server.process.wait(120) == 0, server.log
        assert "being stopped: 1 requests and " in server.log
        assert "requests are ended" not in server.log
        assert not is_alive(engine)
        with pytest.raises(st.EngineError, match="the runtime was stopped"):
            runtime.get_server_info()


class Story:
    """A program over ZeroMQ that runs for a while."""

    def __init__(self, runtime: st.Runtime) -> None:
        self._state = _story.stream(backend=runtime)

    def text(self) -> str:
        return self._state["story"]


@st.function
def _story(s: st.ProgramState) -> None:
    s += "Hi" + st.gen("story", max_tokens=LONG, ignore_eos=True)


def test_what_has_not_ended_by_the_deadline_is_told_so(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", "--drain-s", "0.2") as server:
        with server.stream(LONG, n=16) as events:
            server.process.send_signal(signal.SIGTERM)
            *_, last = events
        assert "had 0.2 s to end" in last["error"]["message"]
        assert server.process.wait(120) == 0, server.log
        assert "1 requests are ended: the server was stopped" in server.log


def test_asked_twice_it_does_not_wait(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server") as server:
        with server.stream(LONG, n=16) as events:
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: server.status("/ready") == 503)
            server.process.send_signal(signal.SIGINT)
            *_, last = events
        assert "at once" in last["error"]["message"]
        assert server.process.wait(120) == 0, server.log


def test_a_server_that_is_killed_leaves_no_engine_behind(server: ServerProcess) -> None:
    """The last one of the shared server."""
    family = [server.engine_pid, *children(server.engine_pid)]
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in family))
    path = Path(server.endpoint.removeprefix("ipc://"))
    wait_until(lambda: not list(path.parent.glob(f"{path.name}*")))


def test_a_signal_while_the_engine_starts_ends_it_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stemma", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        wait_until(lambda: bool(children(process.pid)))
        engines = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert not any(is_alive(pid) for pid in engines)
