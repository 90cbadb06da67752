"""The embedded model over tcp, as a user sets it up: keys, a server, a client far away."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.bench.harness.tcp_proxy import TcpProxy
from stemma.bench.serving.latency import NUM_CALLS, programs
from stemma.bench.serving.runners.ports import free_port
from stemma.cli.parser import run_command

LATENCY_S = 0.05  # added to a round trip, half of it each way
REPEATS = 12  # of which the fastest counts: the machine may be busy

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def keys(stemma_command: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tcp") / "keys"
    done = stemma_command("keygen", "--out", str(folder))
    assert done.returncode == 0 and "stemma serve --endpoint tcp://" in done.stdout, done.stderr
    return folder


@pytest.fixture(scope="module")
def options(keys: Path) -> dict[str, Any]:
    return {"server_key": keys / "server.key", "client_key": keys / "client.key_secret"}


@pytest.fixture(scope="module")
def port(keys: Path) -> Iterator[int]:
    """The tcp port of a running `stemma serve` with keys."""
    port = free_port()
    command = [sys.executable, "-m", "stemma", "serve", "--port", str(free_port())]
    command += ["--endpoint", f"tcp://127.0.0.1:{port}", "--max-total-tokens", "32768"]
    command += ["--server-key", str(keys / "server.key_secret")]
    command += ["--client-keys", str(keys / "clients")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=keys, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(6)]
    assert "server_key=..., client_key=..." in lines[-1], lines
    yield port
    process.terminate()
    process.wait(20)


def added_s(program: Callable[..., Any], near: st.Runtime, far: st.Runtime) -> float:
    """How much longer the program's fastest run takes far away; in turns, for equal luck."""
    times: dict[st.Runtime, list[float]] = {near: [], far: []}
    for _ in range(REPEATS):
        for backend in times:
            start = time.perf_counter()
            program(backend=backend)
            times[backend].append(time.perf_counter() - start)
    return min(times[far]) - min(times[near])


def test_a_chain_that_never_looks_costs_one_round_trip_and_one_that_reads_costs_ten(
    port: int, options: dict[str, Any]
) -> None:
    with (
        TcpProxy(port, LATENCY_S) as proxy,
        st.Runtime(f"tcp://127.0.0.1:{port}", **options) as near,
        st.Runtime(f"tcp://127.0.0.1:{proxy.port}", **options) as far,
    ):
        chains = programs().values()
        captured, reading = (added_s(chain, near, far) / LATENCY_S for chain in chains)
    assert captured < NUM_CALLS / 3  # one, and what a busy machine adds
    assert reading > NUM_CALLS - 1.0


def test_commands_take_keys(stemma_command: Run, port: int, options: dict[str, Any]) -> None:
    flags = ["--endpoint", f"tcp://127.0.0.1:{port}"]
    keys = ["--server-key", str(options["server_key"]), "--client-key", str(options["client_key"])]
    done = stemma_command("generate", "Hello", *flags, *keys, "--max-tokens", "4")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    refused = stemma_command("tree", *flags)
    assert refused.returncode == 1 and "one side has keys" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("serve", "--endpoint", "tcp://0.0.0.0:5555"), "needs server_key and client_keys"),
        (("serve", "--server-key", "x"), "client_keys is missing"),
        (("serve", "--grace-s", "0"), "grace_s=0.0"),
        (("keygen", "--client", "../x"), "client='../x'"),
        (("keygen", "--client", "server"), "client='server'"),
    ],
)
def test_a_mistake_with_keys_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert run_command(flags) == 1
    assert message in capsys.readouterr().err


def test_keygen_never_replaces_a_key_and_adds_clients(
    capsys: pytest.CaptureFixture[str], keys: Path
) -> None:
    server = (keys / "server.key_secret").read_text()
    assert run_command(["keygen", "--out", str(keys)]) == 1
    assert "client.key_secret" in capsys.readouterr().err
    assert run_command(["keygen", "--out", str(keys), "--client", "bob"]) == 0
    assert (keys / "clients" / "bob.key").exists()
    assert (keys / "server.key_secret").read_text() == server
