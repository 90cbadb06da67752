"""outlines-core: a schema's regex, and its index over the tokens; compact JSON."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from .protocol import GrammarRequest, new_words
from .tokenizer_file import TokenizerFile

MAX_ROLLBACK = 0


class OutlinesEngine:
    """Owns the vocabulary."""

    def __init__(self, file: TokenizerFile) -> None:
        self.version = version("outlines_core")
        self._size = file.size
        ids: dict[bytes, list[int]] = {}
        for i, data in enumerate(file.token_bytes):
            if data:
                ids.setdefault(data, []).append(i)
        self._vocabulary = outlines_core.Vocabulary(file.eos_id, ids)

    def compile(self, request: GrammarRequest) -> OutlinesGrammar:
        regex = request.source
        if request.kind == "json_schema":
            regex = build_regex_from_schema(request.source, "")
        return OutlinesGrammar(outlines_core.Index(regex, self._vocabulary), self._size)


class OutlinesGrammar:
    """An index, shared by its outputs."""

    path = ""

    def __init__(self, index: Any, size: int) -> None:
        self._index, self._size = index, size

    def start(self) -> OutlinesWalk:
        return OutlinesWalk(outlines_core.Guide(self._index, MAX_ROLLBACK), self._size)

    def places(self, token_ids: Sequence[int]) -> None:
        return None


class OutlinesWalk:
    """The engine has no forced tokens."""

    def __init__(self, guide: Any, size: int) -> None:
        self.words = new_words(size)
        self._guide = guide
        self._where = (self.words.ctypes.data, self.words.size, self.words.itemsize)

    def mask(self) -> None:
        self._guide.write_mask_into(*self._where)

    def consume(self, token_id: int) -> bool:
        try:
            self._guide.advance(token_id, False)
        except ValueError:
            return False
        return True

    def is_accepting(self) -> bool:
        return bool(self._guide.is_finished())

    def forced_tokens(self) -> Sequence[int]:
        return ()
