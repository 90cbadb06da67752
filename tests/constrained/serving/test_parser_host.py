"""What a parser's process does within its limits."""

from __future__ import annotations

import errno
import itertools
import signal
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from stemma.constrained import pushdown
from stemma.constrained.compiler import compile_grammar
from stemma.constrained.matcher import Mask
from stemma.constrained.serving import parser_host
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes

BYTES = single_bytes()


class Forcing:
    """A matcher that forces runs of `run` tokens, `total` in all; `on_consume` is called with
    each."""

    def __init__(
        self, run: int, total: int, on_consume: Callable[[int], None] = lambda _: None
    ) -> None:
        self._run, self._left, self._on_consume = run, total, on_consume

    def forced_tokens(self) -> Sequence[int]:
        return (97,) * min(self._run, self._left)

    def consume(self, token_id: int) -> bool:
        self._on_consume(token_id)
        self._left -= 1
        return True

    def mask(self, out: Mask) -> None:
        out.fill(1)

    def is_accepting(self) -> bool:
        return False

    def is_finished(self) -> bool:
        return False

    def error(self) -> str | None:
        return None


@pytest.mark.parametrize("total", [0, 1023, 1024, 1025, 5000])
def test_a_position_has_at_most_so_many_forced_tokens_in_runs_of_any_size(total: int) -> None:
    for run in (1, 1000, 3000):
        position = parser_host.position_of(Forcing(run, total), BYTES.num_words)  # type: ignore[arg-type]
        assert len(position.forced) == min(total, parser_host.MAX_FORCED_TOKENS)
        assert (position.mask is None) == (total >= parser_host.MAX_FORCED_TOKENS)


def test_the_limit_of_cpu_time_is_each_tokens_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long forced run takes its process's whole allowance."""
    armed: list[float] = []
    monkeypatch.setattr(
        signal, "setitimer", lambda _, seconds: armed.append(seconds) if seconds else None
    )
    parser_host.position_of(Forcing(50, 100), BYTES.num_words)  # type: ignore[arg-type]
    assert armed.count(parser_host.TOKEN_LIMIT_S) >= 100


def test_a_process_without_memory_ends() -> None:
    def fails(_: object) -> None:
        raise MemoryError

    bound = compile_grammar(GrammarSpec("ebnf", 'start: "(" start ")" | "x"')).bind(BYTES)
    parser = parser_host._Parser(bound, BYTES.num_words)
    parser._matchers[1] = Forcing(1, 1, fails)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        parser._after(1, (97,))


def test_a_process_in_which_a_guess_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What outputs share may be used up with it: the next process begins anew, without a guess."""
    monkeypatch.setitem(pushdown.LIMITS, "max_lexer_states", 500)
    monkeypatch.setattr(parser_host, "AHEAD_LIMIT_S", 60.0)
    bound = compile_grammar(GrammarSpec("ebnf", "start: A\nA: /(a|b)*a(a|b){20}c/")).bind(BYTES)
    guess = np.random.default_rng(0).choice([97, 98], 1000).tolist()
    assert parser_host._Parser(bound, BYTES.num_words)._after(1, (97,)).error is None
    with pytest.raises(RuntimeError, match="too many states"):
        parser_host._Parser(bound, BYTES.num_words)._after(1, (97,), guess)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(pushdown.PushdownMatcher, "fork", None)
        parser_host._Parser(bound, BYTES.num_words)._after(1, (), (97,))


def test_an_answer_has_no_more_guesses_once_it_has_taken_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = compile_grammar(GrammarSpec("ebnf", 'start: "(" start ")" | "x"')).bind(BYTES)
    for tick_s, num_told in ((0.0, 9), (parser_host.AHEAD_LIMIT_S / 3, 2)):
        now_s = itertools.count(0.0, tick_s)
        monkeypatch.setattr(time, "process_time", lambda now_s=now_s: next(now_s))
        position = parser_host._Parser(bound, BYTES.num_words)._after(1, (40,), (40,) * 9)
        assert len(position.ahead) == num_told


def test_a_host_that_cannot_fork_ends_the_socket_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("os.fork", refuse)
    ours, theirs = socket.socketpair()
    here, there = socket.socketpair()
    with ours, here, there:
        with theirs:
            socket.send_fds(here, [parser_host.FORK.pack(1)], [theirs.fileno()])
        usual = compile_grammar(GrammarSpec("regex", "a*"))
        assert parser_host._Host(there, BYTES, usual)._start()
        ours.settimeout(60.0)
        assert ours.recv(1) == b""
