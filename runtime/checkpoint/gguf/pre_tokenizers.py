"""How byte-level BPE splits a text into words, by the name in a GGUF file.

`tokenizer.ggml.pre` names one of llama.cpp's pre-tokenizers (llama-vocab.cpp); each name's
expressions are taken from the tokenizer.json of the models that it was made for. The expressions
split one after the other, each the parts that those before it left whole. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CL100K = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    _CJK,
    _DIGIT,
)
# Letters that have a case, except for the scripts and alphabets named here.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2cf2-\u2d2d\ua790-\ua7ff"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7ff}"
    r"\x{1df00}-\x{1dfff}]]"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    _DIGIT,
)
_UPPER_NO_HAN, _LOWER_NO_HAN = (f"{each[:-1]}&&[^\\p{{Han}}]]" for each in (_UPPER, _LOWER))
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is prepared before its words are merged from bytes."""

    expressions: Sequence[str]
    ignores_merges: bool = False  # a word that is a token stays one, whatever the merges are
    is_normalized: bool = False  # to NFC
    adds_bos: bool = False  # if the file does not say it

    def fields(self) -> dict[str, Any]:
        """The fields of tokenizer.json."""
        splits = [
            {"type": "Split", "pattern": {"Regex": e}, "behavior": "Isolated", "invert": False}
            for e in self.expressions
        ]
        to_bytes = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}


_LLAMA3 = PreTokenizer([_CL100K], ignores_merges=True, adds_bos=True)
_WORDS = PreTokenizer([GPT2])
_WORDS_AND_DIGITS = PreTokenizer([_DIGIT, GPT2])
_QWEN = PreTokenizer([_QWEN2], is_normalized=True)

PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer([_CL100K])),
    "glm4": PreTokenizer([_CL100K], ignores_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan"), PreTokenizer([_QWEN2])),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), _WORDS
    ),
    **dict.fromkeys(("a.x-4.0", "gigachat", "mellum"), _WORDS),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        _WORDS_AND_DIGITS,
    ),
    "falcon": PreTokenizer(_FALCON),
    "tekken": PreTokenizer([_TEKKEN], ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer([_O200K])),
    "kimi-k2": PreTokenizer([_KIMI]),
    "seed-coder": PreTokenizer([_SEED]),
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), PreTokenizer(_DEEPSEEK3)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}
"""By `tokenizer.ggml.pre`."""
