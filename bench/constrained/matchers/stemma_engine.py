"""Stemma's own matchers, through the public names of `constrained/`.

A compiled grammar is pickled and read back, as it is on its way from the compiling process.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate

from .... import __version__
from ....constrained.compiled_grammar import CompiledGrammar
from ....constrained.compiler import compile_grammar, prepare
from ....constrained.matcher import BoundGrammar, Matcher
from ....constrained.regular import letter_case, unicode_classes
from ....constrained.spec import GrammarSpec
from ....constrained.vocabulary import Vocabulary
from .protocol import GrammarRequest, new_words
from .tokenizer_file import TokenizerFile


class StemmaEngine:
    """Owns the vocabulary."""

    version = __version__

    def __init__(self, file: TokenizerFile) -> None:
        self._file = file
        self._vocabulary = Vocabulary(file.token_bytes, file.encode, file.size)
        prepare(self._vocabulary)  # as the runtime does, and its compiler's process
        unicode_classes.prepare()
        letter_case.case_variants()

    def compile(self, request: GrammarRequest) -> StemmaGrammar:
        spec = GrammarSpec(
            request.kind,
            request.source,
            formats="enforce" if request.asserts_format else "ignore",
            is_lenient=request.is_lenient,
        )
        compiled: CompiledGrammar = pickle.loads(pickle.dumps(compile_grammar(spec)))
        return StemmaGrammar(compiled, compiled.bind(self._vocabulary), self._file)


class StemmaGrammar:
    """A bound grammar and what it was made from."""

    def __init__(self, compiled: CompiledGrammar, bound: BoundGrammar, file: TokenizerFile) -> None:
        self.path = bound.path
        self._compiled, self._bound, self._file = compiled, bound, file

    def start(self) -> StemmaWalk:
        return StemmaWalk(self._bound.matcher(), self._file.size)

    def places(self, token_ids: Sequence[int]) -> list[int] | None:
        dfa = self._compiled.dfa
        if dfa is None:
            return None
        *before, _ = accumulate(self._file.bytes_of(list(token_ids)), dfa.walk, initial=dfa.start)
        return before


class StemmaWalk:
    """A matcher with its mask."""

    def __init__(self, matcher: Matcher, size: int) -> None:
        self.words = new_words(size)
        self._matcher = matcher

    def mask(self) -> None:
        self._matcher.mask(self.words)

    def consume(self, token_id: int) -> bool:
        return self._matcher.consume(token_id)

    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    def forced_tokens(self) -> Sequence[int]:
        return self._matcher.forced_tokens()
