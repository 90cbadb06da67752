"""From what a caller asks for to something that can be matched; says which path and why.

Runs in a worker process: what it makes is plain data, and what it cannot make in time is an error
of that grammar alone.

    regex, choices, JSON Schema --> Grammar --regular--> Dfa                    path "fsm"
                                       |---recursive or too large--> Lark text  path "pushdown"
    json_object, EBNF, structural tags ------------------^
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import InvalidGrammar
from .matcher import Matcher
from .pushdown import PushdownGrammar, check_lark, gbnf_to_lark
from .regular.dfa import Dfa
from .spec import GrammarSpec
from .vocabulary import Vocabulary

Path = Literal["fsm", "pushdown"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one compilation may cost."""

    max_states: int = 50_000  # of an automaton; past it, the grammar goes to the parser
    max_seconds: float = 2.0  # for the automaton


class BoundGrammar(Protocol):
    """A grammar over a vocabulary: shared by all outputs under it."""

    @property
    def path(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def matcher(self) -> Matcher:
        """For one more output, at the grammar's beginning."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar before it meets a vocabulary; may be cached and may cross processes."""

    path: Path
    reason: str  # why this path
    dfa: Dfa | None = None
    lark: str | None = None
    warnings: tuple[str, ...] = ()
    schema: str | None = None  # lenient: outputs are to be validated against it
    needs_unique_keys: bool = False

    def bind(self, vocabulary: Vocabulary) -> BoundGrammar:
        """Raises InvalidGrammar where no sequence of tokens writes a text of the language."""
        assert self.lark is not None
        return PushdownGrammar(self.lark, vocabulary, self.reason, self.warnings)


def compile_grammar(spec: GrammarSpec, limits: Limits = Limits()) -> CompiledGrammar:
    """Raises InvalidGrammar or UnsupportedSchema; the message begins with the spec's kind."""
    if spec.kind == "regex":
        return _of_lark(f"start: /{spec.source.replace('/', chr(92) + '/')}/", "regex", "")
    if spec.kind == "choices":
        choices = json.loads(spec.source)
        pattern = "|".join(re.escape(choice) for choice in choices)
        return _of_lark(f"start: /{pattern.replace('/', chr(92) + '/')}/", "choices", "")
    if spec.kind == "ebnf":
        is_gbnf = "::=" in spec.source
        lark = gbnf_to_lark(spec.source, "ebnf") if is_gbnf else spec.source
        return _of_lark(lark, "ebnf", "a grammar in its author's rules")
    raise InvalidGrammar(f"{spec.kind}: not built yet", spec.kind)


def _of_lark(lark: str, field: str, reason: str) -> CompiledGrammar:
    return CompiledGrammar("pushdown", reason, lark=lark, warnings=check_lark(lark, field))
