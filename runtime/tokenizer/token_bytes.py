"""What each token id writes, as bytes, for grammars over bytes.

Two families are supported. Byte-level BPE writes each byte as a printable character (GPT-2's
table); SentencePiece-like tokenizers write "▁" for a blank and "<0x0A>" for a byte without a token.
The decoder in tokenizer.json says which of the two it is. Special tokens write nothing; other added
tokens, and special ones that structure an answer, write themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ModelLoadError
from .tokenizer import Tokenizer

BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(folder: Path, tokenizer: Tokenizer) -> list[bytes | None]:
    """Bytes by token id; None for ids that write nothing. They are those in the middle of a text:
    what a decoder strips at the very beginning (SentencePiece's first blank) is included.

    Raises ModelLoadError for a tokenizer of neither family.
    """
    path = folder / "tokenizer.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kinds = {decoder.get("type") for decoder in _decoders(config.get("decoder"))}
    pieces = config["model"].get("vocab", {})
    # A unigram model lists [piece, score], the others map pieces to ids.
    vocab = pieces if isinstance(pieces, dict) else {p[0]: i for i, p in enumerate(pieces)}
    if "ByteLevel" in kinds:
        written = {token_id: _of_symbols(piece) for piece, token_id in vocab.items()}
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        written = {token_id: _of_piece(piece) for piece, token_id in vocab.items()}
    else:
        raise ModelLoadError(f"{path}: decoder {sorted(map(str, kinds))}: its bytes are not known")
    for token in config.get("added_tokens", ()):
        written[token["id"]] = token["content"].encode()
    for token_id in tokenizer.special_ids:
        written[token_id] = None
    return [written.get(token_id) for token_id in range(max(written, default=-1) + 1)]


def _decoders(config: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A decoder, or the decoders of a sequence."""
    if config is None:
        return
    if config.get("type") == "Sequence":
        for inner in config["decoders"]:
            yield from _decoders(inner)
    else:
        yield config


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, the others to 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + place): byte for place, byte in enumerate(others)}


_SYMBOLS = _byte_of_symbol()


def _of_symbols(piece: str) -> bytes | None:
    try:
        return bytes([_SYMBOLS[symbol] for symbol in piece])
    except KeyError:  # never written by the pre-tokenizer, so no text contains it
        return None


def _of_piece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(BLANK, " ").encode()
