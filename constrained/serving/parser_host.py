"""`python -m stemma.constrained.serving.parser_host FD`: follows grammars, each in its own process.

Started by `parsers.py`. It reads the vocabulary from standard input and prepares what all parsers
share; then a fork for every socket that comes over the socket FD is one grammar's parser. The next
one is forked ahead, and follows a grammar that nobody asked for, so that its memory is its own
before it is needed. What a parser computes is bounded by the kernel: a timer of CPU time or a full
stack ends the process, a full address space ends the computation or the process. When the engine
has gone, the sockets end, and so do all of these.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, NoReturn

import numpy as np

from ...errors import InvalidGrammar
from ...piped_process import read_frame, write_frame
from ..compiled_grammar import CompiledGrammar
from ..compiler import compile_grammar, prepare
from ..matcher import BoundGrammar, Matcher
from ..pushdown import prepare_parsers
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .frames import ENGINE_STACK_BYTES, Refusal
from .positions import ENDING, FORK, MAX_EXTRA_BYTES, TOKEN_LIMIT_S, Advance, Opened, Position

NAME, NEXT_NAME = "stemma-parser", "stemma-next"  # of a process, and of the one forked ahead
OPEN_LIMIT_S = 2.0  # of CPU time, to bind a grammar: 50 times what a schema of 1,000 rules takes
# Behind the model's threads and the API: a parser that is caught in a loop gets a tenth of a core
# that they use. One that has slept runs at once all the same.
NICENESS = 10
# A recursive one, with text that is free and text that is forced.
_USUAL_SCHEMA = """{"type": "object", "required": ["name"], "properties": {
"name": {"type": "string"}, "parts": {"type": "array", "items": {"$ref": "#"}}}}"""
MAX_FORCED_TOKENS = 1024  # with one position
# Of CPU time for an answer, which then says no more of a guess: 10 times what a mask takes, and
# half of what the engine waits for an answer at most.
AHEAD_LIMIT_S = 0.005


def main() -> int:
    """Serve until the engine closes the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    with contextlib.suppress(ValueError, OSError):  # a lower one is the machine's choice
        resource.setrlimit(resource.RLIMIT_STACK, (ENGINE_STACK_BYTES, hard))
    vocabulary: Vocabulary = pickle.load(sys.stdin.buffer)
    prepare(vocabulary)
    prepare_parsers(vocabulary)
    usual = compile_grammar(GrammarSpec("json_schema", _USUAL_SCHEMA))
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, all that they share
    _Host(control, vocabulary, usual).serve()
    return 0


