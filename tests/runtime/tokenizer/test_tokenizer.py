"""Text to ids and back; what is special only in a template's mouth; broken files."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from checkpoints import (
    BACKTRACKS,
    BOS_ID,
    BYTE_VOCAB_SIZE,
    EOS_ID,
    make_backtracking,
    make_byte_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

from stemma.errors import InvalidRequest, ModelLoadError, PromptTooLong
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.tokenizer import tokenizer as tokenizer_module
from stemma.runtime.tokenizer.tokenizer import (
    LONG_CHARS,
    UNLOCKED_CHARS,
    VERY_LONG_CHARS,
    KeptEncodings,
    Tokenizer,
)


def test_special_tokens_in_a_users_text_are_plain_text(byte_tokenizer: Tokenizer) -> None:
    text = "a<eos>b<bos>"
    ids = byte_tokenizer.encode(text)
    assert EOS_ID not in ids and BOS_ID not in ids
    assert byte_tokenizer.decode(ids) == text


def test_special_tokens_of_a_template_are_special(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode_rendered("<bos>a<eos>").tolist() == [BOS_ID, ord("a"), EOS_ID]


@given(text=st.text())
def test_any_text_round_trips(byte_tokenizer: Tokenizer, text: str) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


def test_long_texts_have_the_ids_of_their_parts(byte_tokenizer: Tokenizer) -> None:
    text = "a<eos>é\n" * tokenizer_module.UNLOCKED_CHARS
    assert byte_tokenizer.encode(text) == byte_tokenizer.encode("a<eos>é\n") * (len(text) // 8)


def test_many_tokens_have_the_text_of_few(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, special ones and parts of characters among them."""
    ids = [*byte_tokenizer.encode("sé"), *sorted(byte_tokenizer.special_ids), 0xC3, 0xA9, 0xC3]
    each = [byte_tokenizer.decode(ids, skip_special=skip) for skip in (True, False)]
    monkeypatch.setattr(tokenizer_module, "UNLOCKED_TOKENS", 1)
    assert [byte_tokenizer.decode(ids, skip_special=skip) for skip in (True, False)] == each


def test_tokens_are_counted_up_to_characters(byte_tokenizer: Tokenizer) -> None:
    ends = [0, 1, 2, 2, 3]  # é has two tokens
    assert byte_tokenizer.tokens_before("aéb", ends).tolist() == [0, 1, 3, 3, 4]
    tokenizer = Tokenizer(EMBEDDED_MODEL, 10**6)
    text = "the first words, and others"
    num_first, num_all = len(tokenizer.encode("the first words")), len(tokenizer.encode(text))
    counts = tokenizer.tokens_before(text, [15, 16, len(text) - 1, len(text)]).tolist()
    assert counts == [num_first, num_first + 1, num_all - 1, num_all], "only whole tokens"


def test_tokens_of_very_long_texts_are_counted_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "VERY_LONG_CHARS", 3)
    tokenizer = Tokenizer(make_byte_tokenizer(tmp_path), BYTE_VOCAB_SIZE)
    try:
        assert tokenizer.tokens_before("aéb", [1, 2]).tolist() == [1, 3]
        assert tokenizer._process._process is not None
    finally:
        tokenizer.close()


def test_special_tokens_show_only_where_asked(byte_tokenizer: Tokenizer) -> None:
    ids = [ord("a"), EOS_ID]
    assert byte_tokenizer.decode(ids) == "a"
    assert byte_tokenizer.decode(ids, skip_special=False) == "a<eos>"
    assert byte_tokenizer.token_text(EOS_ID) == "<eos>"


def test_bos_is_known_only_where_the_tokenizer_adds_one(tmp_path: Path) -> None:
    folder = make_byte_tokenizer(tmp_path)
    assert Tokenizer(folder, BYTE_VOCAB_SIZE).bos_ids == []
    path = str(folder / "tokenizer.json")
    inner = HfTokenizer.from_file(path)
    inner.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS_ID), ("<eos>", EOS_ID)]
    )
    inner.save(path)
    tokenizer = Tokenizer(folder, BYTE_VOCAB_SIZE)
    assert tokenizer.bos_ids == [BOS_ID]
    assert tokenizer.encode("a") == [ord("a")], "encode() adds nothing"


