"""What a gen will say that resembles earlier ones: their outputs with other words in their slots.

An earlier output of the same op is an example. Its prompt and output are aligned with this one's
(`../speculate/native/src/analogy.cpp`), what differs between equal words is a slot, and the rest of
the example with its slots exchanged is a guess:

    example   What is 12 times 7?    Thought: multiply 12 by 7.    Action: calculator[12*7]
    new       What is 41 times 9?    Thought: multiply 41 by 9.    Action: calculator[41*9]

An example knows the output that followed it in its program, too, so that the next output is guessed
along, where none of its words are known only by what was appended between them. Slots between
delimiters are those of wrapper induction (Kushmerick, Weld and Doorenbos 1997).

Examples vote; a guess's chance is what became of guesses of so much evidence at its op, told or
not. Text is all that is known: neither tools nor roles.
"""

from __future__ import annotations

import ctypes
import math
import re
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from zlib import crc32

from ..speculate.native.bindings import library

MAX_EXAMPLES = 4096  # in all: some 10 MiB
MAX_OF_OP = 256
MAX_OPS = 256
MAX_PROMPT_WORDS = 96  # of a prompt's end
MAX_OUTPUT_WORDS = 160  # of an output that is an example, or is guessed
MAX_PROPOSALS = 48  # for one output
_MAX_BEFORE = 8  # outputs of a branch that are not guessed again
_ROOM = 16  # guesses of one proposal; native/src/analogy.cpp aligns as many prompts
_MAX_PARTS = 512  # native/src/analogy.cpp has the same
_SHARPNESS = 4.0  # of votes: e to the power of this times the score

# A number, a character of a script without spaces, a word, or a mark.
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"\d+(?:[.,]\d+)*|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|[^\w\s]|_")

# The chance of guesses by their evidence, in steps of _STEP: those of what begins, of what is
# going on, of next outputs. On agents' conversations (docs/how-it-works/ahead.md).
_CHANCES = (
    (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9),
    (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.93, 0.95, 0.95),
    (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9),
)
_STEP = 0.125
_PRIOR = 8.0  # guesses that these chances count as
_FADING = 1 - 1 / 64  # of a cell's older guesses, with each new one


@dataclass(frozen=True, slots=True)
class Guess:
    """A whole output, and the chance that it is this one."""

    text: str
    chance: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """What an output is likely to be, and the one that follows it in its program."""

    own: Guess
    next: Guess | None


def num_settled(output: str) -> int:
    """Characters of an output but those of its last word, which may go on."""
    end = len(output)
    while end and (output[end - 1].isalnum() or _is_within_number(output, end - 1)):
        end -= 1
    return end


def _is_within_number(text: str, place: int) -> bool:
    return text[place] in ".," and place > 0 and text[place - 1].isdigit()


class Analogies:
    """Owns the examples of all ops, at most MAX_EXAMPLES of MAX_OPS: the op that was used least
    recently is forgotten first. One thread uses it."""

    def __init__(self) -> None:
        """Raises BuildError where there is no compiler."""
        self._native = library()
        self._ops: OrderedDict[Hashable, _Op] = OrderedDict()

    @property
    def num_examples(self) -> int:
        """Of all ops."""
        return sum(len(op.examples) for op in self._ops.values())

    def open(
        self, op: Hashable, prompt: str, before: Analogy | None = None, between: str = ""
    ) -> Analogy:
        """An output that begins behind the prompt, of which the end is enough. `before`: the one
        that ended before it in its branch, behind which `between` was appended."""
        if op not in self._ops:
            self._ops[op] = _Op(self._native)
        self._ops.move_to_end(op)
        while len(self._ops) > 1 and (len(self._ops) > MAX_OPS or self.num_examples > MAX_EXAMPLES):
            self._ops.popitem(last=False)
        return Analogy(self._ops[op], prompt, before, between)


