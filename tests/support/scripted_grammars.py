"""A grammar engine whose language is listed in the schema, for the benchmarks' own tests.

{"accepts": [text, ...]} is the language; {"raises": text} fails to compile, {"hangs": true} never
ends, {"dies": true} kills its process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from stemma.bench.constrained.matchers.protocol import GrammarRequest, new_words
from stemma.bench.constrained.matchers.tokenizer_file import TokenizerFile


class ScriptedEngine:
    version = "0"

    def __init__(self, file: TokenizerFile) -> None:
        self.file = file

    def compile(self, request: GrammarRequest) -> ScriptedGrammar:
        schema = json.loads(request.source)
        if "raises" in schema:
            raise ValueError(schema["raises"])
        if "hangs" in schema:
            time.sleep(60)
        if "dies" in schema:
            os._exit(1)
        return ScriptedGrammar(self.file, [text.encode() for text in schema.get("accepts", [])])


class ScriptedGrammar:
    path = "fsm"

    def __init__(self, file: TokenizerFile, texts: list[bytes]) -> None:
        self.file, self.texts = file, texts

    def start(self) -> ScriptedWalk:
        return ScriptedWalk(self.file, self.texts)

    def places(self, token_ids: Sequence[int]) -> list[int]:
        """As if two neighbouring tokens shared a state."""
        return [i // 2 for i in range(len(token_ids))]


class ScriptedWalk:
    def __init__(self, file: TokenizerFile, texts: list[bytes]) -> None:
        self.file, self.texts, self.done = file, texts, b""
        self.words = new_words(file.size)

    def mask(self) -> None:
        self.words.fill(0)
        for token_id, data in enumerate(self.file.token_bytes):
            if data and self._fits(data):
                self.words[token_id >> 5] |= 1 << (token_id & 31)

    def consume(self, token_id: int) -> bool:
        data = self.file.token_bytes[token_id]
        if not data or not self._fits(data):
            return False
        self.done += data
        return True

    def is_accepting(self) -> bool:
        return self.done in self.texts

    def forced_tokens(self) -> Sequence[int]:
        """The common prefix of all remaining texts, tokenized by itself."""
        left = {text[len(self.done) :] for text in self.texts if text.startswith(self.done)}
        shortest = min(left, key=len)
        while not all(text.startswith(shortest) for text in left):
            shortest = shortest[:-1]
        return self.file.encode(shortest.decode())

    def _fits(self, data: bytes) -> bool:
        return any(text.startswith(self.done + data) for text in self.texts)
