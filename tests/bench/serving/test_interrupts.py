"""`stemma bench serving`, asked to end while its engines work, ends them and itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import stubborn_server
from waiting import wait_until

from stemma.bench.harness.descendants import kill_tree
from stemma.bench.harness.process_meter import has_ended

LIMIT_S = (
    12.0  # far below what closing the engines one after another would take (2 s, were it idle)
)
MARK = "STEMMA_TEST_MARK"


def _marked(mark: str) -> list[str]:
    """The commands of living processes that have inherited this mark, whoever is their parent."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [] if has_ended(int(folder.name)) else [command]
        except OSError:  # it has ended, or is another user's
            continue
    return found


@contextmanager
def _benchmark(folder: Path, mark: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """The benchmark, on three engines of which the last never ends what it has begun."""
    program = folder / "llama-server"
    program.write_text(f"#!{sys.executable}\n{Path(stubborn_server.__file__).read_text()}")
    program.chmod(0o755)
    gguf = folder / "model.gguf"
    gguf.touch()
    command = [sys.executable, "-m", "stemma", "bench", "serving", "--out", str(folder)]
    command += ["--work", "D1", "--repeats", "1", "--scale", "0.1", "--kv-tokens", "4096"]
    command += ["--http", "--peer", f"llamacpp={program},{gguf}"]
    with (folder / "log").open("wb") as log, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "told"))
        listener.listen()
        listener.settimeout(240)
        told = {MARK: mark, stubborn_server.SOCKET: str(folder / "told")}
        process = subprocess.Popen(command, env={**os.environ, **told}, stderr=log)
        try:
            yield process, listener
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait()


def test_a_signal_ends_it_and_all_that_it_has_started(tmp_path: Path) -> None:
    """Which one is the same: tests/bench/harness/test_descendants.py."""
    mark = uuid.uuid4().hex
    with _benchmark(tmp_path, mark) as (process, listener):
        listener.accept()[0].close()  # all engines run, and the last one generates
        running = _marked(mark)
        assert sum("llama-server" in command for command in running) >= 1
        assert sum("stemma serve" in command for command in running) >= 1
        assert sum("stemma.runtime" in command for command in running) >= 2, running
        assert sum("signal.pause()" in command for command in running) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 130
        assert _marked(mark) == []


def test_a_killed_one_ends_its_engines(tmp_path: Path) -> None:
    """Without a handler of its own: each runner hears of its parent's death."""
    mark = uuid.uuid4().hex
    with _benchmark(tmp_path, mark) as (process, listener):
        listener.accept()[0].close()
        process.kill()
        process.wait()
        wait_until(lambda: _marked(mark) == [])
