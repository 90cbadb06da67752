"""Whether outputs under a schema are documents of it: UTF-8, strict JSON, valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from .matchers.tokenizer_file import TokenizerFile


@dataclass(frozen=True, slots=True)
class Documents:
    """Of one run of a workload under a schema."""

    num: int
    num_valid: int
    mean_tokens: float  # of an output, its end-of-sequence token left out
    mean_canonical_tokens: float  # of its text, tokenized anew: the length of what was said


class DocumentJudge:
    """Reads outputs with a checkpoint's tokenizer and holds them against a schema."""

    def __init__(self, model: Path, schema: dict[str, Any]) -> None:
        self._file = TokenizerFile(model / "tokenizer.json")
        default = jsonschema.Draft202012Validator
        kind = jsonschema.validators.validator_for(schema, default=default)
        self._validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

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
            document = json.loads(text, parse_constant=_refuse)
        except ValueError:  # no UTF-8, or no JSON
            return False
        return bool(self._validator.is_valid(document))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
