"""The process that forks parsers (`parser_host.py`) as the engine sees it: started, replaced.

Nobody waits for it. A parser's channel is there at once, and keeps what is sent until a host has
forked the process that reads it. A thread of its own starts the host, and another one when that has
ended, or was stopped, and parsers are wanted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

from ...errors import EngineError
from ..vocabulary import Vocabulary
from .frames import ENGINE_STACK_BYTES, start_thread
from .positions import ENDING, FORK, Channel

log = logging.getLogger(__name__)

JOIN_S = 2.0  # for the thread, once the process has been killed
BUSY = "the machine is too busy to start a parser; try again"
STOPPED = "the engine is being stopped"


class HostProcess:
    """Owns the host. Thread-safe. Lifetime: until `close`; the first parser, or `start`, starts
    it."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called once, by the thread."""
        self._make_vocabulary = vocabulary
        self._vocabulary: IO[bytes] | None = None  # pickled
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # while the process runs
        self._received = bytearray()  # from it
        self._num_forked = 0
        self._waiting: deque[tuple[int, socket.socket]] = deque()  # numbers, parsers' ends
        self._endings: dict[int, int | str] = {}  # by the parsers' numbers
        self._is_closed = False

    def start(self) -> None:
        """Start ahead of the first parser what takes a second with a large vocabulary."""
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._thread = start_thread(self._run, ENGINE_STACK_BYTES)

    def fork(self) -> Channel:
        """The channel to a new process. Raises EngineError."""
        try:
            self.start()
            ours, theirs = socket.socketpair()
        except (OSError, RuntimeError) as error:
            raise EngineError(f"no parser can be started: {error}") from error
        with self._changed:
            self._num_forked += 1
            self._waiting.append((self._num_forked, theirs))
            self._hand_over()
            if self._is_closed:
                self._refuse(STOPPED)
            self._changed.notify()
            return Channel(ours, self._num_forked)

    def ending_of(self, number: int) -> int | str | None:
        """How the process has ended whose channel has: its exit code, negative for a signal; or
        why there was none. None: that is not known."""
        with self._changed:
            self._read_endings()
            return self._endings.pop(number, None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
            self._refuse(STOPPED)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            try:
                process, control = self._started()
            except Exception as error:
                log.info("no parser can be started: %s", error)
                self._refuse(f"no parser can be started: {error}")
            else:
                self._keep(process, control)
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
        if self._vocabulary is not None:
            self._vocabulary.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._vocabulary is None:
            self._vocabulary = _pickled(self._make_vocabulary())
        self._vocabulary.seek(0)
        control, theirs = socket.socketpair()
        control.setblocking(False)
        command = [sys.executable, "-P", "-m", "stemma.constrained.serving.parser_host"]
        with contextlib.ExitStack() as on_error, theirs:
            on_error.callback(control.close)
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env={**os.environ, **_SINGLE_THREADED},
                stdin=self._vocabulary,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its parent handles Ctrl-C
            )
            on_error.pop_all()
        return process, control

    def _keep(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        """Until the process has ended, or been stopped."""
        with self._changed:
            self._process, self._control = process, control
            if self._is_closed:
                process.kill()
            self._hand_over()
        with contextlib.suppress(ChildProcessError):  # another thread has seen its end
            os.waitpid(process.pid, os.WUNTRACED)
        process.kill()
        process.wait()
        with self._changed:
            self._read_endings()
            self._control = None
            control.close()

    # --- with the lock --------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give the host the sockets that wait."""
        while self._waiting and self._control is not None:
            number, theirs = self._waiting[0]
            try:
                socket.send_fds(self._control, [FORK.pack(number)], [theirs.fileno()])
            except ConnectionError:
                return  # it has ended: the next one takes it
            except OSError:
                self._endings[number] = BUSY
            self._waiting.popleft()
            theirs.close()

    def _read_endings(self) -> None:
        if self._control is None:
            return
        with contextlib.suppress(OSError):
            while data := self._control.recv(1 << 16):
                self._received += data
        whole = len(self._received) // ENDING.size * ENDING.size
        self._endings.update(ENDING.iter_unpack(self._received[:whole]))
        del self._received[:whole]

    def _refuse(self, reason: str) -> None:
        with self._changed:
            while self._waiting:
                number, theirs = self._waiting.popleft()
                self._endings[number] = reason
                theirs.close()


def _pickled(vocabulary: Vocabulary) -> IO[bytes]:
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(tempfile.TemporaryFile())
        pickle.dump(vocabulary, file)
        on_error.pop_all()
    return file


# A process that forks must have one thread; an arena per thread is 64 MB of address space.
_SINGLE_THREADED = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
