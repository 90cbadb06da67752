"""Prompts for what belongs between a prefix and a suffix, for models that have tokens for it.

Prefix-suffix-middle as in Bavarian et al., "Efficient Training of Language Models to Fill in the
Middle", 2022; other files of a project go before it as in Hui et al., "Qwen2.5-Coder Technical
Report", 2024. Tokens are put between texts by their ids: no text of a request becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

REPOSITORY = "project"  # the name that a prompt of several files begins with
FILE = "file"  # and the one of the file that is filled in


@dataclass(frozen=True, slots=True)
class _Names:
    """How a family calls its tokens; `repository` and `file` by each name that is in use."""

    prefix: str
    suffix: str
    middle: str
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()


_FAMILIES = (
    _Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
           ("<|repo_name|>",), ("<|file_sep|>",)),  # Qwen2.5-Coder, CodeGemma
    _Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>",
           ("<repo_name>", "<reponame>"), ("<file_sep>", "<filename>")),  # StarCoder, Granite
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Names("<PRE>", "<SUF>", "<MID>"),
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)  # fmt: skip
# With these such an output ends, whatever ends the same model's answers in chats.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>",
    "<fim_pad>", "<fim-pad>", "<file_sep>", "<filename>", "<repo_name>", "<reponame>",
    "<｜end▁of▁sentence｜>", "▁<EOT>", "<EOT>",
)  # fmt: skip

TokenId = Callable[[str], int | None]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class InfillText:
    """What a client gives: the texts around the gap, other files as (name, text), and how the
    output begins."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    beginning: str = ""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A model's tokens for it."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, token_id: TokenId) -> InfillTokens | None:
        """Those that the tokenizer has; None where it lacks one of the three."""
        for names in _FAMILIES:
            ids = [token_id(name) for name in (names.prefix, names.suffix, names.middle)]
            prefix, suffix, middle = ids
            if prefix is not None and suffix is not None and middle is not None:
                repository, file = _first(token_id, names.repository), _first(token_id, names.file)
                ends = tuple(found for name in _ENDS if (found := token_id(name)) is not None)
                return cls(prefix, suffix, middle, repository, file, ends)
        return None

    def prompt(self, text: InfillText, encode: Encode) -> list[int]:
        """The prompt's ids, without BOS."""
        return [
            *self._of_files(text.files, encode),
            self.prefix,
            *encode(text.prefix),
            self.suffix,
            *encode(text.suffix),
            self.middle,
            *encode(text.beginning),
        ]

    def _of_files(self, files: Sequence[tuple[str, str]], encode: Encode) -> Iterable[int]:
        """Other files, before the one that is filled in."""
        if not files:
            return []
        if self.repository is None or self.file is None:
            return encode("".join(f"{text}\n" for _, text in files))
        ids = [self.repository, *encode(f"{REPOSITORY}\n")]
        for name, text in files:
            ids += [self.file, *encode(f"{name}\n{text}\n")]
        return [*ids, self.file, *encode(f"{FILE}\n")]


def _first(token_id: TokenId, names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := token_id(name)) is not None), None)
