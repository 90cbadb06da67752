"""Tokenizers of GGUF files against those that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import Tokenizer as HfTokenizer

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.gguf.convert import convert_gguf
from stemma.runtime.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.token_bytes import token_bytes
from stemma.runtime.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "In 1984 they'd said: \"don't\" -- 3.14159 and 2,000,000 are numbers; x = y + 42!",
    "Der Fluß fließt über Größe und Maß.  Zwei Leerzeichen.\n\nNeue Zeile\tTab.",
    "Наука и жизнь; 東京は日本の首都です。🙂🙂 naïve café",
    "def f(x):\n    return x ** 2  # comment\n\n\nfor i in range(10):\n        print(f(i))",
] * 3
KINDS = gguf.TokenType
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
# Independent of what is tested: the expression that Llama 3's tokenizer.json has.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = st.text() | st.text("ab c's\n\t1234.,<|>_eoté", max_size=40) | st.sampled_from(CORPUS)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def byte_level(name: str) -> HfTokenizer:
    """Cut as models of this pre-tokenizer do; trained on uncut texts, so that merges go across
    every place where it cuts."""
    tokenizer = HfTokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits: dict[str, list[Any]] = {
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
        "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated")],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
    }
    uses_own = name in ("gpt-2", "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=uses_own)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits[name], to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eot_id|>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def write(path: Path, tokenizer: HfTokenizer, model: str, **lists: Any) -> Path:
    """A file of a tiny Llama with this tokenizer."""
    size = tokenizer.get_vocab_size() + 3
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_tokenizer_model(model)
    tokens = [tokenizer.id_to_token(i) or f"[PAD{i}]" for i in range(size)]
    writer.add_token_list(tokens)
    for key, value in lists.items():
        if key == "add_tokenizer_pre" and isinstance(value, list):
            writer.add_array("tokenizer.ggml.pre", value)
        else:
            getattr(writer, key)(value)
    writer.add_tensor("token_embd.weight", np.zeros((size, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_file(path: Path, tokenizer: HfTokenizer, name: str, **lists: Any) -> Path:
    config = json.loads(tokenizer.to_str())
    kinds = [KINDS.NORMAL] * tokenizer.get_vocab_size(with_added_tokens=False)
    kinds += [KINDS.CONTROL, KINDS.CONTROL, KINDS.USER_DEFINED, *[KINDS.UNUSED] * 3]
    return write(
        path,
        tokenizer,
        "gpt2",
        add_tokenizer_pre=name,
        add_token_types=kinds,
        add_token_merges=[" ".join(pair) for pair in config["model"]["merges"]],
        **lists,
    )


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2", "smollm", "gpt-2"])
def byte_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HfTokenizer, HfTokenizer]:
    original = byte_level(request.param)
    path = tmp_path_factory.mktemp("byte") / f"{request.param}.gguf"
    folder = convert_gguf(byte_level_file(path, original, request.param))
    return original, HfTokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=TEXTS)
def test_byte_level_encodes_and_decodes_as_the_original(
    byte_pair: tuple[HfTokenizer, HfTokenizer], text: str
) -> None:
    original, read = byte_pair
    for change in (text, f"{text}<|eot_id|>{text}<think>"):
        ids = original.encode(change, add_special_tokens=False).ids
        assert read.encode(change, add_special_tokens=False).ids == ids
        for skip in (False, True):
            assert read.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )


def sentence_piece(has_prefix: bool) -> HfTokenizer:
    """As transformers' conversion of a Llama makes it: bytes, then pieces by their scores."""
    tokenizer = HfTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    prefix = [normalizers.Prepend(BLANK)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][:3]
    tokenizer = HfTokenizer.from_str(json.dumps(fields))
    tokenizer.add_tokens([AddedToken("<mark>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "bare"])
def piece_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HfTokenizer, Path]:
    original = sentence_piece(request.param)
    size = original.get_vocab_size(with_added_tokens=False)
    kinds = [KINDS.UNKNOWN, KINDS.CONTROL, KINDS.CONTROL, *[KINDS.BYTE] * 256]
    kinds += [KINDS.NORMAL] * (size - len(kinds)) + [KINDS.USER_DEFINED, *[KINDS.UNUSED] * 3]
    path = write(
        tmp_path_factory.mktemp("piece") / "model.gguf",
        original,
        "llama",
        add_tokenizer_pre="default",
        add_token_types=kinds,
        add_token_scores=[0.0 if i < 259 else 259.0 - i for i in range(size + 4)],
        add_add_space_prefix=request.param,
        add_chat_template="{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}",
    )
    return original, convert_gguf(path)


@given(text=TEXTS)
def test_pieces_encode_and_decode_as_the_original(
    piece_folder: tuple[HfTokenizer, Path], text: str
) -> None:
    original, folder = piece_folder
    read = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    for change in (text, f"{text}</s>{text}<mark>"):
        ids = original.encode(change, add_special_tokens=False).ids
        assert read.encode(change, add_special_tokens=False).ids == ids
        assert read.decode(ids) == original.decode(ids)


def test_marks_template_and_bytes_are_there_for_the_runtime(
    piece_folder: tuple[HfTokenizer, Path],
) -> None:
    original, folder = piece_folder
    tokenizer = Tokenizer(folder, original.get_vocab_size() + 3)
    assert (tokenizer.bos_ids, tokenizer.suffix_ids) == ([1], [])
    assert (tokenizer.bos_token, tokenizer.named_tokens["eos_token"]) == ("<s>", "</s>")
    assert tokenizer.special_ids == {0, 1, 2}
    template = ChatTemplate(folder, tokenizer)
    assert not template.is_fallback and template.delimiters(["user"]) == ["<s>", "</s>"]
    written = token_bytes(folder, tokenizer)
    assert written[1] is None and written[3 + 0x41] == b"A"
    assert written[original.token_to_id("<mark>")] == b"<mark>"


def test_tokens_that_end_answers_are_found_by_id_and_by_text(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    bos, stop = original.token_to_id("<|bos|>"), original.token_to_id("<|eot_id|>")
    path = byte_level_file(tmp_path / "model.gguf", original, "gpt-2", add_eos_token_id=bos)
    generation = json.loads((convert_gguf(path) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [bos, stop]


@pytest.mark.parametrize("adds", [(None, None), (True, None), (False, True), (True, True)], ids=str)
def test_marks_around_a_text_are_those_that_the_file_asks_for(
    adds: tuple[bool | None, bool | None], tmp_path: Path
) -> None:
    original = byte_level("llama-bpe")
    bos, eos = original.token_to_id("<|bos|>"), original.token_to_id("<|eot_id|>")
    lists: dict[str, Any] = {"add_bos_token_id": bos, "add_eos_token_id": eos}
    for key, value in zip(("add_add_bos_token", "add_add_eos_token"), adds, strict=True):
        lists |= {} if value is None else {key: value}
    folder = convert_gguf(byte_level_file(tmp_path / "model.gguf", original, "llama-bpe", **lists))
    tokenizer = Tokenizer(folder, original.get_vocab_size() + 3)
    # Llama 3's pre-tokenizer adds a beginning where the file does not say.
    assert tokenizer.bos_ids == ([] if adds[0] is False else [bos])
    assert tokenizer.suffix_ids == ([eos] if adds[1] else [])


def test_special_tokens_among_the_others_keep_their_ids(tmp_path: Path) -> None:
    """As in Mistral's newer tokenizers, which begin with them."""
    fields = json.loads(byte_level("gpt-2").to_str())
    moved = {token: i + 2 for token, i in fields["model"]["vocab"].items()}
    fields["model"]["vocab"] = {"<first>": 0, "<hole>": 1, **moved}
    fields["added_tokens"] = []
    original = HfTokenizer.from_str(json.dumps(fields))
    original.add_special_tokens(["<first>"])
    kinds = [KINDS.CONTROL, KINDS.UNUSED, *[KINDS.NORMAL] * len(moved), *[KINDS.UNUSED] * 3]
    merges = [" ".join(pair) for pair in fields["model"]["merges"]]
    path = write(
        tmp_path / "model.gguf",
        original,
        "gpt2",
        add_tokenizer_pre="gpt-2",
        add_token_types=kinds,
        add_token_merges=merges,
    )
    read = Tokenizer(convert_gguf(path), len(kinds))
    text = "the <first> dog"
    assert read.encode_rendered(text).tolist() == original.encode(text).ids
    assert 0 in read.encode_rendered(text) and 0 not in read.encode(text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_pre_tokenizer_keeps_the_text(name: str) -> None:
    fields = {
        "version": "1.0",
        "pre_tokenizer": PRE_TOKENIZERS[name].fields(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "added_tokens": [],
        "model": {
            "type": "BPE",
            "vocab": {s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            "merges": [],
        },
    }
    tokenizer = HfTokenizer.from_str(json.dumps(fields))
    text = "".join(CORPUS[:5])
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        # DeepSeek's range of signs has ASCII's letters within, and cuts words at all other ones.
        ("deepseek-llm", "Über  naïve 12!\nx", "Ü|ber| | na|ï|ve| |1|2|!|\n|x"),
        ("deepseek-llm", "Ключ Բա Ωm 世界 \u3000、x ", "Ключ| Բ|ա| Ω|m| |世界| |\u3000、|x| "),
        ("kimi-k2", "Hello世界 aXMLb's 1234 //\n漢x", "Hello|世界| a|XMLb's| |123|4| //\n|漢|x"),
        ("seed-coder", "it's 12 !!\n\n x", "it|'s| |1|2| !!|\n\n| x"),
    ],
)  # fmt: skip
def test_words_end_where_the_models_own_end(name: str, text: str, words: str) -> None:
    pieces = [(text, (0, len(text)))]
    for expression in PRE_TOKENIZERS[name].expressions:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        pieces = [part for piece, _ in pieces for part in split.pre_tokenize_str(piece)]
    assert [piece for piece, _ in pieces] == words.split("|")


def test_an_old_file_without_a_pre_tokenizer_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = byte_level("gpt-2")
    size = original.get_vocab_size()
    convert_gguf(write(tmp_path / "model.gguf", original, "gpt2", add_token_types=[1] * (size + 3)))
    assert "tokenizer.ggml.pre is missing; using 'default'" in caplog.text


@pytest.mark.parametrize(
    ("name", "strips"), [("Phi 3 mini 4k instruct", True), ("Phi-3.5", True), ("Philip 30", False)]
)
def test_phi_3s_tokens_take_the_blanks_behind_them(tmp_path: Path, name: str, strips: bool) -> None:
    original = sentence_piece(True)
    size = original.get_vocab_size(with_added_tokens=False)
    original.add_special_tokens([AddedToken("<|user|>", rstrip=strips, normalized=False)])
    kinds = [KINDS.UNKNOWN, KINDS.CONTROL, KINDS.CONTROL, *[KINDS.BYTE] * 256]
    kinds += [KINDS.NORMAL] * (size - len(kinds))
    kinds += [KINDS.USER_DEFINED, KINDS.CONTROL, *[KINDS.UNUSED] * 3]
    scores = [0.0 if i < 259 else 259.0 - i for i in range(size + 5)]
    folder = convert_gguf(
        write(
            tmp_path / "model.gguf", original, "llama", add_name=name,
            add_token_types=kinds, add_token_scores=scores,
        )
    )  # fmt: skip
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    stripping = {token["content"] for token in added if token["rstrip"]}
    assert stripping == ({"</s>", "<mark>", "<|user|>"} if strips else set())
    text = "<s> the<|user|>\n the dog"
    read = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    expected = original.encode(text, add_special_tokens=False).ids
    assert read.encode(text, add_special_tokens=False).ids == expected


def test_a_pre_tokenizer_is_one_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    original = byte_level("gpt-2")
    size = original.get_vocab_size()
    write(
        path, original, "gpt2", add_token_types=[1] * (size + 3), add_tokenizer_pre=["gpt-2"],
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre.*one of a\.x-4\.0"):
        convert_gguf(path)


def test_scores_must_be_finite_numbers(tmp_path: Path) -> None:
    original = sentence_piece(True)
    scores = [float("nan")] * (original.get_vocab_size() + 3)
    path = write(tmp_path / "model.gguf", original, "llama", add_token_scores=scores)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores.*finite numbers"):
        convert_gguf(path)
