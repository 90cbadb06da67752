"""What a worker replies, whatever its compiler does."""

from __future__ import annotations

import pytest

from stemma.constrained.serving import worker
from stemma.constrained.serving.frames import Job, Refusal
from stemma.constrained.spec import GrammarSpec


class PanicException(BaseException):
    """As a native library raises it."""


def test_a_panic_of_the_compiler_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*_: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(worker, "compile_grammar", panics)
    reply = worker._compile(Job(GrammarSpec("ebnf", "start: x"), 1.0))
    assert isinstance(reply, Refusal) and reply.kind == "InvalidGrammar"
    assert reply.message == "ebnf: its parser failed: index out of bounds"
