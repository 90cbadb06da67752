"""Grammars that a third-party parser follows, each in a process of its own that may be killed.

Whether a parser's native code returns is not known for every grammar, so none runs in the engine's
process. What an output takes is sent to its grammar's process, which answers with where the output
stands then: what is forced, and the mask behind it. Nobody waits for that: an output whose position
is not known yet computes nothing, and the others go on.

A process that ends has been stopped by a limit (`parser_host.py`), or from outside: its outputs
follow their tokens again in another one. The one that it was busy with may do so once more.
"""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

from ...errors import EngineError, InvalidGrammar
from ..compiler import CompiledGrammar
from ..vocabulary import Vocabulary
from .frames import ENGINE_STACK_BYTES, Refusal, read_frame, write_frame
from .parsed_output import ParsedOutput
from .positions import MAX_EXTRA_BYTES, TOKEN_LIMIT_S, Advance, Channel, Opened, Position

MAX_PARSERS = 32  # processes, of some 6 MB each; the least recently used one is ended
MAX_LOSSES = 2  # of its process by one output: the first may have been killed from outside
LATE_S = 0.01  # 20 times what a mask takes: from then on nobody waits for it
MAX_FAILED_OUTPUTS = 2  # of a grammar, which is then refused
OPEN_TIMEOUT_S = 60.0  # of wall time, on a very busy machine, the host's start included
ENDED = (
    f"its parser's process ended: one token takes more than {TOKEN_LIMIT_S} s of CPU time, "
    f"{MAX_EXTRA_BYTES >> 20} MB of memory or {ENGINE_STACK_BYTES >> 20} MB of stack; "
    "let neighbouring terminals not begin or end alike"
)


class ParsedGrammar:
    """A grammar that a process follows: shared by all its outputs."""

    path: Literal["pushdown"] = "pushdown"

    def __init__(self, parser: Parser, reason: str, warnings: tuple[str, ...]) -> None:
        self.reason = reason
        self.warnings = warnings
        self._parser = parser

    @property
    def num_bytes(self) -> int:
        """In this process."""
        return self._parser.num_bytes

    def follower(self, jump_forward: bool, stop_ids: frozenset[int]) -> ParsedOutput:
        """The state of one more output, at its start."""
        return ParsedOutput(self._parser, self._parser.first, jump_forward, stop_ids)


