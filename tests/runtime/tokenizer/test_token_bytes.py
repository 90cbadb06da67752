"""The bytes that tokens write: joined, they are the text, whatever the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.tokenizer.token_bytes import token_bytes
from stemma.runtime.tokenizer.tokenizer import Tokenizer

TEXTS = st.text(max_size=40) | st.text('aeiou thé\n ▁{}":1', max_size=60)


class Known:
    """A tokenizer and what its tokens write."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder, 10**6)
        self.written = token_bytes(folder, self.tokenizer)

    def bytes_of(self, ids: list[int]) -> bytes:
        return b"".join(self.written[i] or b"?" for i in ids)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """As Llama 2's: merges over "▁", bytes where there is no token, a blank before all text."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as HfTokenizer

    letters = [*"aeiouth▁é{}"]
    merged = ["th", "▁th", "▁a"]
    symbols = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]
    model = models.BPE(
        vocab={symbol: i for i, symbol in enumerate(symbols)},
        merges=[("t", "h"), ("▁", "th"), ("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = HfTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Known(folder)


@pytest.fixture(scope="module")
def embedded() -> Known:
    return Known(EMBEDDED_MODEL)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_bytes_of_a_byte_level_tokenizers_ids_are_the_text(embedded: Known, text: str) -> None:
    ids = embedded.tokenizer.encode(text)
    assert embedded.bytes_of(ids) == text.encode()
    assert embedded.tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_bytes_of_a_sentencepiece_tokenizers_ids_are_the_text_after_its_blank(
    pieces: Known, text: str
) -> None:
    ids = pieces.tokenizer.encode(text)
    # "▁" itself cannot be told from a blank: the tokenizer writes both as one.
    plain = text.replace("▁", " ")
    assert pieces.bytes_of(ids) == (b" " if text else b"") + plain.encode()
    assert pieces.tokenizer.decode(ids) == plain


def test_added_tokens_write_themselves_unless_they_are_special(pieces: Known) -> None:
    tokenizer, written = pieces.tokenizer, pieces.written
    names = [tokenizer.token_text(i) for i in range(len(written))]
    assert written[names.index("<tool>")] == b"<tool>"
    assert [written[i] for i in tokenizer.special_ids] == [None] * len(tokenizer.special_ids)


def test_every_byte_has_its_token(tmp_path: Path) -> None:
    folder = make_byte_tokenizer(tmp_path)
    written = token_bytes(folder, Tokenizer(folder, 260))
    assert written == [*(bytes([byte]) for byte in range(256)), *[None] * 4]


def test_a_tokenizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(folder, 260)
    path = folder / "tokenizer.json"
    config = json.loads(path.read_text())
    config["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        token_bytes(folder, tokenizer)
