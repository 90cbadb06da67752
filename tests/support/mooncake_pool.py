"""A Mooncake pool of a test's own: a master and a storage node; none where they cannot be had.

Mooncake's clients listen on all addresses, so all of it lives in a network of its own, which has
the loopback device alone.
"""

from __future__ import annotations

import functools
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kv_blocks import LAYOUT
from waiting import stop, wait_until

from stemma.errors import MissingDependency
from stemma.runtime.memory.remote import mooncake_client

MASTER, NODE = "127.0.0.1:50051", "50052"
NODE_MB = 64

# The loopback device is up from here on (SIOCSIFFLAGS, IFF_UP); and this process waits for its end.
_NETWORK = """
import fcntl, socket, struct, sys
with socket.socket() as any: fcntl.ioctl(any, 0x8914, struct.pack("16sh14x", b"lo", 1))
print(flush=True); sys.stdin.read()
"""


@functools.cache
def _why_not() -> str:
    """Why the library cannot be loaded here; nothing where it can."""
    try:
        mooncake_client.MooncakeClient(f"mooncake://{MASTER}", LAYOUT).close()
    except MissingDependency as error:
        return str(error)
    return ""


class MooncakePool:
    """Master and node; what they hold lives as long as the node's process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if reason := _why_not():
            pytest.skip(reason)
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        self._binaries = Path(spec.origin).parent
        self._folder = folder
        command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", _NETWORK]
        try:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._network = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)  # type: ignore[call-overload]
        except OSError as error:
            pytest.skip(f"no network of its own: {error}")
        if not self._network.stdout.readline():
            pytest.skip("no network of its own is allowed")
        enter = ["nsenter", "--preserve-credentials", "--user", "--net"]
        self._enter = [*enter, "--target", str(self._network.pid)]
        worker = (*self._enter, *mooncake_client.WORKER_COMMAND)
        monkeypatch.setattr(mooncake_client, "WORKER_COMMAND", worker)
        self.url = f"mooncake://{MASTER}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.start_master()
        self.start_node()

    def start_master(self) -> None:
        here, port = MASTER.split(":")
        at = [f"--rpc_address={here}", f"--rpc_port={port}", f"--metrics_host={here}"]
        self._start("mooncake_master", [*at, "--default_kv_lease_ttl=100"])
        self._log_says("mooncake_master", "Master service started")

    def start_node(self) -> None:
        at = ["--host=127.0.0.1", f"--port={NODE}", f"--master_server_address={MASTER}"]
        lent = [f"--global_segment_size={NODE_MB}MB", "--metadata_server=P2PHANDSHAKE"]
        self._start("mooncake_client", [*at, *lent])
        self._log_says("mooncake_client", "Starting real client service")

    def pause(self, name: str) -> None:
        stop(self._processes[name].pid)

    def go_on(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        self._network.communicate(b"")

    def _start(self, name: str, options: list[str]) -> None:
        command = [*self._enter, str(self._binaries / name), "--logtostderr", *options]
        with open(self._folder / name, "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._processes[name] = process

    def _log_says(self, name: str, text: str) -> None:
        process, log = self._processes[name], self._folder / name
        wait_until(lambda: text in log.read_text() or process.poll() is not None)
        assert process.poll() is None, f"{name} has ended: {log.read_text()[-500:]}"
