"""Very long texts are encoded in a process of their own (encoder_worker.py).

To encode 8 MB takes 2 to 5 s and a gigabyte for a moment. On a thread of the engine's process each
step took four times as long meanwhile (30 ms instead of 8 on two cores); beside a process at low
priority the steps hardly change. A text whose encoding takes unreasonably long ends only the
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

from ... import errors
from ...constrained.serving.frames import read_frame, write_frame
from ...errors import EngineError, InvalidRequest

NICENESS = 10
LIMIT_S = 60.0  # of CPU time for one text: ten times what 8 MB take
WORKER = "stemma.runtime.tokenizer.encoder_worker"
HEAD = struct.Struct("<qi")  # before a text: max_tokens, the number of ends; these follow as C ints
INTS, ERROR = b"\0", b"\1"  # before a reply: C ints, or JSON of a kind and a message


class EncoderProcess:
    """Owns the process, which the first text starts; thread-safe. Lifetime: until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def encode(self, text: str, max_tokens: int) -> array[int]:
        """The ids of plain text. Raises what `Tokenizer.encode_array` does, EngineError where the
        process does not work."""
        return self._answer(HEAD.pack(max_tokens, 0) + text.encode())

    def tokens_before(self, text: str, ends: Sequence[int]) -> array[int]:
        """How many of the text's tokens end at, or before, each of these characters, at least one.
        Raises what `encode` does."""
        head = HEAD.pack(0, len(ends)) + array("i", ends).tobytes()
        return self._answer(head + text.encode())

    def close(self) -> None:
        """End the process; a text that is being encoded fails, and so do later ones."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _answer(self, question: bytes) -> array[int]:
        with self._lock:
            reply = self._ask(question)
        if reply[:1] == ERROR:
            kind, message = json.loads(reply[1:])
            raise getattr(errors, kind)(message, "text")
        numbers = array("i")
        numbers.frombytes(memoryview(reply)[1:])
        return numbers

    def _ask(self, question: bytes) -> bytes:
        if self._is_closed:
            raise EngineError("the runtime is being stopped")
        if self._process is not None and self._process.poll() is not None:
            self._end(self._process)  # it was killed while it waited
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        reply = None
        with contextlib.suppress(OSError):  # it has ended
            write_frame(process.stdin, question)
            reply = read_frame(process.stdout)
        if reply is not None:
            return reply
        status = self._end(process)
        if status == -signal.SIGPROF:
            raise InvalidRequest(f"to tokenize this text takes more than {LIMIT_S:g} s", "text")
        raise EngineError(f"the process that tokenizes long texts has ended (exit code {status})")

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Forget the process; returns its exit code."""
        self._process = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # its output has ended: it is about to exit
        process.kill()
        with contextlib.suppress(OSError), process:  # closes its pipes, and waits for it
            pass
        return process.returncode

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(self._folder)],
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # its parent handles Ctrl-C
            )
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        except OSError as error:
            raise EngineError(f"no process for long texts can be started: {error}") from error
        return process
