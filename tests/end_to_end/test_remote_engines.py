"""`stemma serve --engines`: a router before engines that others have started, by tcp with keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from replicated_programs import begun, said_by
from server_process import ServerProcess
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.cluster.settings import ClusterSettings
from stemma.errors import InvalidRequest
from stemma.frontend.protocol.keys import write_pair

FLAGS = ("--dtype", "float32", "--speculate", "off", "--max-total-tokens", "32768")


class Engines:
    """Engines as an operator starts them, each at an address that it keeps."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        write_pair(folder, folder, "server")
        for name in ("router", "stranger"):
            write_pair(folder, folder / "clients", name)
        (folder / "clients" / "stranger.key").unlink()
        self.endpoints = free_endpoints(count)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, endpoint: str, *flags: str) -> None:
        command = [sys.executable, "-P", "-m", "stemma.runtime", "--endpoint", endpoint]
        command += ["--server-key", f"{self._folder}/server.key_secret"]
        command += ["--client-keys", f"{self._folder}/clients", *FLAGS, *flags]
        self.processes[endpoint] = subprocess.Popen(command)

    def end(self, endpoint: str, number: int = signal.SIGKILL) -> None:
        self.processes[endpoint].send_signal(number)
        self.processes[endpoint].wait()

    def flags(self, client: str = "router") -> list[str]:
        keys = ["--engines-server-key", f"{self._folder}/server.key"]
        keys += ["--engines-client-key", f"{self._folder}/{client}.key_secret"]
        return ["--engines", *self.endpoints, *keys]


def free_endpoints(count: int) -> list[str]:
    with zmq.Context() as context:
        sockets = [context.socket(zmq.ROUTER) for _ in range(count)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        for socket in sockets:
            socket.close(0)
    return [f"tcp://127.0.0.1:{port}" for port in ports]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path, 2)
    yield engines
    for process in engines.processes.values():
        process.kill()
        process.wait()


def replicas(server: ServerProcess) -> list[dict[str, Any]]:
    info = httpx.get(server.url + "/get_server_info", timeout=PATIENCE_S).json()
    return list(info["replicas"])


def test_programs_go_on_while_engines_come_and_go(engines: Engines, tmp_path: Path) -> None:
    first, second = engines.endpoints
    engines.start(first)
    with ServerProcess(tmp_path / "server", *engines.flags(), has_engine=False) as server:
        with st.Runtime(server.endpoint, timeout_s=PATIENCE_S) as backend:
            wanted = said_by(backend)  # one engine is enough to begin with
            assert replicas(server)[1]["state"] != "ready"
            engines.start(second)
            wait_until(lambda: all(each["state"] == "ready" for each in replicas(server)))
            for endpoint, number in ((first, signal.SIGTERM), (second, signal.SIGKILL)):
                states = begun(backend)
                texts = [next(states).text()]
                engines.end(endpoint, number)
                assert [*texts, *(state.text() for state in states)] == wanted
                engines.start(endpoint)
                wait_until(lambda: all(each["state"] == "ready" for each in replicas(server)))
        refused = httpx.post(server.url + "/restart_replica?replica=0", timeout=PATIENCE_S)
        assert refused.status_code == 400 and "where they run" in refused.text


def test_an_engine_with_another_model_gets_no_programs(engines: Engines, tmp_path: Path) -> None:
    first, second = engines.endpoints
    engines.start(first)
    with ServerProcess(tmp_path / "server", *engines.flags(), has_engine=False) as server:
        engines.start(second, "--max-model-len", "1024")
        wait_until(lambda: "max_model_len" in replicas(server)[1].get("why", ""))
        assert "its max_model_len is 1024, not 2048" in server.log
        assert server.generate().status_code == 200
        engines.end(second)
        engines.start(second)
        wait_until(lambda: replicas(server)[1]["state"] == "ready")


def test_a_router_without_the_right_key_says_so_and_is_let_in_later(
    engines: Engines, tmp_path: Path
) -> None:
    for endpoint in engines.endpoints:
        engines.start(endpoint)
    folder = tmp_path / "server"
    folder.mkdir()
    command = [sys.executable, "-m", "stemma", "serve", "--port", "0"]
    command += ["--endpoint", f"ipc://{folder}/p.ipc", *engines.flags("stranger")]
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: "does not know this key" in log.read_text())
        secret = (tmp_path / "stranger.key_secret").read_text()
        public = "\n".join(line for line in secret.splitlines() if "secret-key" not in line)
        (tmp_path / "clients" / "stranger.key").write_text(public)
        wait_until(lambda: "Ctrl-C" in log.read_text())
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engines": ("tcp://10.0.0.1:5555",)}, "it needs server_key"),
        ({"engines": ("http://a",)}, r"allowed: addresses as tcp://HOST:PORT"),
        ({"engines": ("ipc:///x", "ipc:///x")}, "each address once"),
        ({"engines": ("ipc:///x",), "replicas": 2}, "replicas=2 is not allowed"),
    ],
)
def test_addresses_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ClusterSettings(**fields)


def test_flags_of_an_engine_do_not_go_with_engines_that_run_already(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="dtype='float32' is not allowed"):
        ServerProcess(tmp_path, "--engines", "ipc:///x", "--dtype", "float32", has_engine=False)
