"""Grammars that a third-party parser follows, each in a process of its own that may be killed.

Whether a parser's native code returns is not known for every grammar, so none runs in the engine's
process. What an output takes is sent to its grammar's process, which answers with where the output
stands then: what is forced, and the mask behind it. Nobody waits for that: an output whose position
is not known yet computes nothing, and the others go on.

A process that ends has been ended by a limit (`parser_host.py`), or from outside: its outputs
follow their tokens again in another one. The one that it was busy with may do so once more. Only
what a limit has ended counts against the grammar.
"""

from __future__ import annotations

import itertools
import pickle
import selectors
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from ...errors import EngineError, InvalidGrammar
from ..compiled_grammar import CompiledGrammar
from ..matcher import Path
from ..vocabulary import Vocabulary
from .frames import CRASHES, ENGINE_STACK_BYTES, Refusal
from .host_process import HostProcess
from .parsed_output import ParsedOutput
from .positions import MAX_EXTRA_BYTES, TOKEN_LIMIT_S, Advance, Channel, Opened, Position

MAX_PARSERS = 32  # processes, of some 6 MB each; the least recently used one is ended
MAX_LOSSES = 2  # of its process by one output, or before it is open
LATE_S = 0.01  # 20 times what a mask takes: from then on nobody waits for it
MAX_FAILED_OUTPUTS = 2  # of a grammar, which is then refused
MAX_FAILED_GUESSES = 2  # over which a grammar's process has ended; then it is asked for none
ENDED = (
    f"its parser's process ended: one token takes more than {TOKEN_LIMIT_S} s of CPU time, "
    f"{MAX_EXTRA_BYTES >> 20} MB of memory or {ENGINE_STACK_BYTES >> 20} MB of stack; "
    "let neighbouring terminals not begin or end alike"
)
KILLED = "its parser's process was ended from outside, and so was the next one; try again"
# What the limits of `parser_host.py` send.
LIMIT_SIGNALS = (signal.SIGPROF, *CRASHES)


class ParsedGrammar:
    """A grammar that a process follows: shared by all its outputs."""

    def __init__(self, parser: Parser, path: Path, reason: str, warnings: tuple[str, ...]) -> None:
        self.path = path
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


OnOpen = Callable[[ParsedGrammar | InvalidGrammar | EngineError], None]


