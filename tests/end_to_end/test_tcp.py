"""The embedded model over tcp, as a user sets it up: keys, a server, a client far away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.bench.serving.latency import NUM_CALLS, programs
from stemma.bench.serving.runners.ports import free_port
from stemma.cli.parser import run_command
from stemma.frontend.protocol.link import Link

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
    process.wait(120)


def test_a_chain_that_never_looks_leaves_at_once_and_one_that_reads_leaves_in_ten_parts(
    port: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of one that reads waits for the values before it: that many round trips."""
    num_sent = 0
    put_list = Link.put_list

    def counted(link: Link, *args: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        put_list(link, *args)

    monkeypatch.setattr(Link, "put_list", counted)
    sent = []
    with st.Runtime(f"tcp://127.0.0.1:{port}", **options) as backend:
        for chain in programs().values():
            before = num_sent
            chain(backend=backend)
            sent.append(num_sent - before)
    captured, reading = sent
    assert captured < NUM_CALLS / 2, "its ops leave together, or a while after they were made"
    assert reading >= NUM_CALLS


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
