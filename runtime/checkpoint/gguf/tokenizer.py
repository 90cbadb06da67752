"""Converts a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json.

Two tokenizer models are supported. "gpt2" is byte-level BPE with its merges. "llama" is
SentencePiece's BPE, for which files have only scores: as in Hugging Face's conversion, each way to
make a piece of two others becomes a merge, the piece with the highest score first. Torch-free.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .vocabulary import ADDED_KINDS, TokenKind, Vocabulary

_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TEMPLATE = "tokenizer.chat_template"
# All other added tokens of Phi-3's SentencePiece vocabulary absorb the blanks after them, which a
# file does not record (llama-vocab.cpp, "per token attributes").
_PHI_3_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files to write."""

    tokenizer: dict[str, Any]  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    stop_ids: list[int]  # tokens that end an answer


def tokenizer_files(vocabulary: Vocabulary) -> TokenizerFiles:
    """Raises ModelLoadError for an unknown or malformed tokenizer."""
    kind = vocabulary.fields.get(_MODEL)
    if kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(vocabulary)
        tokenizer = _byte_level(vocabulary, pre_tokenizer)
        marks = _Marks(vocabulary, adds_bos=pre_tokenizer.adds_bos, ids=(None, None, None))
    elif kind == "llama":
        tokenizer = _sentence_piece(vocabulary)
        marks = _Marks(vocabulary, adds_bos=True, ids=(1, 2, 0))
    else:
        raise vocabulary.fail(_MODEL, "'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        **tokenizer,
        "post_processor": marks.post_processor(),
    }
    return TokenizerFiles(tokenizer, marks.config(), vocabulary.stop_ids())


class _Marks:
    """The special tokens with a function, and which of them surround a text."""

    def __init__(
        self, vocabulary: Vocabulary, *, adds_bos: bool, ids: tuple[int | None, ...]
    ) -> None:
        """ids: of beginning, end and unknown, used if the file has none."""
        self._vocabulary = vocabulary
        names = ("bos", "eos", "unknown")
        self._ids = {
            name: vocabulary.token_id(f"{name}_token_id", default)
            for name, default in zip(names, ids, strict=True)
        }
        self._ids["padding"] = vocabulary.token_id("padding_token_id")
        self._adds_bos = vocabulary.flag("add_bos_token", adds_bos) and self._has("bos")
        self._adds_eos = vocabulary.flag("add_eos_token", False) and self._has("eos")

    def post_processor(self) -> dict[str, Any] | None:
        before = [self._text("bos")] if self._adds_bos else []
        behind = [self._text("eos")] if self._adds_eos else []
        if not before and not behind:
            return None

        def around(sequence: str) -> list[dict[str, Any]]:
            return [
                *({"SpecialToken": {"id": text, "type_id": 0}} for text in before),
                {"Sequence": {"id": sequence, "type_id": 0}},
                *({"SpecialToken": {"id": text, "type_id": 0}} for text in behind),
            ]

        ids = {self._text(name): self._ids[name] for name in ("bos", "eos") if self._has(name)}
        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": [*around("A"), *around("B")],
            "special_tokens": {
                text: {"id": text, "ids": [ids[text]], "tokens": [text]}
                for text in (*before, *behind)
            },
        }

    def config(self) -> dict[str, Any]:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        tokens = {
            f"{short}_token": self._text(name) for name, short in names.items() if self._has(name)
        }
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self._adds_bos,
            "add_eos_token": self._adds_eos,
            "clean_up_tokenization_spaces": False,
            **tokens,
        }
        template = _chat_template(self._vocabulary)
        return config if template is None else config | {"chat_template": template}

    def _has(self, name: str) -> bool:
        return self._ids[name] is not None

    def _text(self, name: str) -> str:
        token_id = self._ids[name]
        assert token_id is not None, "only asked for where there is one"
        return self._vocabulary.tokens[token_id]


def _chat_template(vocabulary: Vocabulary) -> str | list[dict[str, str]] | None:
    """One template, or, as in Hugging Face's files, a list of named ones."""
    values = vocabulary.fields.values
    templates = {"default": values.get(_TEMPLATE)}
    templates |= {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in values.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    if len(texts) > 1:
        return [{"name": name, "template": text} for name, text in texts.items()]
    return texts.get("default")


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    strips = vocabulary.fields.get(_MODEL) == "llama" and _is_phi_3(vocabulary)
    return [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and text not in _PHI_3_NOT_STRIPPING,
            "normalized": False,
            "special": kind is not TokenKind.USER_DEFINED,
        }
        for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds))
        if kind in ADDED_KINDS
    ]


def _is_phi_3(vocabulary: Vocabulary) -> bool:
    """By its architecture, or, if a file calls it a Llama, by its name, as llama.cpp does."""
    get = vocabulary.fields.get
    name = re.sub(r"[\W_]", "", str(get("general.name")).lower())
    return get("general.architecture") == "phi3" or "phi3" in name


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = vocabulary.fields.get(_PRE)
    if name is None:
        logger.warning("%s: %s is missing; using 'default'", vocabulary.path, _PRE)
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise vocabulary.fail(_PRE, f"one of {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: Vocabulary, pre_tokenizer: PreTokenizer) -> dict[str, Any]:
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.is_normalized else None,
        "pre_tokenizer": pre_tokenizer.fields(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": _bpe(
            _ids_of_model(vocabulary),
            vocabulary.merges(),
            ignore_merges=pre_tokenizer.ignores_merges,
        ),
    }


def _sentence_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    has_prefix = vocabulary.flag("add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    prefix = [{"type": "Prepend", "prepend": _BLANK}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = vocabulary.token_id("unknown_token_id", 0)
    assert unknown is not None, "a vocabulary is not empty"
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            {text: token_id for token_id, text in enumerate(vocabulary.tokens)},
            _merges_by_score(vocabulary),
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=TokenKind.BYTE in vocabulary.kinds,
        ),
    }


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def _ids_of_model(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids without the added tokens at the end, which get consecutive ids anyway; those within must
    be listed. Unused ones at the very end are only padding of the embedding."""
    end = len(vocabulary.tokens)
    while end and vocabulary.kinds[end - 1] is TokenKind.UNUSED:
        end -= 1
    while end and vocabulary.kinds[end - 1] in ADDED_KINDS:
        end -= 1
    return {text: token_id for token_id, text in enumerate(vocabulary.tokens[:end])}


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of normal pieces that make one; of a piece's pairs, the longest left one first.
    Pieces of equal score (all, in files made without SentencePiece) are ordered by their ids."""
    ranks = {
        text: (-score, token_id)
        for token_id, (text, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores())
        )
        if kind is TokenKind.NORMAL
    }
    pairs = [
        (rank, -place, piece[:place], piece[place:])
        for piece, rank in ranks.items()
        for place in range(1, len(piece))
        if piece[:place] in ranks and piece[place:] in ranks
    ]
    return [(left, right) for _, _, left, right in sorted(pairs)]
