"""llguidance's own matcher, strict, compact JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import llguidance

from .protocol import GrammarRequest, new_words
from .tokenizer_file import TokenizerFile

COMPACT: Any = {"whitespace_flexible": False}


class LlguidanceEngine:
    """Owns the tokenizer's trie."""

    def __init__(self, file: TokenizerFile) -> None:
        self.version = version("llguidance")
        self.size = file.size
        self._tokenizer = llguidance.LLTokenizer(
            file.tokenizer.to_str(), n_vocab=file.size, eos_token=file.eos_id
        )

    def compile(self, request: GrammarRequest) -> LlguidanceGrammar:
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(request), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return LlguidanceGrammar(matcher, self.size)


class LlguidanceGrammar:
    """A matcher at the beginning; each output gets a copy."""

    path = ""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher, self._size = matcher, size

    def start(self) -> LlguidanceWalk:
        return LlguidanceWalk(self._matcher.deep_copy(), self._size)

    def places(self, token_ids: Sequence[int]) -> None:
        return None


class LlguidanceWalk:
    """A mask is cached until the next token: a second one at the same place costs nothing."""

    def __init__(self, matcher: Any, size: int) -> None:
        self.words = new_words(size)
        self._matcher = matcher
        self._where = (self.words.ctypes.data, self.words.nbytes)

    def mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(*self._where)

    def consume(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def forced_tokens(self) -> Sequence[int]:
        return list(self._matcher.compute_ff_tokens())


def _grammar(request: GrammarRequest) -> str:
    if request.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(request.source))
    schema = json.loads(request.source)
    if request.is_lenient and isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"lenient": True}}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT))
