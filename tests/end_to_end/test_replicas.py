"""`stemma serve --replicas 2` under kills: clients see nothing of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from replicated_programs import said_by
from server_process import ServerProcess, children
from waiting import wait_until

import stemma as st

FLAGS = ("--replicas", "2", "--dtype", "float32", "--speculate", "off")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("replicas"), *FLAGS) as server:
        server.wait_healthy()
        yield server


def engines(server: ServerProcess) -> list[int]:
    """The replicas' processes: those of the router, which is the server's one child."""
    return children(server.engine_pid)


def test_programs_and_streams_go_on_when_replicas_are_killed(server: ServerProcess) -> None:
    with st.Runtime(server.endpoint, timeout_s=60.0) as backend:
        wanted = said_by(backend)
        router, pids = server.engine_pid, engines(server)
        for victim in pids:
            killer = threading.Timer(0.1, os.kill, (victim, signal.SIGKILL))
            killer.start()
            assert said_by(backend) == wanted
            killer.join()
            wait_until(lambda: len(engines(server)) == 2)
            wait_until(lambda: all(r["state"] == "ready" for r in replicas(backend)))
        assert server.engine_pid == router and not set(pids) & set(engines(server))


def test_an_http_stream_goes_on_when_its_replica_is_killed(server: ServerProcess) -> None:
    body = {"seed": 3, "temperature": 0.7}
    whole = server.generate(200, **body).json()["choices"][0]["text"]
    with server.stream(200, **body) as events:
        parts = [next(events)]
        for pid in engines(server):
            os.kill(pid, signal.SIGKILL)
        parts += events
    text = "".join(part["choices"][0]["text"] for part in parts if part.get("choices"))
    assert text == whole
    server.wait_healthy()


def test_programs_and_streams_go_on_when_the_router_is_killed(server: ServerProcess) -> None:
    body = {"seed": 3, "temperature": 0.7}
    whole = server.generate(200, **body).json()["choices"][0]["text"]
    router = server.engine_pid
    with st.Runtime(server.endpoint, timeout_s=60.0) as backend:
        wanted = said_by(backend)
        with server.stream(200, **body) as events:
            parts = [next(events)]
            killer = threading.Timer(0.1, os.kill, (router, signal.SIGKILL))
            killer.start()
            assert said_by(backend) == wanted
            killer.join()
            parts += events
    text = "".join(part["choices"][0]["text"] for part in parts if part.get("choices"))
    assert text == whole
    server.wait_healthy()
    assert server.engine_pid != router


def test_a_replica_is_started_anew_over_http(server: ServerProcess) -> None:
    pids = engines(server)
    answer = httpx.post(server.url + "/restart_replica?replica=0", timeout=60)
    assert answer.status_code == 200 and answer.json()["replica"] == 0
    wait_until(lambda: len(engines(server)) == 2 and engines(server) != pids)
    server.wait_healthy()
    refused = httpx.post(server.url + "/restart_replica?replica=2", timeout=60)
    assert refused.status_code == 400 and "replica=2" in refused.text
    for replica in (0, 1):
        wait_until(lambda: server.status(f"/tree?replica={replica}") == 200)  # noqa: B023
    assert server.status("/tree?replica=2") == 400


def replicas(backend: st.Runtime) -> list[dict[str, Any]]:
    return list(backend.get_server_info()["replicas"])


def test_a_configuration_that_cannot_work_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="max_model_len=1000000 is not allowed"):
        ServerProcess(tmp_path, *FLAGS, "--max-model-len", "1000000")
    with pytest.raises(AssertionError, match=r"replicas=0 is not allowed"):
        ServerProcess(tmp_path, "--replicas", "0")


def test_a_router_that_is_stopped_takes_its_replicas_along(server: ServerProcess) -> None:
    """The last one of this file, whose server ends with it."""
    wait_until(lambda: len(engines(server)) == 2)
    pids = [server.engine_pid, *engines(server)]
    with server:
        pass
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))
