"""Whether outputs under a schema are documents of it: UTF-8, strict JSON, valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...constrained.validation import validation_errors
from .matchers.tokenizer_file import TokenizerFile


@dataclass(frozen=True, slots=True)
class Documents:
    """Results of one run of a workload under a schema."""

    num: int
    num_valid: int
    mean_tokens: float  # of an output, without its end-of-sequence token
    mean_canonical_tokens: float  # of its text, tokenized canonically: the length of the content


class DocumentJudge:
    """Decodes outputs with a checkpoint's tokenizer and validates them against a schema."""

    def __init__(self, model: Path, schema: dict[str, Any]) -> None:
        self._file = TokenizerFile(model / "tokenizer.json")
        self._schema = json.dumps(schema)

    def judge(self, outputs: Sequence[Sequence[int]]) -> Documents:
        """Token ids as an engine returned them, with or without an end-of-sequence token."""
        kept = [self._without_end(ids) for ids in outputs]
        return Documents(
            num=len(kept),
            num_valid=sum(map(self._is_valid, kept)),
            mean_tokens=sum(map(len, kept)) / len(kept),
            mean_canonical_tokens=sum(map(self._num_canonical, kept)) / len(kept),
        )

    def _num_canonical(self, ids: list[int]) -> int:
        return len(self._file.encode(b"".join(self._file.bytes_of(ids)).decode(errors="replace")))

    def _without_end(self, ids: Sequence[int]) -> list[int]:
        has_end = bool(ids) and self._file.token_bytes[ids[-1]] is None
        return list(ids[:-1] if has_end else ids)

    def _is_valid(self, ids: list[int]) -> bool:
        try:
            text = b"".join(self._file.bytes_of(ids)).decode()
        except UnicodeDecodeError:
            return False
        return not validation_errors(self._schema, text)
