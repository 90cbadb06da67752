"""`python faulty_process.py FOLDER (serve|runtime) FLAGS...`: a server in which one call fails.

Runs `stemma serve`, or the engine's process, which the former starts likewise. On SIGUSR1 a process
reads which call is to fail from FOLDER/fault: a kind of FAULTS and the number of its calls until
then, this process's from now on; it confirms with FOLDER/armed.PID, and notes the failure in
FOLDER/failed.PID. What FOLDER/fault.serve or FOLDER/fault.runtime says fails from the start.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NO_FAULT = ("none", 0)


class Fault:
    """Counts calls of one kind, and lets the chosen one fail."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._kind, self._num_left = NO_FAULT
        if (at_start := folder / f"fault.{role}").exists():
            kind, number = at_start.read_text().split()
            self._kind, self._num_left = kind, int(number)
        signal.signal(signal.SIGUSR1, self._arm)

    def _arm(self, *_: object) -> None:
        kind, number = (self._folder / "fault").read_text().split()
        with self._lock:
            self._kind, self._num_left = kind, int(number)
        (self._folder / f"armed.{os.getpid()}").touch()

    def is_due(self, kind: str) -> bool:
        """Whether this call is the one."""
        with self._lock:
            if kind != self._kind:
                return False
            self._num_left -= 1
            if self._num_left:
                return False
            self._kind, self._num_left = NO_FAULT
        (self._folder / f"failed.{os.getpid()}").touch()
        return True

    def wrap(
        self,
        owner: Any,
        name: str,
        kind: str,
        fail: Callable[[], Any],
        counts: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Have a call of `owner.name` fail by what `fail` raises or returns; `counts`: which calls
        may."""
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if counts(*args) and self.is_due(kind):
                return fail()
            return plain(*args, **kwargs)

        setattr(owner, name, call)


def is_to_a_file(descriptor: int, *_: object) -> bool:
    """A write to a pipe, with which threads wake each other, fails only if that is full."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def fail_to_write() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_to_start() -> None:
    raise RuntimeError("can't start new thread")


def fail_to_send() -> None:
    import zmq

    raise zmq.ZMQError(errno.EHOSTUNREACH)


def fail_to_allocate() -> None:
    from stemma.errors import OutOfPages

    raise OutOfPages("this allocation was told to fail")


def install(fault: Fault) -> None:
    """All kinds that this process has."""
    import zmq

    from stemma.radix.pages import PageAllocator

    fault.wrap(os, "write", "write", fail_to_write, is_to_a_file)
    fault.wrap(os, "writev", "write", fail_to_write, is_to_a_file)
    fault.wrap(threading.Thread, "start", "thread", fail_to_start)
    fault.wrap(zmq.Socket, "send_multipart", "send", fail_to_send)
    fault.wrap(PageAllocator, "allocate", "page", fail_to_allocate)
    fault.wrap(PageAllocator, "allocate_at_most", "page", lambda: array("i"))


def start_engines_likewise(folder: Path) -> None:
    """Engines that this process starts run under this file, too."""
    plain = subprocess.Popen

    class Popen(plain):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, command: Sequence[str], *args: Any, **kwargs: Any) -> None:
            command = list(command)
            if "stemma.runtime" in command:
                flags = command[command.index("stemma.runtime") + 1 :]
                command = [sys.executable, __file__, str(folder), "runtime", *flags]
            super().__init__(command, *args, **kwargs)

    subprocess.Popen = Popen  # type: ignore[misc]


def main(folder: Path, role: str, flags: Sequence[str]) -> int:
    install(Fault(folder, role))
    if role == "runtime":
        from stemma.runtime.__main__ import main as run_engine

        return run_engine(flags)
    from stemma.__main__ import main as run_command

    start_engines_likewise(folder)
    return run_command(["serve", *flags])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
