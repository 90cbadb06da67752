"""The tokenizer of a running model, as a client sees it: each call asks the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import InvalidRequest
from ..client.client import Connection
from ..protocol.numbers import token_ids_of


class RuntimeTokenizer:
    """What `get_tokenizer` gives: encodes and decodes as the engine does, over its connection.

    No tokenizer of transformers: it has these methods and no others. Texts in chat form are a
    program's matter, which applies the model's template.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return int(self._connection.info["vocab_size"])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, as a prompt with BOS where the model has one. Raises InvalidRequest."""
        if not isinstance(text, str):
            raise InvalidRequest.of("text", text, "a text")
        return list(self._connection.call("tokenize", text=text, has_bos=bool(add_special_tokens)))

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Raises InvalidRequest for ids that the model does not have."""
        given: Any = [token_ids] if isinstance(token_ids, int) else token_ids
        ids = token_ids_of("token_ids", given)
        largest = max(ids, default=0)
        if largest >= self.vocab_size:
            raise InvalidRequest.of("token_ids", largest, f"ids in [0, {self.vocab_size - 1}]")
        skip = bool(skip_special_tokens)
        return str(self._connection.call("detokenize", ids=ids, skip_special=skip))

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """The texts of several lists of ids."""
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`{"input_ids", "attention_mask"}` of a text."""
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}