def test_a_text_as_output_has_no_blank_before_it_and_structure_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_byte_tokenizer(tmp_path) / "tokenizer.json")
    inner = HfTokenizer(
        BPE({"\u2581": 0, "h": 1, "i": 2, "\n": 3, "\u2581h": 4}, [("\u2581", "h")])
    )
    inner.pre_tokenizer = Metaspace(prepend_scheme="first")
    inner.add_special_tokens([AddedToken("<think>", special=True)])
    inner.save(path)
    tokenizer = Tokenizer(tmp_path, BYTE_VOCAB_SIZE)
    assert tokenizer.encode("hi") == [4, 2]
    assert tokenizer.encode_output("hi").tolist() == [1, 2]
    assert tokenizer.encode_output(" hi").tolist() == [4, 2]
    assert tokenizer.encode_output("<think>hi").tolist() == [5, 1, 2]
    assert tokenizer.encode_output("").tolist() == []
    monkeypatch.setattr(tokenizer_module, "encoded", None)
    assert tokenizer.encode_output("<think>" * 3).tolist() == [5] * 3, "nothing else to encode"


def test_output_of_a_tokenizer_that_adds_nothing_is_any_text(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode_output("a<eos>b").tolist() == byte_tokenizer.encode("a<eos>b")


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    path = str(make_byte_tokenizer(tmp_path) / "tokenizer.json")
    inner = HfTokenizer.from_file(path)
    inner.enable_truncation(3)
    inner.enable_padding(length=10)
    inner.save(path)
    assert len(Tokenizer(tmp_path, BYTE_VOCAB_SIZE).encode("abcde")) == 5


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: missing"):
        Tokenizer(tmp_path, 10)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path, 10)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_a_broken_config_is_named(tmp_path: Path, content: bytes) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path, BYTE_VOCAB_SIZE)


def test_more_tokens_than_the_model_has_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match=r"token id 259 .* vocab_size is 259"):
        Tokenizer(tmp_path, BYTE_VOCAB_SIZE - 1)


def test_special_tokens_may_be_objects_in_old_configs(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    config = {"bos_token": {"content": "<bos>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path, BYTE_VOCAB_SIZE)
    assert (tokenizer.bos_token, tokenizer.named_tokens["eos_token"]) == ("<bos>", "")


def test_a_text_beyond_the_limit_is_refused(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_CHARS", 10)
    with pytest.raises(InvalidRequest, match="11 characters"):
        byte_tokenizer.encode("a" * 11)


def test_a_long_text_is_tokenized_once_and_its_ids_are_the_callers_own(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, num_encoded = "a long text " * 40, 0
    encoded = tokenizer_module.encoded

    def counted(tokenizer: HfTokenizer, text: str, max_tokens: int) -> array[int]:
        nonlocal num_encoded
        num_encoded += 1
        return encoded(tokenizer, text, max_tokens)

    monkeypatch.setattr(tokenizer_module, "encoded", counted)
    first = byte_tokenizer.encode(text)
    first.append(0)
    assert byte_tokenizer.encode(text) == list(text.encode()) and num_encoded == 1


@pytest.mark.parametrize("num_chars", [30, LONG_CHARS, UNLOCKED_CHARS, VERY_LONG_CHARS])
def test_a_text_over_the_limit_of_tokens_is_refused(tmp_path: Path, num_chars: int) -> None:
    tokenizer, text = Tokenizer(make_byte_tokenizer(tmp_path), BYTE_VOCAB_SIZE), "x" * num_chars
    for _ in range(2):  # the second time it may be kept
        with pytest.raises(PromptTooLong, match=f"{num_chars} tokens > "):
            tokenizer.encode_array(text, num_chars - 1)
        assert len(tokenizer.encode_array(text, num_chars)) == num_chars
    tokenizer.close()


@pytest.mark.parametrize("num_chars", [300, UNLOCKED_CHARS])
def test_a_panic_of_the_library_is_the_texts_error(tmp_path: Path, num_chars: int) -> None:
    tokenizer = Tokenizer(make_backtracking(make_byte_tokenizer(tmp_path)), BYTE_VOCAB_SIZE)
    text = BACKTRACKS * (num_chars // len(BACKTRACKS))
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(InvalidRequest, match=r"cannot take this text: .*retry-limit"):
            encode(text)
    assert tokenizer.encode("abc") == list(b"abc"), "it still works"


def test_kept_encodings_are_bounded_and_the_least_used_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_KEPT_CHARS", 100)
    kept = KeptEncodings()
    for letter in "ab":
        kept.keep(letter * 50, array("i", [1]))
    assert kept.find("a" * 50) is not None
    kept.keep("c" * 50, array("i", [1]))
    kept.keep("d" * 101, array("i", [1]))
    found = [kept.find(letter * 50) is not None for letter in "abc"]
    assert found == [True, False, True] and kept.find("d" * 101) is None
