"""A section in a process of its own, seen from outside: started ahead, asked, ended in time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LAST_CHARS = 2000
_PACKAGE = Path(__file__).resolve().parents[2]


class SectionProcess:
    """Imports while another section measures, and waits to be asked."""

    def __init__(self, name: str, device: str, scale: str, peer_python: str | None) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="stemma-bench-"))
        (self._folder / "stemma").symlink_to(_PACKAGE)
        command = [
            sys.executable, "-m", "stemma.bench.roofline.sections",
            "--section", name, "--device", device, "--scale", scale,
        ]  # fmt: skip
        if peer_python is not None:
            command += ["--peer-python", peer_python]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(self._folder)},
                cwd=self._folder,
                start_new_session=True,  # so that a peer's process ends with it
            )

    def run(self, rates: dict[str, float], limit_s: float) -> Iterator[dict[str, Any]]:
        """The section's messages; one that is ended, or ends itself, has an error as its last."""
        assert self._process.stdin is not None and self._process.stdout is not None
        started, is_whole = time.monotonic(), False
        limit = threading.Timer(limit_s, self._kill)
        limit.start()
        try:
            print(json.dumps(rates), file=self._process.stdin, flush=True)
            for line in self._process.stdout:
                message: dict[str, Any] = json.loads(line)
                is_whole = "device" in message
                yield message
        except BrokenPipeError:
            pass  # it has ended, and says why in its log
        finally:
            limit.cancel()
        status = self._process.wait()
        if not is_whole or status != 0:
            took = time.monotonic() - started
            yield {"error": f"ended with status {status} after {took:.0f} s", "log": self._log()}

    def close(self) -> None:
        """End it."""
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """Of a process that was not waited for, so its number is still its own."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-_LAST_CHARS:]