class Analogy:
    """One output, while it is said. Once it has ended it is an example."""

    def __init__(self, op: _Op, prompt: str, before: Analogy | None, between: str) -> None:
        self._op = op
        self._prompt = _Words(prompt, num_last=MAX_PROMPT_WORDS)
        self._before = before if before is not None and before._op is op else None
        self._between = between
        self._said_before: tuple[str, ...] = () if before is None else before._said_now
        self._said_now: tuple[str, ...] = self._said_before  # with this output, once it has ended
        self._number: int | None = None  # as an example
        self._num_proposals = 0
        self.is_over = False  # too long, or asked too often: nothing is proposed any more
        self._guessed: dict[str, set[_Chance]] = defaultdict(set)
        self._guessed_next: dict[str, set[_Chance]] = defaultdict(set)
        self._handle = op.native.stemma_new_analogy(
            op.handle, *self._prompt.addresses(), len(self._prompt)
        )

    def __del__(self) -> None:
        if self._handle is not None:
            self._op.native.stemma_free_analogy(self._handle)

    def propose(self, output: str) -> Proposal | None:
        """What the output is likely to be that begins so. None: nothing is known."""
        own, following = self._ask(output)
        if not own:
            return None
        guess = self._guess(own, self._op.chances[bool(output)], self._guessed)
        return Proposal(guess, self._guess_next(following))

    def propose_next(self, output: str) -> Guess | None:
        """What the next output is likely to be; this one is over."""
        return self._guess_next(self._ask(output)[1])

    def end(self, output: str | None) -> None:
        """It is over, and this is the output; None: it was cut short, and says nothing."""
        self._op.native.stemma_free_analogy(self._handle)
        self._handle = None
        if output is not None:
            _note(self._guessed, output)
            self._number = self._op.add(self._prompt, output)
            self._said_now = (*self._said_before, output)[-_MAX_BEFORE:]
            if self._before is not None:
                _note(self._before._guessed_next, output)
                if self._before._number is not None:
                    self._op.extend(self._before._number, self._between, output)
        self._before = None

    def _ask(self, output: str) -> tuple[_Votes, _Votes]:
        """What examples say of this output and of the next one."""
        own, following = _Votes(), _Votes()
        said = _Words(output[: num_settled(output)])
        self._num_proposals += 1
        self.is_over = self._num_proposals > MAX_PROPOSALS or len(said) > MAX_OUTPUT_WORDS
        if self.is_over:
            return own, following
        for found in self._op.propose(self._handle, said):
            example = self._op.examples[found.number]
            text = said.whole_text + self._own(found, example, said)
            if text.startswith(output) and text not in self._said_before:
                own.add(text, found.score)
                if found.num_next_parts > 0:
                    following.add(self._next(found, example, said), found.score)
        return own, following

    def _guess_next(self, votes: _Votes) -> Guess | None:
        return self._guess(votes, self._op.chances[2], self._guessed_next) if votes else None

    def _own(self, found: _Found, example: _Example, said: _Words) -> str:
        """What the example says behind what is said."""
        at = example.start
        if found.begin > example.num_prompt:
            at = example.words.ends[found.begin - 1]
        parts = found.parts[: found.num_parts]
        return self._spoken(parts, example.words, at, example.num_words, example.end, said)

    def _next(self, found: _Found, example: _Example, said: _Words) -> str:
        """What it said thereafter."""
        words = example.words
        parts = found.parts[found.num_parts : found.num_parts + found.num_next_parts]
        end = len(words.text)
        return self._spoken(parts, words, example.next_start, len(words), end, said)

    def _spoken(
        self, parts: list[_Part], words: _Words, at: int, last: int, end: int, said: _Words
    ) -> str:
        """The parts of an example with what stands between its words, from place `at` on; `last`,
        `end`: the word and the place where it ends."""
        pieces, num_prompt = [], len(self._prompt)
        nexts = [*(part.example for part in parts[1:]), last]
        for part, following in zip(parts, nexts, strict=False):
            pieces.append(words.text[at : words.starts[part.example]])
            if part.first < 0:
                pieces.append(words.piece(part.example, part.example))
            elif part.first < num_prompt:
                pieces.append(self._prompt.piece(part.first, part.last))
            else:
                pieces.append(said.piece(part.first - num_prompt, part.last - num_prompt))
            at = words.ends[following - 1]
        return "".join((*pieces, words.text[at:end]))

    @staticmethod
    def _guess(votes: _Votes, chances: list[_Chance], guessed: dict[str, set[_Chance]]) -> Guess:
        text, evidence = votes.best()
        chance = chances[min(len(chances) - 1, int(max(0.0, evidence) / _STEP))]
        guessed[text].add(chance)
        return Guess(text, chance.value)


class _Votes:
    """Which texts examples speak for."""

    def __init__(self) -> None:
        self._scores: dict[str, list[float]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._scores)

    def add(self, text: str, score: float) -> None:
        self._scores[text].append(score)

    def best(self) -> tuple[str, float]:
        """The text that has most, and the evidence for it, in [0, 1.7]: its share counts the less
        the fewer examples agree, and how alike the best one is counts, too."""
        votes = {
            text: sum(math.exp(_SHARPNESS * score) for score in scores)
            for text, scores in self._scores.items()
        }
        text = max(votes, key=votes.__getitem__)
        scores = self._scores[text]
        share = votes[text] / sum(votes.values())
        return text, share * (1 - 0.5 ** len(scores)) + 0.7 * max(scores)


@dataclass(slots=True, eq=False)
class _Chance:
    """How many guesses of so much evidence were right, older ones fading."""

    prior: float
    num: float = 0.0
    num_right: float = 0.0

    @property
    def value(self) -> float:
        return (self.prior * _PRIOR + self.num_right) / (_PRIOR + self.num)

    def note(self, is_right: bool) -> None:
        self.num = self.num * _FADING + 1
        self.num_right = self.num_right * _FADING + is_right


def _note(guessed: dict[str, set[_Chance]], output: str) -> None:
    """What became of guesses; each chance is told once of each text."""
    for text, chances in guessed.items():
        for chance in chances:
            chance.note(text == output)
    guessed.clear()


