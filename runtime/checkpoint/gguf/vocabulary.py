"""A GGUF file's tokens with their kinds and scores, checked. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from ....errors import ModelLoadError
from ..config.fields import Fields
from .shards import GgufModel

_TOKENS = "tokenizer.ggml.tokens"


class TokenKind(IntEnum):
    """ggml's `llama_token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


ADDED_KINDS = (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)
"""Tokens that are matched in a text verbatim, before anything else."""

# Tokens that end an answer, besides those in the metadata: recognised by their texts, as in
# llama.cpp (llama-vocab.cpp).
_STOP_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
        "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
        "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    )
)  # fmt: skip


class Vocabulary:
    """Raises ModelLoadError, naming the key, for lists that are missing or inconsistent."""

    def __init__(self, file: GgufModel) -> None:
        self.fields = Fields(file.path, file.metadata)
        self.tokens: Sequence[str] = self._list(_TOKENS, str, "a list of texts")
        if len(set(self.tokens)) != len(self.tokens):
            raise self.fail(_TOKENS, f"no token twice, as {_repeated(self.tokens)!r} is")
        self.kinds = self._kinds()

    @property
    def path(self) -> Path:
        return self.fields.file

    def get(self, key: str) -> Any:
        """The value below "tokenizer.ggml."; None if absent."""
        return self.fields.get(f"tokenizer.ggml.{key}")

    def fail(self, key: str, expected: str) -> ModelLoadError:
        """`key`: the whole key."""
        return self.fields.fail(key, expected)

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(f"tokenizer.ggml.{key}", default)

    def scores(self) -> Sequence[float]:
        """[num_tokens]; pieces with higher scores are merged earlier."""
        key = "tokenizer.ggml.scores"
        values = self._list(key, int | float, f"{len(self.tokens)} numbers")
        if len(values) != len(self.tokens) or not all(math.isfinite(v) for v in values):
            raise self.fail(key, f"{len(self.tokens)} finite numbers")
        return values

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens that make a token, in order of priority; none if the list is absent, as
        in a vocabulary of bytes."""
        key = "tokenizer.ggml.merges"
        if self.fields.get(key) is None:
            return []
        known = frozenset(self.tokens)
        pairs = []
        for merge in self._list(key, str, "a list of texts"):
            place = merge.find(" ", 1)
            left, right = merge[:place], merge[place + 1 :]
            if place < 0 or not {left, right, left + right} <= known:
                raise self.fail(key, f"pairs of tokens that make a token, not {merge[:50]!r}")
            pairs.append((left, right))
        return pairs

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """`key`: as in "bos_token_id". An id outside the vocabulary counts as absent, as in
        llama.cpp."""
        value = self.get(key)
        is_id = isinstance(value, int) and not isinstance(value, bool)
        found = value if is_id and 0 <= value < len(self.tokens) else default
        return found if found is not None and found < len(self.tokens) else None

    def stop_ids(self) -> list[int]:
        """All tokens that end an answer, the metadata's `eos_token_id` first."""
        named = [self.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        by_text = [
            token_id
            for token_id, text in enumerate(self.tokens)
            if text in _STOP_TEXTS and self.kinds[token_id] in ADDED_KINDS
        ]
        found = [token_id for token_id in named if token_id is not None]
        return list(dict.fromkeys([*found, *by_text]))

    def _kinds(self) -> Sequence[TokenKind]:
        key = "tokenizer.ggml.token_type"
        if self.fields.get(key) is None:
            return [TokenKind.NORMAL] * len(self.tokens)
        values = self._list(key, int, f"{len(self.tokens)} numbers")
        known = {kind.value: kind for kind in TokenKind}
        if len(values) != len(self.tokens) or not known.keys() >= set(values):
            raise self.fail(key, f"{len(self.tokens)} numbers from 1 to 6")
        return [known[value] for value in values]

    def _list(self, key: str, kind: Any, expected: str) -> list[Any]:
        values = self.fields.get(key)
        if not isinstance(values, list) or not values:
            raise self.fail(key, expected)
        if not all(isinstance(value, kind) for value in values):
            raise self.fail(key, expected)
        return values


def _repeated(tokens: Sequence[str]) -> str:
    seen = set()
    for token in tokens:
        if token in seen:
            return token
        seen.add(token)
    raise AssertionError("there is one")
