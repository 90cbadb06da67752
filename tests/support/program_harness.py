"""Program sessions driven by hand: makers of ops, and a harness in which a test is the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from fakes import Events, FakeQueue

from stemma.frontend.protocol import ir, wire
from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.programs.session import ProgramSession

Op = Callable[[int, int], ir.Op]


class ProgramHarness:
    """One session, its queue and its events; ops are numbered for the test."""

    def __init__(
        self, context: ProgramContext, *, stream: bool = False, seed: int = 0, **options: Any
    ) -> None:
        """`options`: the session's own."""
        self.context = context
        self.queue = context.queue
        assert isinstance(self.queue, FakeQueue)
        self.events = Events()
        self.num_asked_turns = 0  # `advance` that the session has asked for
        self.session = ProgramSession(
            context,
            self.events,
            self._note_ready,
            seed=seed,
            instance=0,
            is_streaming=stream,
            **options,
        )
        self._seqs: dict[int, itertools.count[int]] = {}

    def _note_ready(self, session: ProgramSession) -> None:
        self.num_asked_turns += 1

    def ops(self, branch: int, *makers: Op) -> list[ir.Op]:
        """Numbered ops of one branch."""
        seqs = self._seqs.setdefault(branch, itertools.count())
        return [make(branch, next(seqs)) for make in makers]

    def send(self, *ops: ir.Op, end: bool = False) -> None:
        self.session.receive(list(ops), end=end)
        self.session.advance()

    def on(self, branch: int, *makers: Op, end: bool = False) -> None:
        self.send(*self.ops(branch, *makers), end=end)

    def generate(self, text: str, index: int = 0) -> None:
        """Make the open request generate this text, as bytes, and end."""
        assert isinstance(self.queue, FakeQueue)
        self.queue.generate(self.queue.open[index], list(text.encode()))
        self.session.advance()

    @property
    def prompts(self) -> list[str]:
        """The prompts of the open requests."""
        assert isinstance(self.queue, FakeQueue)
        decode = self.context.tokenizer.decode
        return [decode(request.prompt, skip_special=False) for request in self.queue.open]

    @property
    def values(self) -> dict[tuple[int, int], Any]:
        return {(b, s): payload["value"] for b, s, payload in self.events.of(wire.VALUE)}

    @property
    def failures(self) -> dict[int, str]:
        return {b: payload["message"] for b, _, payload in self.events.of(wire.FAILED)}

    @property
    def is_done(self) -> bool:
        num_done = len(self.events.of(wire.DONE))
        assert num_done <= 1 and (not num_done or self.events.items[-1][2] == wire.DONE)
        return num_done == 1


def text(value: str) -> Op:
    return lambda branch, seq: ir.Text(branch, seq, None, value)


def gen(name: str = "x", source: str | None = None, **params: Any) -> Op:
    return lambda branch, seq: ir.Gen(branch, seq, source, name, ir.GenParams(**params))


def select(*choices: str, method: str = ir.CHOICES_METHODS[0]) -> Op:
    return lambda branch, seq: ir.Select(branch, seq, "here.py:7", "s", choices, method)


def fork(*children: int) -> Op:
    return lambda branch, seq: ir.Fork(branch, seq, "fork.py:1", children)


def join(*children: int, mode: str = "gather_variable", first: int | None = None) -> Op:
    return lambda branch, seq: ir.Join(branch, seq, "join.py:2", children, mode, first)


def var(of_branch: int, of_seq: int) -> Op:
    return lambda branch, seq: ir.Var(branch, seq, None, of_branch, of_seq)


def role(name: str) -> Op:
    return lambda branch, seq: ir.RoleBegin(branch, seq, None, name)


def role_end() -> Op:
    return lambda branch, seq: ir.RoleEnd(branch, seq, None)


def end() -> Op:
    return lambda branch, seq: ir.End(branch, seq, None)


def drop() -> Op:
    return lambda branch, seq: ir.Drop(branch, seq, None)


def pause(expected_s: float | None = None, label: str = "") -> Op:
    return lambda branch, seq: ir.Pause(branch, seq, None, expected_s, label)


def hint(action: str, **fields: Any) -> Op:
    return lambda branch, seq: ir.Hint(branch, seq, None, action, **fields)


def tokens(*ids: int) -> Op:
    return lambda branch, seq: ir.Tokens(branch, seq, None, ids)


def resume(*, drops_message: bool = False) -> Op:
    return lambda branch, seq: ir.Resume(branch, seq, None, drops_message)