class Parsers:
    """Owns the processes that follow grammars.

    Invariants: at most `MAX_PARSERS` run, and those with outputs that wait; each has at most one
    message to answer; after `send` and `collect`, whoever waits has one under way, so that the
    selector wakes the engine. `open` is called by any thread, all else by the engine's. Lifetime:
    until `close`; the first grammar starts the processes.
    """

    def __init__(self, selector: selectors.BaseSelector, vocabulary: Callable[[], Vocabulary]):
        """`selector` also watches the processes."""
        self._selector = selector
        self._host = _Host(vocabulary)
        self._opened: deque[Parser] = deque()  # appended to by other threads
        self._running: OrderedDict[Parser, None] = OrderedDict()
        self._busy: set[Parser] = set()  # with outputs whose positions are not known

    @property
    def is_ready(self) -> bool:
        """Whether `collect` has work."""
        return bool(self._running and self._selector.select(0))

    def __len__(self) -> int:
        """Processes that follow a grammar."""
        return len(self._running)

    def start(self) -> None:
        """Start ahead of the first grammar what takes a second with a large vocabulary."""
        self._host.start()

    def open(self, compiled: CompiledGrammar) -> ParsedGrammar:
        """Wait until a process follows the grammar. Raises InvalidGrammar, or EngineError."""
        frame = pickle.dumps(compiled)
        connection = self._host.fork()
        connection.settimeout(OPEN_TIMEOUT_S)
        try:
            with connection.makefile("wb") as output, connection.makefile("rb") as replies:
                write_frame(output, frame)
                reply = read_frame(replies)
        except TimeoutError as error:
            raise EngineError(f"no parser in {OPEN_TIMEOUT_S:g} s; try again") from error
        except OSError:
            reply = None
        opened: Opened | Refusal = Refusal(ENDED, "") if reply is None else pickle.loads(reply)
        if isinstance(opened, Refusal):
            connection.close()
            raise InvalidGrammar(opened.message)
        parser = Parser(self, frame, opened.first, Channel(connection))
        self._opened.append(parser)
        return ParsedGrammar(parser, compiled.reason, compiled.warnings or opened.warnings)

    def send(self) -> None:
        """Send what outputs have taken."""
        for parser in list(self._busy):
            self._guarded(parser, parser.send)

    def collect(self, patience_s: float = 0.0) -> None:
        """Take what the processes have answered, waiting at most so long for those that usually
        answer at once."""
        while self._opened:
            parser = self._opened.popleft()
            if parser.channel is not None:
                self.watch(parser, parser.channel)
        self.send()
        until_s = time.perf_counter() + patience_s
        while self._running and self._take_answers(until_s) and self._busy:
            pass

    def _take_answers(self, until_s: float) -> bool:
        """Whether there were any."""
        now_s = time.perf_counter()
        is_late = all(parser.answered_s < now_s - LATE_S for parser in self._busy)
        left_s = 0.0 if is_late else max(0.0, until_s - now_s)
        ready = [key.data for key, _ in self._selector.select(left_s) if key.data is not None]
        for parser in ready:
            self._guarded(parser, parser.collect)
        return bool(ready)

    def close(self) -> None:
        """End all processes. What they are doing ends by itself, at a limit."""
        for parser in list(self._running):
            self._end(parser)
        self._host.close()

    # --- for parsers ----------------------------------------------------------------------------

    def note_busy(self, parser: Parser, is_busy: bool) -> None:
        if is_busy:
            self._busy.add(parser)
        else:
            self._busy.discard(parser)

    def connect(self, parser: Parser) -> Channel:
        """A new process for a parser that has none. Raises EngineError."""
        return Channel(self._host.fork())

    def watch(self, parser: Parser, channel: Channel) -> None:
        """Note that a process is used, and end the least recently used beyond the limit."""
        if parser not in self._running:
            self._selector.register(channel, selectors.EVENT_READ, parser)
            self._running[parser] = None
        self._running.move_to_end(parser)
        if len(self._running) > MAX_PARSERS:
            idle = next((p for p in self._running if p not in self._busy), None)
            if idle is not None:
                self._end(idle)

    def _guarded(self, parser: Parser, verb: Callable[[], None]) -> None:
        try:
            verb()
            channel = parser.channel
            if channel is not None and parser in self._running:
                write = selectors.EVENT_WRITE if channel.has_unsent else 0
                self._selector.modify(channel, selectors.EVENT_READ | write, parser)
        except (OSError, EOFError):
            self._end(parser)
            parser.lose()
            self._guarded(parser, parser.send)  # ends: of each output, few losses are tolerated
        except EngineError as error:
            parser.fail(str(error))

    def _end(self, parser: Parser) -> None:
        if parser in self._running:
            assert parser.channel is not None
            self._selector.unregister(parser.channel)
            del self._running[parser]
        parser.end()


