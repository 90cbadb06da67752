"""Grammars that no finite automaton holds: llguidance's Earley parser behind the same verbs.

The only importer of llguidance. Its lexer is greedy: a terminal takes as many bytes as it can, so
adjacent terminals that could swallow each other match less than the grammar says (`lark.py`).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ..errors import InvalidGrammar, MissingDependency
from ..native_panic import panic_raises
from .jump_forward import MAX_FORCED_BYTES, ForcedTokens
from .matcher import Mask, Matcher
from .vocabulary import MASK_BITS, Vocabulary, single_bytes

# Forcing would allow only the canonical token wherever bytes are forced, a smaller mask than the
# grammar's.
HEADER = '%llguidance { "no_forcing": true }\n'
# The form of messages: "at LINE(COLUMN): ..." first, then lines of the grammar.
_PLACE = re.compile(r"(?:(?<=\Aat )|\A)\d+(?=\(\d+\))")
_SHOWN_LINE = re.compile(r"^ *\d+(?= \| )", re.MULTILINE)
_LEXER_LIMIT = re.compile("fuel|lexer precomputation|too many (expressions|states)")
_SHOWN_HEADER = f"   1 | {HEADER}"
# Small enough that the worst grammar ends in an error within a second: by llguidance's speeds (50k
# units of initial fuel, 14k of a step's fuel, 20k items a millisecond) 40, 14 and 1 ms
# (measured on ambiguous rules: 10 ms).
LIMITS = {
    "max_items_in_row": 500,  # of ambiguous rules; a step costs its square
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


def check_lark(lark: str) -> tuple[str, ...]:
    """Warnings about a grammar, tested with single bytes as tokens. Raises InvalidGrammar."""
    grammar = PushdownGrammar(lark, _single_bytes())
    return grammar.warnings


def gbnf_to_lark(text: str) -> str:
    """As llguidance itself converts llama.cpp's notation. Raises InvalidGrammar."""
    _llguidance()
    try:
        converted: str = importlib.import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        raise InvalidGrammar(str(error)) from error
    return converted


