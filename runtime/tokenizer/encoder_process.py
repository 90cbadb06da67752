"""Very long texts are encoded in a process of their own (encoder_worker.py).

To encode 8 MB takes 2 to 5 s and a gigabyte for a moment. On a thread of the engine's process each
step took four times as long meanwhile (30 ms instead of 8 on two cores); beside a process at low
priority the steps hardly change. A text whose encoding takes unreasonably long ends only the
process, and one that leaves much memory behind has it replaced.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

from ... import errors
from ...errors import EngineError, InvalidRequest
from ...piped_process import PipedProcess, ProcessStopped, framed

NICENESS = 10
LIMIT_S = 60.0  # of CPU time for one text: ten times what 8 MB take
WALL_LIMIT_S = 60.0  # for a reply, besides the CPU time that it may take
WORKER = "stemma.runtime.tokenizer.encoder_worker"
HEAD = struct.Struct("<qi")  # before a text: max_tokens, the number of ends; these follow as C ints
INTS, ERROR = b"\0", b"\1"  # before a reply: C ints, or JSON of a kind and a message


class EncoderProcess:
    """Owns the process, which the first text starts; thread-safe. Lifetime: until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: PipedProcess | None = None
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
            self._end()

    def _answer(self, question: bytes) -> array[int]:
        with self._lock:
            reply = self._ask(framed(question))
        if reply[:1] == ERROR:
            kind, message = json.loads(reply[1:])
            raise getattr(errors, kind)(message, "text")
        numbers = array("i")
        numbers.frombytes(memoryview(reply)[1:])
        return numbers

    def _ask(self, question: bytes) -> bytes:
        """A process that was killed or stopped from outside is replaced once, and so is one that
        has ended because it had grown."""
        status: int | None = None
        for _ in range(2):
            process = self._running()
            try:
                reply = process.exchange(question, WALL_LIMIT_S + LIMIT_S)
            except TimeoutError as error:
                self._end()
                raise EngineError(f"the text is not tokenized: {error}") from error
            except (ProcessStopped, OSError):
                reply = None
            if reply is not None:
                return reply
            status = self._end()
            if status == -signal.SIGPROF:
                raise InvalidRequest(f"to tokenize this text takes more than {LIMIT_S:g} s", "text")
        raise EngineError(f"the process that tokenizes long texts has ended (exit code {status})")

    def _running(self) -> PipedProcess:
        if self._is_closed:
            raise EngineError("the runtime is being stopped")
        if self._process is not None and self._process.has_ended:
            self._end()
        if self._process is None:
            command = [sys.executable, "-P", "-m", WORKER, str(self._folder)]
            try:
                self._process = PipedProcess(command, NICENESS, RAYON_NUM_THREADS="1")
            except OSError as error:
                message = f"no process for long texts can be started: {error}"
                raise EngineError(message) from error
            if self._is_closed:  # `close` may have found none to kill, and waits for the lock
                self._process.kill()
        return self._process

    def _end(self) -> int | None:
        """Forget the process; returns its exit code."""
        process, self._process = self._process, None
        return None if process is None else process.end()