class Parser:
    """A grammar's process, while it has one, and the outputs that wait for it."""

    def __init__(
        self, parsers: Parsers, frame: bytes, first: Position, channel: Channel | None
    ) -> None:
        self.first = first
        self.channel = channel
        self._parsers = parsers
        self._frame = frame  # the compiled grammar
        self.num_bytes = len(frame) + len(first.mask or b"") + 8 * len(first.forced)
        self._unsent: dict[ParsedOutput, None] = {}  # that have taken tokens since they were asked
        self._asked: deque[ParsedOutput] = deque()
        self._ended: list[int] = []
        self._known: dict[int, int] = {}  # tokens that the process knows of, by the output's number
        self._num_failed = 0
        self.answered_s = 0.0  # when it was last heard of, or asked

    def ask(self, output: ParsedOutput) -> None:
        """Ask where an output stands, with the next message."""
        if self._num_failed >= MAX_FAILED_OUTPUTS:
            output.take(Position(error=ENDED))
            return
        self._unsent[output] = None
        self._parsers.note_busy(self, True)

    def forget(self, output: ParsedOutput) -> None:
        """Note that an output has ended."""
        self._unsent.pop(output, None)
        if self._known.pop(output.number, None) is not None:
            self._ended.append(output.number)
        self._note_busy()

    def send(self) -> None:
        """Send what outputs have taken, unless the last message is still being answered. Raises
        OSError or EngineError."""
        if self._asked or not self._unsent:
            return
        self._asked.extend(self._unsent)
        self._unsent.clear()
        if self.channel is None:
            self.channel = self._parsers.connect(self)
            self.channel.send(self._frame)
        self._parsers.watch(self, self.channel)
        taken = tuple((o.number, tuple(self._news_of(o))) for o in self._asked)
        message = Advance(taken, tuple(self._ended))
        self._ended.clear()
        self.answered_s = time.perf_counter()
        self.channel.send(pickle.dumps(message))

    def collect(self) -> None:
        """Take what the process has answered. Raises OSError or EOFError where it has ended."""
        if self.channel is None:
            return
        self.channel.push()
        for message in self.channel.receive():
            if isinstance(message, Position):
                self._take(message)
            elif isinstance(message, Refusal):
                raise EOFError  # a process in place of another: it cannot go on as that did
        self._note_busy()
        self.send()

    def lose(self) -> None:
        """Its process has ended: the outputs go on in another one, but for the one that it was
        busy with, if that was the case before."""
        asked, self._asked = list(self._asked), deque()
        if asked and asked[0].note_loss() >= MAX_LOSSES:
            self._num_failed += 1
            asked.pop(0).take(Position(error=ENDED))
        for output in [*asked, *self._unsent]:
            if not output.is_closed:
                self.ask(output)
        self._note_busy()

    def fail(self, error: str) -> None:
        """There is no process for it: an error of those that need it now."""
        for output in [*self._asked, *self._unsent]:
            output.take(Position(error=error))
        self._asked.clear()
        self._unsent.clear()
        self._note_busy()

    def end(self) -> None:
        """End the process, which may still be busy until a limit."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None
        self._known.clear()
        self._ended.clear()

    def _news_of(self, output: ParsedOutput) -> list[int]:
        news = output.tokens[self._known.get(output.number, 0) :]
        self._known[output.number] = len(output.tokens)
        return news

    def _take(self, position: Position) -> None:
        output = self._asked.popleft()
        self.answered_s = time.perf_counter()
        if not output.is_closed:
            self._known[output.number] += len(position.forced)
            output.take(position)

    def _note_busy(self) -> None:
        self._parsers.note_busy(self, bool(self._asked or self._unsent))


class _Host:
    """The process that forks parsers. Thread-safe; a host that has ended is replaced."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def fork(self) -> socket.socket:
        """A socket to a new process. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._is_closed:
                ours.close()
                raise EngineError("the engine is being stopped")
            try:
                self._ensure()
                assert self._control is not None
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except Exception as error:
                ours.close()
                raise EngineError(f"no parser can be started: {error}") from error
        return ours

    def start(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._ensure()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._stop()

    def _ensure(self) -> None:
        """Start the process unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        command = [sys.executable, "-P", "-m", "stemma.constrained.serving.parser_host"]
        with theirs, tempfile.TemporaryFile() as vocabulary:
            pickle.dump(self._make_vocabulary(), vocabulary)
            vocabulary.seek(0)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env={**os.environ, **_SINGLE_THREADED},
                stdin=vocabulary,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its parent handles Ctrl-C
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


# A process that forks must have one thread; an arena per thread is 64 MB of address space.
_SINGLE_THREADED = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