class PushdownGrammar:
    """A grammar in Lark's syntax bound to a vocabulary. Raises InvalidGrammar."""

    path: Literal["pushdown"] = "pushdown"

    def __init__(
        self, lark: str, vocabulary: Vocabulary, reason: str = "", warnings: tuple[str, ...] = ()
    ) -> None:
        self.reason = reason
        self.vocabulary = vocabulary
        self.forced = ForcedTokens(vocabulary)
        self.nothing = np.zeros(vocabulary.num_words, np.uint32)
        self._usable = vocabulary.mask_of(vocabulary.written_ids)
        self._lark = lark
        self._compiled = _new_matcher(lark, vocabulary)
        self.warnings = warnings or tuple(self._compiled.get_grammar_warnings())
        self._require_text()

    @property
    def num_bytes(self) -> int:
        """What is known: llguidance does not say what it holds. The process that it runs in is
        bounded."""
        return len(self._lark) + self.forced.num_bytes

    def matcher(self) -> Matcher:
        """A matcher at the grammar's beginning; copies the compiled one in microseconds."""
        return PushdownMatcher(self, self._compiled.deep_copy())

    def renew(self) -> None:
        """Compile again: copies share a lexer, whose states all count towards one limit."""
        self._compiled = _new_matcher(self._lark, self.vocabulary)

    def _require_text(self) -> None:
        """Raises InvalidGrammar where the language is empty, or forces too much."""
        first = self.matcher()
        if first.error() is not None:
            raise InvalidGrammar(str(first.error()))
        mask = np.empty(self.vocabulary.num_words, np.uint32)
        first.mask(mask)
        if not mask.any() and not first.is_accepting():
            raise InvalidGrammar("it matches nothing")
        first.forced_tokens()
        first.mask(mask)
        if first.error() is not None:  # more bytes are forced than the parser can hold
            raise InvalidGrammar(str(first.error()))

    def mask_of(self, parser: Any) -> Mask:
        """A parser's mask without tokens that write nothing, e.g. llguidance's end of sequence."""
        padded = np.zeros(len(self._usable) + 1, np.uint32)
        parser.unsafe_compute_mask_ptr(
            padded.ctypes.data, 4 * (self.vocabulary.vocab_size // MASK_BITS + 1)
        )
        mask: Mask = padded[:-1] & self._usable
        return mask


class PushdownMatcher:
    """One output's position in a pushdown grammar.

    Invariant: a token is consumed, and bytes are forced, behind a mask of the same position. Only a
    mask gives the lexer the fuel of a step; without one it runs on what the step before has left,
    and a lexer without fuel refuses what is allowed, with no error.
    """

    def __init__(self, grammar: PushdownGrammar, parser: Any) -> None:
        self._grammar = grammar
        self._parser = parser
        self._tokens: list[int] = []
        self._mask: Mask | None = None  # of this position; None: not computed yet
        self._failure: str | None = None

    def mask(self, out: Mask) -> None:
        out[:] = self._allowed()

    def consume(self, token_id: int) -> bool:
        if not int(self._allowed()[token_id // MASK_BITS]) >> token_id % MASK_BITS & 1:
            return False
        # NOTE: never consume_token, which makes a refused token an error that nothing undoes.
        if self._parser.try_consume_tokens([token_id]) != 1:
            if not self._has_failed():
                self._fail(f"the parser refuses token {token_id}, which its mask allows")
            return False
        self._tokens.append(token_id)
        self._mask = None
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._tokens), (num_tokens, len(self._tokens))
        if num_tokens:
            self._parser.rollback(num_tokens)
            del self._tokens[-num_tokens:]
            self._mask = None

    def fork(self) -> PushdownMatcher:
        other = PushdownMatcher(self._grammar, self._parser.deep_copy())
        other._tokens, other._mask, other._failure = self._tokens[:], self._mask, self._failure
        return other

    def is_accepting(self) -> bool:
        return not self._has_failed() and bool(self._parser.is_accepting())

    def forced_tokens(self) -> Sequence[int]:
        if not self._allowed().any() or self._parser.is_accepting():
            return ()
        forced: bytes = self._parser.compute_ff_bytes()[:MAX_FORCED_BYTES]
        if not forced:
            return ()
        return self._grammar.forced.after(self._tokens, forced, forced, self._can_extend)

    def _allowed(self) -> Mask:
        """This position's mask; nothing is allowed after a failure."""
        if self._mask is None and not self._has_failed():
            self._mask = self._grammar.mask_of(self._parser)
        return self._grammar.nothing if self._mask is None or self._has_failed() else self._mask

    def _has_failed(self) -> bool:
        if self._failure is None and self._parser.is_error():
            # What follows is the parser's inner state.
            self._fail(_explained(self._parser.get_error().partition("\n<")[0]))
        return self._failure is not None

    def _fail(self, message: str) -> None:
        self._failure = message
        self._grammar.renew()  # for later outputs

    def _can_extend(self, rest: bytes) -> bool:
        """The text after forced bytes is unknown here: any that the vocabulary can write."""
        trie = self._grammar.vocabulary.trie
        node = trie.find(rest)
        return node is not None and int(trie.end[node]) > node + 1

    def is_finished(self) -> bool:
        # The parser does not know yet that it may stop before the first token, nor where what could
        # follow is an intersection without texts.
        return self.is_accepting() and (self._parser.is_stopped() or not self._allowed().any())

    def error(self) -> str | None:
        self._has_failed()
        return self._failure


def prepare_parsers(vocabulary: Vocabulary) -> None:
    """Build now what would delay the first grammar."""
    PushdownGrammar('start: "a"?', vocabulary)


@functools.cache
def _single_bytes() -> Vocabulary:
    return single_bytes()


@functools.lru_cache(maxsize=8)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    """llguidance's view of a vocabulary, with its own end of sequence after the last id."""
    llguidance = _llguidance()
    wrapper = importlib.import_module("llguidance._tokenizer").TokenizerWrapper
    return llguidance.LLTokenizer(
        wrapper(_Tokens(vocabulary)), slices=llguidance.LLTokenizer.json_slices()
    )


class _Tokens:
    """The attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.vocab_size
        self.tokens = [*vocabulary.token_bytes, b"<end>"]
        self.special_token_ids = [self.eos_token_id]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        return list(self._encode(text.decode("utf-8", errors="replace")))


@panic_raises(InvalidGrammar, "its parser failed")
def _new_matcher(lark: str, vocabulary: Vocabulary) -> Any:
    llguidance = _llguidance()
    return llguidance.LLMatcher(
        _tokenizer(vocabulary), _source(lark), log_level=0, limits=_limits(llguidance)
    )


def _source(lark: str) -> str:
    source: str = _llguidance().LLMatcher.grammar_from_lark(HEADER + lark)
    return source


def _explained(message: str) -> str:
    """A message of the library's in the caller's terms: its limits are none that he can set."""
    if _LEXER_LIMIT.search(message):
        cause = message.partition(";")[0]
        return (
            f"its texts need more states than a parser's lexer may have ({cause}); remedy: smaller "
            "counts, fewer lookarounds, or fewer patterns over one string"
        )
    return _in_given_lines(message)


def _in_given_lines(message: str) -> str:
    """The message without our header, an extra line, in the text and in the line numbers."""
    shown = _SHOWN_LINE.sub(_one_less, message.replace(_SHOWN_HEADER, ""))
    return _PLACE.sub(_one_less, shown)


def _one_less(number: re.Match[str]) -> str:
    return f"{int(number[0]) - 1:{len(number[0])}}"


def _limits(llguidance: ModuleType) -> Any:
    return llguidance.LLParserLimits(**LIMITS)


@functools.cache
def _llguidance() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingDependency("llguidance", "constrained", "a recursive grammar") from error