class _Host:
    """Forks parsers, and tells the engine how they have ended.

    It keeps their ends of the sockets open until that is told: whoever sees that a channel has
    ended can know why.
    """

    def __init__(
        self, control: socket.socket, vocabulary: Vocabulary, usual: CompiledGrammar
    ) -> None:
        """`usual`: what each parser follows ahead of its own grammar."""
        self._control = control
        self._vocabulary = vocabulary
        self._usual = usual
        self._parsers: dict[int, tuple[int, int]] = {}  # by process id: number, descriptor
        # The process id of the one forked ahead, and where it waits for its socket.
        self._next: tuple[int, socket.socket] | None = None

    def serve(self) -> None:
        child_r, child_w = os.pipe()
        os.set_blocking(child_w, False)
        signal.set_wakeup_fd(child_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()  # descriptors of any number
        for descriptor in (self._control.fileno(), child_r):
            poll.register(descriptor, select.POLLIN)
        while True:
            self._fork_next()
            ready = [descriptor for descriptor, _ in poll.poll()]
            if child_r in ready:
                os.read(child_r, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._start():
                return

    def _start(self) -> bool:
        """Whether there is an engine. Where no process can be forked the socket ends."""
        request, descriptors, _, _ = socket.recv_fds(self._control, FORK.size, 1)
        for descriptor in descriptors:
            self._reap()  # the next one, too, may have been ended or stopped
            self._fork_next()
            if self._next is None:
                os.close(descriptor)
                continue
            pid, waiting = self._next
            (number,) = FORK.unpack(request)
            self._next, self._parsers[pid] = None, (number, descriptor)
            with waiting, contextlib.suppress(OSError):  # it has just ended, which is told
                socket.send_fds(waiting, [b"\0"], [descriptor])
        return bool(request)

    def _fork_next(self) -> None:
        """Fork the next parser, unless it is there or none can be forked."""
        if self._next is not None:
            return
        with contextlib.suppress(OSError), contextlib.ExitStack() as on_error:
            waiting, theirs = socket.socketpair()
            on_error.callback(waiting.close)
            with theirs:
                pid = os.fork()
                if pid == 0:
                    waiting.close()
                    self._become_parser(theirs)
            on_error.pop_all()
            self._next = pid, waiting

    def _become_parser(self, waiting: socket.socket) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for _, other in self._parsers.values():
                os.close(other)
            _show_as(NEXT_NAME)
            position_of(self._usual.bind(self._vocabulary).matcher(), self._vocabulary.num_words)
            with waiting:
                descriptors = socket.recv_fds(waiting, 1, 1)[1]
            _show_as(NAME)
            for descriptor in descriptors:  # none: the host has gone
                _follow(socket.socket(fileno=descriptor), self._vocabulary)
            os._exit(0)
        except _GuessFailed:
            pass  # the engine asks another process, without a guess
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._next is not None and pid == self._next[0]:
                self._next[1].close()
                self._next = None
            if os.WIFSTOPPED(status):  # its outputs wait, and can go on in another one
                os.kill(pid, signal.SIGKILL)
            elif pid in self._parsers:
                number, descriptor = self._parsers.pop(pid)
                if status != 0:
                    self._control.sendall(ENDING.pack(number, os.waitstatus_to_exitcode(status)))
                os.close(descriptor)


def _show_as(name: str) -> None:
    """To those who look at processes, where the system lets a process name itself."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as own:
        own.write(name)


def _follow(connection: socket.socket, vocabulary: Vocabulary) -> None:
    """One grammar's parser, from its first frame until the engine closes the socket."""
    _limit_memory()
    with contextlib.suppress(OSError):
        frames, replies = connection.makefile("rb"), connection.makefile("wb")
        frame = read_frame(frames)
        bound = None if frame is None else _opened(frame, replies, vocabulary)
        if bound is not None:
            _Parser(bound, vocabulary.num_words).serve(frames, replies)


def _opened(frame: bytes, replies: IO[bytes], vocabulary: Vocabulary) -> BoundGrammar | None:
    compiled: CompiledGrammar = pickle.loads(frame)
    try:
        with _cpu_limit(OPEN_LIMIT_S):
            bound = compiled.bind(vocabulary)
        first = position_of(bound.matcher(), vocabulary.num_words)
    except (InvalidGrammar, MemoryError, RecursionError) as error:
        message = str(error) or type(error).__name__
        write_frame(replies, pickle.dumps(Refusal(message, InvalidGrammar.__name__)))
        return None
    write_frame(replies, pickle.dumps(Opened(first, bound.warnings)))
    return bound


class _GuessFailed(RuntimeError):
    """The matcher failed over a guess, which says nothing of what the output is."""


class _Parser:
    """A grammar's outputs, each with its matcher."""

    def __init__(self, bound: BoundGrammar, num_words: int) -> None:
        self._bound = bound
        self._num_words = num_words
        self._matchers: dict[int, Matcher] = {}

    def serve(self, frames: IO[bytes], replies: IO[bytes]) -> None:
        while (frame := read_frame(frames)) is not None:
            advance: Advance = pickle.loads(frame)
            for number, origin in advance.forks:
                with _cpu_limit(TOKEN_LIMIT_S):
                    self._matchers[number] = self._matchers[origin].fork()
            for number in advance.ended:
                self._matchers.pop(number, None)
            expected = dict(advance.expected)
            for number, tokens in advance.taken:
                position = self._after(number, tokens, expected.get(number, ()))
                write_frame(replies, pickle.dumps(position))

    def _after(self, number: int, tokens: Sequence[int], expected: Sequence[int] = ()) -> Position:
        """Where an output stands after its next tokens. Raises MemoryError: what its process has
        for all outputs is used up, and the next one begins anew; and whatever a guess raises."""
        began_s = time.process_time()
        try:
            matcher = self._matchers.get(number)
            if matcher is None:
                matcher = self._matchers[number] = self._bound.matcher()
            for token_id in tokens:
                if not _is_taken(matcher, token_id):
                    refused = f"token {token_id} does not follow from the grammar"
                    return Position(error=matcher.error() or refused)
            position = position_of(matcher, self._num_words)
        except MemoryError:
            raise
        except Exception as error:
            return Position(error=f"the matcher failed: {type(error).__name__}: {error}")
        if not expected or position.error is not None:
            return position
        with _cpu_limit(TOKEN_LIMIT_S):
            matcher = matcher.fork()
        until_s = began_s + AHEAD_LIMIT_S
        ahead = tuple(self._ahead(matcher, position, deque(expected), until_s))
        if (failure := matcher.error()) is not None:
            # NOTE: what the outputs share (`PushdownGrammar.renew`) may be used up with it.
            raise _GuessFailed(failure)
        return replace(position, ahead=ahead)

    def _ahead(
        self, matcher: Matcher, position: Position, guess: deque[int], until_s: float
    ) -> Iterator[tuple[int, Position]]:
        """See `Position.ahead`. It ends before a position that has an error or no mask, where the
        output asks for itself, and at a CPU time, for others wait for the answer."""
        while time.process_time() < until_s:
            for token_id in position.forced:
                if not guess or guess.popleft() != token_id:
                    return
            if not guess or position.is_finished or not position.allows(guess[0]):
                return
            token_id = guess.popleft()
            if not _is_taken(matcher, token_id):
                return
            position = position_of(matcher, self._num_words)
            if position.error is not None or position.mask is None:
                return
            yield token_id, position


def position_of(matcher: Matcher, num_words: int) -> Position:
    """Where a matcher stands, once it has followed what is forced."""
    forced: list[int] = []
    while run := _forced_tokens(matcher)[: MAX_FORCED_TOKENS - len(forced)]:
        for token_id in run:
            if not _is_taken(matcher, token_id):
                return Position(tuple(forced), error=matcher.error() or "what it forces it refuses")
            forced.append(token_id)
    if len(forced) >= MAX_FORCED_TOKENS:
        return Position(tuple(forced), error=matcher.error())
    mask = np.zeros(num_words, np.uint32)
    with _cpu_limit(TOKEN_LIMIT_S):
        matcher.mask(mask)
        return Position(
            tuple(forced), mask.tobytes(), matcher.is_accepting(), matcher.is_finished(),
            matcher.error(),
        )  # fmt: skip


def _forced_tokens(matcher: Matcher) -> Sequence[int]:
    with _cpu_limit(TOKEN_LIMIT_S):
        return matcher.forced_tokens()


def _is_taken(matcher: Matcher, token_id: int) -> bool:
    with _cpu_limit(TOKEN_LIMIT_S):
        return matcher.consume(token_id)


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """The kernel ends the process where this takes more CPU time: no native code is asked."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    """Bound what a grammar may map, where the system says how much that is."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + MAX_EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
