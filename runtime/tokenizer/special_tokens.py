"""Special tokens: those that have names, for templates, and how they divide a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from .client_text import any_of

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MORE = ("extra_special_tokens", "model_specific_special_tokens")
# As Rust's regular expressions have it; Python's \s has four control characters more.
_BLANKS = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """What templates get by name, as in transformers; BOS and EOS are "" where there are none.
    special_tokens_map.json has those that tokenizer_config.json leaves out."""
    found = {"bos_token": "", "eos_token": ""}
    for source in (_special_tokens_map(folder), config):
        more = [item for name in _MORE if isinstance(item := source.get(name), dict)]
        for values in (*more, {name: source.get(name) for name in _NAMES}):
            found |= {n: text for n, v in values.items() if (text := _token_text(v))}
    return found


def section_ends(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Finds special tokens, with the blanks that they swallow: what is between two is encoded as if
    it were alone. None where that does not hold."""
    special = [token for token in added if token.special and token.content]
    if not special:
        return re.compile(r"(?!)")
    if any(token.single_word or token.normalized for token in special):
        return None
    groups: dict[tuple[str, str], list[str]] = {}
    for token in special:
        swallowed = _BLANKS if token.lstrip else "", _BLANKS if token.rstrip else ""
        groups.setdefault(swallowed, []).append(token.content)
    try:
        patterns = [f"{left}(?:{any_of(texts)}){right}" for (left, right), texts in groups.items()]
        return re.compile("|".join(patterns))
    except RecursionError:  # a thousand that each begin with the one before
        return None


def _special_tokens_map(folder: Path) -> Mapping[str, Any]:
    """Older checkpoints have it; what is wrong in it is not worth a failure."""
    try:
        values = json.loads((folder / "special_tokens_map.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _token_text(value: object) -> str:
    """Special tokens are strings or, in older files, objects with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