class Parsers:
    """Owns the processes that follow grammars.

    Invariants: at most `MAX_PARSERS` run, and those with outputs that wait; each has at most one
    message to answer; after `send` and `collect`, whoever waits has one under way, so that the
    selector wakes the engine. All is called by the engine's thread, and waits for nothing, but
    `start`, by any. Lifetime: until `close`; the first grammar starts the processes.
    """

    def __init__(self, selector: selectors.BaseSelector, vocabulary: Callable[[], Vocabulary]):
        """`selector` also watches the processes."""
        self._selector = selector
        self._host = HostProcess(vocabulary)
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
        """Start the process that all others are forked from ahead of the first grammar."""
        self._host.start()

    def open(self, compiled: CompiledGrammar, on_open: OnOpen) -> None:
        """Call `on_open` once a process follows the grammar, or with why none does: an
        InvalidGrammar, or an EngineError."""
        parser = Parser(self, compiled, on_open)
        self.note_busy(parser, True)
        self._guarded(parser, parser.send)

    def send(self) -> None:
        """Send what outputs have taken."""
        for parser in list(self._busy):
            self._guarded(parser, parser.send)

    def collect(self, patience_s: float = 0.0) -> None:
        """Take what the processes have answered, waiting at most so long for those that usually
        answer at once."""
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
        for parser in [*self._running, *self._busy]:
            self._end(parser)
        self._host.close()

    # --- for parsers ----------------------------------------------------------------------------

    def note_busy(self, parser: Parser, is_busy: bool) -> None:
        if is_busy:
            self._busy.add(parser)
        else:
            self._busy.discard(parser)
            self._trim()

    def connect(self) -> Channel:
        """A new process for a parser that has none. Raises EngineError."""
        return self._host.fork()

    def watch(self, parser: Parser, channel: Channel) -> None:
        """Note that a process is used."""
        if parser not in self._running:
            self._selector.register(channel, selectors.EVENT_READ, parser)
            self._running[parser] = None
        self._running.move_to_end(parser)
        self._trim()

    def _trim(self) -> None:
        """End the least recently used processes beyond the limit."""
        num_beyond = len(self._running) - MAX_PARSERS
        if num_beyond > 0:
            idle = (parser for parser in self._running if parser not in self._busy)
            for parser in list(itertools.islice(idle, num_beyond)):
                self._end(parser)

    def _guarded(self, parser: Parser, verb: Callable[[], None]) -> None:
        try:
            verb()
            channel = parser.channel
            if channel is not None and parser in self._running:
                write = selectors.EVENT_WRITE if channel.has_unsent else 0
                self._selector.modify(channel, selectors.EVENT_READ | write, parser)
        except (OSError, EOFError):
            assert parser.channel is not None
            ending = self._host.ending_of(parser.channel.number)
            self._end(parser)
            if isinstance(ending, str):
                parser.fail(ending)
            else:
                parser.lose(ending)
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

    def __init__(self, parsers: Parsers, compiled: CompiledGrammar, on_open: OnOpen) -> None:
        self.first = Position()  # where outputs begin, once it is open
        self.channel: Channel | None = None
        self._parsers = parsers
        self._compiled = compiled
        self._frame = pickle.dumps(compiled)
        self._on_open: OnOpen | None = on_open  # until then
        self._num_losses = 0  # until then
        self._unsent: dict[ParsedOutput, None] = {}  # that have taken tokens since they were asked
        self._asked: deque[ParsedOutput] = deque()
        self._ended: list[int] = []
        self._known: dict[int, int] = {}  # tokens that the process knows of, by the output's number
        self._num_failed = 0
        self._num_failed_guesses = 0
        self.answered_s = 0.0  # when it was last heard of, or asked

    @property
    def num_bytes(self) -> int:
        """In this process."""
        return len(self._frame) + len(self.first.mask or b"") + 8 * len(self.first.forced)

    @property
    def takes_guesses(self) -> bool:
        return self._num_failed_guesses < MAX_FAILED_GUESSES

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
        if self._asked or not self._is_wanted:
            return
        if self.channel is None:
            self.channel = self._parsers.connect()
            self.channel.send(self._frame)
        self._parsers.watch(self, self.channel)
        if self._on_open is not None:
            return
        self._asked.extend(self._unsent)
        self._unsent.clear()
        forks = tuple([fork for o in self._asked if (fork := self._fork_of(o)) is not None])
        taken = tuple((o.number, tuple(self._news_of(o))) for o in self._asked)
        expected = tuple([(o.number, o.expected) for o in self._asked if o.expected])
        message = Advance(taken, tuple(self._ended), forks, expected)
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
            elif self._on_open is not None:
                self._open(message)
            elif isinstance(message, Refusal):
                raise EOFError  # a process in place of another: it cannot go on as that did
        self._note_busy()
        self.send()

    def lose(self, ending: int | None) -> None:
        """Its process has ended: the outputs go on in another one, but for the one that it was
        busy with, if that was the case before. `ending`: its exit code, where that is known."""
        is_at_limit = ending is not None and (ending > 0 or -ending in LIMIT_SIGNALS)
        if self._on_open is not None:
            self._num_losses += 1
            if is_at_limit:
                self._end_opening(InvalidGrammar(ENDED))
            elif self._num_losses >= MAX_LOSSES:
                self._end_opening(EngineError(KILLED))
        asked, self._asked = list(self._asked), deque()
        if asked and asked[0].expected:  # it may have been that
            self._num_failed_guesses += is_at_limit
        elif asked and asked[0].note_loss() >= MAX_LOSSES:
            self._num_failed += is_at_limit
            asked.pop(0).take(Position(error=ENDED if is_at_limit else KILLED))
        for output in [*asked, *self._unsent]:
            output.expected = ()
            if not output.is_closed:
                self.ask(output)
        self._note_busy()

    def fail(self, error: str) -> None:
        """There is no process for it: an error of those that need it now."""
        if self._on_open is not None:
            self._end_opening(EngineError(error))
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

    @property
    def _is_wanted(self) -> bool:
        """Whether somebody waits for what it says next."""
        return self._on_open is not None or bool(self._asked or self._unsent)

    def _open(self, answer: Opened | Refusal) -> None:
        if isinstance(answer, Refusal):
            self._end_opening(InvalidGrammar(answer.message))
            return
        self.first = answer.first
        warnings = self._compiled.warnings or answer.warnings
        compiled = self._compiled
        self._end_opening(ParsedGrammar(self, compiled.path, compiled.reason, warnings))

    def _end_opening(self, outcome: ParsedGrammar | InvalidGrammar | EngineError) -> None:
        on_open, self._on_open = self._on_open, None
        assert on_open is not None
        on_open(outcome)

    def _fork_of(self, output: ParsedOutput) -> tuple[int, int] | None:
        """How the process comes to know an output that it does not: from its origin, if that still
        stands where it was forked, else by all of its tokens (None)."""
        number = output.number
        if output.origin is None or number in self._known:
            return None
        origin, num_tokens = output.origin
        if self._known.get(origin) != num_tokens:
            return None
        self._known[number] = num_tokens
        return number, origin

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
        self._parsers.note_busy(self, self._is_wanted)