@dataclass(slots=True)
class _Example:
    """A prompt's end, of `num_prompt` words; an output from `start` to `end`, after `num_words`
    words; then, once that is known, what was appended and, from `next_start` on, the next output:
    places in the text."""

    words: _Words
    num_prompt: int
    start: int
    num_words: int
    end: int
    next_start: int = 0


class _Op:
    """The examples of one op, by number, and the chances of guesses. Invariant: the native part
    has the same examples."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native
        self.handle = native.stemma_new_examples(MAX_OF_OP)
        self.examples: OrderedDict[int, _Example] = OrderedDict()
        self.chances = [[_Chance(prior) for prior in row] for row in _CHANCES]
        self._numbers: dict[str, int] = {}  # by prompt's end and output
        self._num_added = 0
        self._found = (_Found * _ROOM)()

    def __del__(self) -> None:
        self.native.stemma_free_examples(self.handle)

    def propose(self, analogy: int, said: _Words) -> list[_Found]:
        """What examples say behind this, the most alike first; valid until it is asked again."""
        num = self.native.stemma_propose_analogies(
            analogy, *said.addresses(), len(said), self._found, _ROOM
        )
        return self._found[:num]

    def add(self, prompt: _Words, output: str) -> int | None:
        """Returns the example's number, or that of an equal one; None: it is too long to be one.
        `prompt` becomes the example's."""
        text = prompt.text + output
        if text in self._numbers:
            return self._numbers[text]
        num_prompt, start = len(prompt), len(prompt.text)
        if prompt.append(output) > MAX_OUTPUT_WORDS:
            return None
        number = self._numbers[text] = self._num_added
        self._num_added += 1
        self.examples[number] = _Example(prompt, num_prompt, start, len(prompt), len(text))
        self.native.stemma_add_example(self.handle, *prompt.addresses(), num_prompt, len(prompt))
        if len(self.examples) > MAX_OF_OP:
            _, dropped = self.examples.popitem(last=False)
            del self._numbers[dropped.words.text[: dropped.end]]
        return number

    def extend(self, number: int, between: str, output: str) -> None:
        """This was appended behind an example, then this was said."""
        example = self.examples.get(number)
        if example is None:
            return
        words, first = example.words, example.num_words
        words.cut(first, example.end)
        num_between = words.append(between)
        example.next_start = len(words.text)
        if num_between > MAX_OUTPUT_WORDS or words.append(output) > MAX_OUTPUT_WORDS:
            words.cut(first, example.end)
            num_between = 0
        self.native.stemma_extend_example(
            self.handle, number, *words.addresses(first), num_between, len(words) - first
        )


class _Words:
    """A text as words: their ids, kinds and places."""

    __slots__ = ("ends", "ids", "kinds", "starts", "text")

    def __init__(self, text: str, num_last: int | None = None) -> None:
        """`num_last`: of the last words alone."""
        self.text = ""
        self.ids, self.kinds = array("i"), array("B")
        self.starts, self.ends = array("i"), array("i")
        self.append(text, num_last)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def whole_text(self) -> str:
        """Up to the last word's end."""
        return self.text[: self.ends[-1]] if self.ends else ""

    def append(self, text: str, num_last: int | None = None) -> int:
        """Returns how many words that are."""
        start = len(self.text)
        self.text += text
        spans = [match.span() for match in _WORD.finditer(text)]
        spans = spans if num_last is None else spans[-num_last:]
        words = [text[first:end] for first, end in spans]
        self.ids.extend(crc32(word.encode()) >> 1 for word in words)
        self.kinds.extend(map(_kind, words))
        self.starts.extend(start + first for first, _ in spans)
        self.ends.extend(start + end for _, end in spans)
        return len(words)

    def cut(self, num_words: int, num_chars: int) -> None:
        """Keep the beginning alone."""
        self.text = self.text[:num_chars]
        for numbers in (self.ids, self.kinds, self.starts, self.ends):
            del numbers[num_words:]

    def piece(self, first: int, last: int) -> str:
        """The text of words [first, last]."""
        return self.text[self.starts[first] : self.ends[last]]

    def addresses(self, first: int = 0) -> tuple[int, int]:
        """Of ids and kinds, from word `first` on; valid until words are appended."""
        ids, kinds = self.ids.buffer_info()[0], self.kinds.buffer_info()[0]
        return ids + first * self.ids.itemsize, kinds + first


def _kind(word: str) -> int:
    """As in native/src/examples.h: number, name, word, mark."""
    if word[0].isdigit():
        return 0
    if not word[0].isalpha():
        return 3
    return 1 if word[0].isupper() else 2


class _Part(ctypes.Structure):
    _fields_ = [("example", ctypes.c_int32), ("first", ctypes.c_int32), ("last", ctypes.c_int32)]


class _Found(ctypes.Structure):
    """`Guess` of native/src/analogy.cpp."""

    _fields_ = [
        ("number", ctypes.c_int64),
        ("score", ctypes.c_float),
        ("begin", ctypes.c_int32),
        ("num_parts", ctypes.c_int32),
        ("num_next_parts", ctypes.c_int32),
        ("parts", _Part * _MAX_PARTS),
    ]
