"""`stemma deploy` on a Ray cluster that it starts itself, with its ports on loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicated_programs import begun, said_by
from server_process import ServerProcess, children
from waiting import PATIENCE_S, wait_until

import stemma as st

pytest.importorskip("ray", reason="the extra `cluster` is not installed")

FLAGS = ("--ray", "auto", "--dtype", "float32", "--speculate", "off", "--ray-cpus", "0.5")


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """Ray takes its node's address from this variable and the machine's from nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="module")
def server(loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ray")
    try:
        server = ServerProcess(folder, *FLAGS, "--replicas", "2")
    except AssertionError as error:
        if "no Ray cluster at" in str(error):
            pytest.skip(f"Ray cannot start here: {error}")
        raise
    with server:
        server.wait_healthy()
        yield server


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, with their command lines."""
    found: dict[int, str] = {}
    for child in children(pid):
        found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        found |= descendants(child)
    return found


def pids_of(server: ServerProcess, name: str) -> list[int]:
    return [pid for pid, line in descendants(server.engine_pid).items() if name in line]


@pytest.mark.parametrize("victim", ["stemma.runtime ", "ray::EngineHost"])
def test_programs_go_on_when_what_ray_has_started_is_killed(
    server: ServerProcess, victim: str
) -> None:
    with st.Runtime(server.endpoint, timeout_s=PATIENCE_S) as backend:
        wanted = said_by(backend)
        before = pids_of(server, victim)
        assert len(before) == 2
        states = begun(backend)
        texts = [next(states).text()]
        os.kill(before[0], signal.SIGKILL)
        assert [*texts, *(state.text() for state in states)] == wanted
        wait_until(
            lambda: (
                [each["state"] for each in backend.get_server_info()["replicas"]]
                == ["ready", "ready"]
                and len(pids_of(server, victim)) == 2
                and pids_of(server, victim) != before
            )
        )
        assert said_by(backend) == wanted


def test_no_port_is_open_beyond_loopback_or_without_a_key(server: ServerProcess) -> None:
    for pid in pids_of(server, "stemma.runtime "):
        line = descendants(server.engine_pid)[pid]
        assert "tcp://127.0.0.1:" in line and "--server-key=" in line
        endpoint = next(word for word in line.split() if word.startswith("tcp://"))
        with pytest.raises(st.EngineError, match="has keys"):
            st.Runtime(endpoint, timeout_s=PATIENCE_S)


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no Ray cluster at ray='127.0.0.1:9'"):
        ServerProcess(tmp_path, "--ray", "127.0.0.1:9")


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"error: .*max_model_len=1000000 is not allowed"):
        ServerProcess(tmp_path, *FLAGS, "--max-model-len", "1000000")
