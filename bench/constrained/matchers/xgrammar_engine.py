"""xgrammar's compiler and matcher: one thread, no cache across grammars, compact JSON.

Its forced text is tokenized here, as the servers that use it do.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import xgrammar

from .protocol import GrammarRequest
from .tokenizer_file import TokenizerFile


class XgrammarEngine:
    """Owns the compiler."""

    def __init__(self, file: TokenizerFile) -> None:
        self.version = version("xgrammar")
        self._file = file
        info = xgrammar.TokenizerInfo(
            file.texts,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=file.size,
            stop_token_ids=[file.eos_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, request: GrammarRequest) -> XgrammarGrammar:
        if request.kind == "regex":
            compiled = self._compiler.compile_regex(request.source)
        else:
            compiled = self._compiler.compile_json_schema(
                request.source,
                any_whitespace=False,
                separators=(",", ":"),
                strict_mode=not request.is_lenient,
            )
        return XgrammarGrammar(compiled, self._file)


class XgrammarGrammar:
    """A compiled grammar."""

    path = ""

    def __init__(self, compiled: Any, file: TokenizerFile) -> None:
        self._compiled, self._file = compiled, file

    def start(self) -> XgrammarWalk:
        return XgrammarWalk(xgrammar.GrammarMatcher(self._compiled), self._file)

    def places(self, token_ids: Sequence[int]) -> None:
        return None


class XgrammarWalk:
    """Owns a torch bitmask, of which `words` is a view."""

    def __init__(self, matcher: Any, file: TokenizerFile) -> None:
        self._matcher, self._file = matcher, file
        self._bitmask = xgrammar.allocate_token_bitmask(1, file.size)
        self.words = self._bitmask.numpy()[0].view(np.uint32)

    def mask(self) -> None:
        if not self._matcher.fill_next_token_bitmask(self._bitmask):
            self.words.fill(0xFFFFFFFF)  # the return value means that every token is allowed

    def consume(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced_tokens(self) -> Sequence[int]:
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # it ends within a character
            return ()
        return self._file.encode(text) if text else ()
