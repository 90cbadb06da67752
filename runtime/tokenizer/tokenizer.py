"""Text to token ids and back, for one checkpoint folder; knows nothing of requests or KV.

Two encodings exist: of users' text, in which nothing is special (a user cannot smuggle in an
end-of-turn token), and of the chat template's delimiters, in which special tokens are recognised.

Decoding omits special tokens, except those with which models structure their answers
(`STRUCTURE_MARKS`, and harmony's): parsers of tool calls and reasoning need these.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from ...errors import EngineError, InvalidRequest, ModelLoadError, PromptTooLong
from ...frontend.chat_format import harmony_reader as harmony
from ...frontend.chat_format.registry import STRUCTURE_MARKS
from ...native_panic import panic_raises
from .encoder_process import EncoderProcess
from .special_tokens import named_tokens, section_ends

MAX_TEXT_CHARS = 8 * 1024 * 1024
LONG_CHARS = 256  # guess: below, a cache lookup saves little
UNLOCKED_CHARS = 16 * 1024  # about 10 ms (Xeon, 2026): below, a separate thread costs more
UNLOCKED_TOKENS = 4096  # about 0.5 ms: the same for decoding
VERY_LONG_CHARS = 128 * 1024  # about 75 ms (Xeon, 2026): below, a separate process costs more
MAX_KEPT_CHARS = 16 * 1024 * 1024
REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a checkpoint folder (`tokenizer.json`, `tokenizer_config.json`).

    Raises ModelLoadError when a file is missing or broken, or when it has more tokens than the
    model's `vocab_size`.
    """

    @panic_raises(ModelLoadError, "tokenizer.json")
    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._made_of = folder, vocab_size
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{path}: missing; a checkpoint needs its tokenizer.json")
        try:
            self._special = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path}: not a tokenizer: {error}") from error
        self._special.no_truncation()
        self._special.no_padding()
        self._plain = _of_same_model(self._special)
        self._plain.encode_special_tokens = True
        self.config = _load_config(folder / "tokenizer_config.json")
        self._require_fits(path, vocab_size)
        self.named_tokens = named_tokens(folder, self.config)
        self.bos_token = self.named_tokens["bos_token"]
        added = self._special.get_added_tokens_decoder()
        special = {i: token.content for i, token in added.items() if token.special}
        self.special_texts = tuple(special.values())
        marks, self.final_ids = _marks_of(special)
        self.special_ids = frozenset(i for i, t in special.items() if t not in marks)
        self.structure_tokens = {
            token.content: i for i, token in added.items() if token.content in marks
        }
        has_hidden = len(self.special_ids) < len(special)
        self._showing = _showing_marks(self._special, marks) if has_hidden else self._plain
        self.bos_ids, self.suffix_ids = self._marks_of_text()
        self.pair_marks = self._marks_of_pair()
        self._starts = [(start, encoded(self._plain, start)) for start in _starts(self._plain)]
        self._section_end = section_ends(added.values())
        self._goes_on_behind_special = self._section_end is not None and self._is_one_text()
        self._marks = re.compile(f"({'|'.join(map(re.escape, self.structure_tokens))})")
        self._kept = KeptEncodings()
        self._process = EncoderProcess(folder)

    def __reduce__(self) -> tuple[object, ...]:
        """Another process reads the folder again."""
        return type(self), self._made_of

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS is added and no special token is recognised. Raises
        InvalidRequest for a text that is too long, or that the tokenizer cannot take."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str, max_tokens: int = sys.maxsize) -> array[int]:
        """Like `encode`; the caller must not change the result. Raises PromptTooLong for more than
        `max_tokens`."""
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest.of("text", f"{len(text)} characters", f"at most {MAX_TEXT_CHARS}")
        if len(text) < LONG_CHARS:
            return encoded(self._plain, text, max_tokens)
        ids = self._kept.find(text)
        if ids is None:
            if len(text) < VERY_LONG_CHARS:
                ids = encoded(self._plain, text, max_tokens)
            else:
                ids = self._process.encode(text, max_tokens)
            self._kept.keep(text, ids)
        _require_at_most(max_tokens, len(ids))
        return ids

    def tokens_before(self, text: str, ends: Sequence[int]) -> array[int]:
        """How many of a text's tokens end at, or before, each of these characters. Raises what
        `encode_array` does."""
        if len(text) < VERY_LONG_CHARS:
            return tokens_before(self._plain, text, ends)
        return self._process.tokens_before(text, ends)

    def encode_output(self, text: str) -> array[int]:
        """Ids of a text as a model writes it, behind other tokens: its structure marks are tokens,
        and nothing is put before its first word. Raises InvalidRequest."""
        ids = array("i")
        parts = self._marks.split(text) if self.structure_tokens else (text,)
        for part in filter(None, parts):  # between two marks there may be nothing
            mark = self.structure_tokens.get(part)
            ids.extend(self.encode_inner(part) if mark is None else (mark,))
        return ids

    def encode_forced(self, text: str) -> list[int]:
        """Ids of a text that a grammar has a model write, alone or behind its last tokens: its
        structure marks are tokens. Raises InvalidRequest."""
        if not self.structure_tokens or self._marks.search(text) is None:
            return self.encode(text)
        return self.encode_output(text).tolist()

    def encode_inner(self, text: str, max_tokens: int = sys.maxsize) -> array[int]:
        """Ids of plain text behind other tokens: nothing is put before its first word. The caller
        must not change them. Raises what `encode_array` does."""
        return self._behind(text, partial(self.encode_array, max_tokens=max_tokens))

    def encode_rendered(self, text: str, *, goes_on: bool = False) -> array[int]:
        """Ids of what a chat template has rendered: special tokens are recognised, no BOS is added.
        `goes_on`: it is behind other tokens. Raises InvalidRequest.

        Special tokens divide a text into sections that know nothing of each other. Long ones are
        tokenized alone, as they may be known from another chat.
        """
        if len(text) > 4 * MAX_TEXT_CHARS:
            allowed = f"at most {4 * MAX_TEXT_CHARS}"
            raise InvalidRequest.of("messages", f"{len(text)} characters", allowed)
        ids, start = array("i"), 0
        for begin, end in self._long_sections(text):
            ids.extend(self._encode_special(text[start:begin], goes_on=goes_on))
            is_inner = self._goes_on_behind_special if begin else goes_on
            encode = self.encode_inner if is_inner else self.encode_array
            ids.extend(encode(text[begin:end]))
            goes_on, start = True, end
        ids.extend(self._encode_special(text[start:], goes_on=goes_on))
        return ids

    @panic_raises(InvalidRequest, "the model's tokenizer cannot take this text")
    def _encode_special(self, text: str, *, goes_on: bool) -> array[int]:
        if not text:
            return array("i")
        encode = partial(encoded, self._special)
        if goes_on and not self._begins_special(text):
            return self._behind(text, encode)
        return encode(text)

    def _behind(self, text: str, encode: Callable[[str], array[int]]) -> array[int]:
        """Ids of a text that goes on another one: what it may go on, without that. A start that
        becomes one token with the text's beginning is not the right one."""
        for start, start_ids in self._starts:
            ids = encode(start + text)
            if ids[: len(start_ids)] == start_ids:
                return ids[len(start_ids) :]
        return encode(text)

    def _begins_special(self, text: str) -> bool:
        return self._section_end is not None and self._section_end.match(text) is not None

    def _long_sections(self, text: str) -> Iterator[tuple[int, int]]:
        if self._section_end is None or len(text) < LONG_CHARS:
            return
        begin = 0
        for mark in self._section_end.finditer(text):
            if mark.start() - begin >= LONG_CHARS:
                yield begin, mark.start()
            begin = mark.end()
        if len(text) - begin >= LONG_CHARS:
            yield begin, len(text)

    def _is_one_text(self) -> bool:
        """Whether a word behind a special token is encoded as one within a text."""
        alone = encoded(self._plain, "a")
        ids = encoded(self._special, "".join(self.special_texts[:1]) + "a")
        return ids[-len(alone) :] != alone

    def close(self) -> None:
        """End the process for very long texts, if one was started."""
        self._process.close()

    @panic_raises(EngineError, "the model's tokenizer cannot decode these tokens")
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no whole character become U+FFFD."""
        if len(ids) < UNLOCKED_TOKENS:
            text: str = self._showing.decode(ids, skip_special_tokens=skip_special)
        else:  # a batch is decoded without the interpreter's lock: other threads can run
            (text,) = self._showing.decode_batch([ids], skip_special_tokens=skip_special)
        return text

    def decode_cached(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The same of ids within the engine, where those below 0 are an image's, which has no
        text."""
        if min(ids, default=0) < 0:
            ids = [token_id for token_id in ids if token_id >= 0]
        return self.decode(ids, skip_special=skip_special)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name."""
        return self.decode([token_id], skip_special=False)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is called so, special or not; None where there is none."""
        found: int | None = self._special.token_to_id(text)
        return found

    def texts_by_id(self) -> list[str | None]:
        """What the tokenizer's file calls each id; None: there is no such token."""
        names = {i: text for text, i in self._special.get_vocab(with_added_tokens=True).items()}
        return [names.get(token_id) for token_id in range(max(names, default=-1) + 1)]

    @property
    def num_tokens(self) -> int:
        """Tokens that the tokenizer knows, added ones included."""
        return int(self._special.get_vocab_size(with_added_tokens=True))

    def _marks_of_text(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before raw text (usually one BOS or nothing) and
        after it (only embedding models have these)."""
        with_marks: list[int] = self._special.encode("a", add_special_tokens=True).ids
        without: list[int] = self._special.encode("a", add_special_tokens=False).ids
        if not without or without[0] not in with_marks:
            return [], []
        start = with_marks.index(without[0])
        before, behind = with_marks[:start], with_marks[start + len(without) :]
        return (
            [i for i in before if i in self.special_ids],
            [i for i in behind if i in self.special_ids],
        )

    def _marks_of_pair(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts between two texts that are seen together, and behind
        the second; a model that sees no pairs has none between."""
        pair = self._special.encode("a", "a", add_special_tokens=True)
        # Whether a pair's texts are told apart by the types of their tokens, as BERT's are.
        self.has_pair_types = any(pair.type_ids)
        ids: list[int] = pair.ids
        text: list[int] = self._special.encode("a", add_special_tokens=False).ids
        begin = len(self.bos_ids)
        is_known = text and ids[:begin] == self.bos_ids and ids[begin : begin + len(text)] == text
        rest = ids[begin + len(text) :] if is_known else []
        for start in range(len(rest) - len(text) + 1):
            if rest[start : start + len(text)] == text:
                return rest[:start], rest[start + len(text) :]
        return [], self.suffix_ids

    def _require_fits(self, path: Path, vocab_size: int) -> None:
        vocabulary = self._special.get_vocab(with_added_tokens=True)
        self.longest_token_chars = max(map(len, vocabulary), default=1)  # no token is longer
        largest = max(vocabulary.values(), default=-1)
        if largest >= vocab_size:
            raise ModelLoadError(
                f"{path}: token id {largest} but the model's vocab_size is {vocab_size}"
            )


class KeptEncodings:
    """Ids of long texts, so that a batch's constant prefix is tokenized once. Evicts the least
    recently used beyond MAX_KEPT_CHARS; thread-safe."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def find(self, text: str) -> array[int] | None:
        """The ids of a text, if cached. The caller must not change them."""
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
            return ids

    def keep(self, text: str, ids: array[int]) -> None:
        if len(text) > MAX_KEPT_CHARS:
            return
        with self._lock:
            if text not in self._ids:
                self._num_chars += len(text)
            self._ids[text] = ids
            while self._num_chars > MAX_KEPT_CHARS:
                dropped, _ = self._ids.popitem(last=False)
                self._num_chars -= len(dropped)


def plain_tokenizer(path: Path) -> HfTokenizer:
    """Encodes users' texts, in which nothing is special."""
    tokenizer = HfTokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@panic_raises(InvalidRequest, "the model's tokenizer cannot take this text")
def encoded(tokenizer: HfTokenizer, text: str, max_tokens: int = sys.maxsize) -> array[int]:
    """Ids of a text. Raises InvalidRequest, PromptTooLong for more than `max_tokens`."""
    if len(text) < UNLOCKED_CHARS:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    else:  # a batch is encoded without the interpreter's lock: other threads can run
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
    _require_at_most(max_tokens, len(encoding))
    return array("i", encoding.ids)


@panic_raises(InvalidRequest, "the model's tokenizer cannot take this text")
def tokens_before(tokenizer: HfTokenizer, text: str, ends: Sequence[int]) -> array[int]:
    """How many of a text's tokens end at, or before, each of these characters."""
    encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    stops = [stop for _, stop in encoding.offsets]
    return array("i", [bisect_right(stops, end) for end in ends])


def _starts(tokenizer: HfTokenizer) -> Sequence[str]:
    """What to put before a text so that it is encoded as if it went on another one: something where
    the tokenizer puts a blank before a text's first word, as SentencePiece's do."""
    tokens = tokenizer.encode("a", add_special_tokens=False).tokens
    return ("\n", "0", "\u0001") if tokens and tokens[0].startswith("\u2581") else ()


def _require_at_most(max_tokens: int, num_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise PromptTooLong.than(f"{num_tokens} tokens", max_tokens - 1, max_tokens, "text")


def _marks_of(special: Mapping[int, str]) -> tuple[frozenset[str], tuple[int, ...]]:
    """The tokens that structure an answer, and the ids of those that end one, besides the model's
    own: harmony's are such only where all of them are special tokens, as each may be another
    format's."""
    ids = {text: i for i, text in special.items()}
    own = (*harmony.MARKS, *harmony.FINAL_TOKENS)
    if not all(text in ids for text in own):
        return frozenset(STRUCTURE_MARKS), ()
    return frozenset((*STRUCTURE_MARKS, *harmony.MARKS)), tuple(
        ids[text] for text in harmony.FINAL_TOKENS
    )


def _showing_marks(tokenizer: HfTokenizer, marks: Container[str]) -> HfTokenizer:
    """A tokenizer for decoding that treats structure tokens as ordinary ones."""
    return _of_same_model(tokenizer, lambda token: token.special and token.content not in marks)


def _of_same_model(
    tokenizer: HfTokenizer, is_special: Callable[[AddedToken], bool] = attrgetter("special")
) -> HfTokenizer:
    """A tokenizer with settings of its own, over the vocabulary and merges of another one: these
    are most of what it holds, and take most of the time to read."""
    other = HfTokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(other, part, getattr(tokenizer, part))
    added = sorted(tokenizer.get_added_tokens_decoder().items())  # by id, as they come in a file
    other.add_tokens([_as_special(token, is_special(token)) for _, token in added])
    return other


def _as_special(token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: expected an object, found {type(config).__name__}")
    return config
