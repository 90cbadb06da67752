"""What a gen will probably say, told to its client before it is known.

A client that can make a call of a tool early (`frontend/client/early_calls.py`) does so on this. No
output depends on it: the client makes use of an early call only where the true one is equal to it.
The idea: PASTE, arXiv 2603.18897; there patterns of whole calls are learnt, here the text is
guessed, so that nothing has to be said of tools.

Two guess, from outputs that foretold gens have had; who is surer is told. The suffix drafter
(`../speculate/suffix.py`): after the same prompt, or the same few tokens, the same follows. An
output's end is a token like any other (END), so it is known from where on a guess is whole. Its
chance is the product of the drafter's confidences, which are learnt from what became of guesses. It
is asked at each eighth token, and where a guess turned out wrong. Analogies (`analogies.py`): what
was said of other things is said of these. They are asked at each word until something is told, and
again where that turned out wrong; they tell of the next output, too, also at this one's end.

Under load, as of work ahead, no output is followed. Analogies take a bounded share of all time, in
which what they take counts once for each request that runs: the engine's loop waits for them, and
with it all of these. While none of it is left gens have none, and are no examples.
"""

from __future__ import annotations

import re
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from ..schedule.draft_tree import num_same
from ..schedule.queue.working_set import MAX_LOAD
from ..schedule.request import Request
from ..speculate.drafter import NO_DRAFT, Draft
from ..speculate.suffix import MAX_DRAFT, Place, SuffixDrafter, SuffixText
from ..tokenizer.detokenizer import Detokenizer
from ..tokenizer.tokenizer import Tokenizer
from .analogies import Analogies, Analogy, Guess, num_settled
from .time_credit import TimeCredit

# Of an output that is told; of 23 early calls on these 23 were right (docs/how-it-works/ahead.md).
MIN_CHANCE = 0.25
MIN_ANALOGY_CHANCE = 0.7  # of what is told by analogy: the same page says what others bring
MAX_TOLD = 4  # outputs told of one gen: each may be a call
MAX_TOLD_NEXT = 2  # and of the next one
MAX_BYTES = 16 << 20  # of outputs: some 700,000 tokens
END = -(1 << 30)  # behind an output's last token; ids of images are negative, too, but small
ANALOGY_SHARE = 0.05  # of all time; one agent's gens take a third of that
ANALOGY_BURST_S = 0.1  # at once: some 200 questions
_NUM_FOLLOWED = 8  # tokens after which a guess is made anew, with what they say (guess)
_WINDOW = 8  # tokens decoded with what follows, so that characters across tokens are whole
_MAX_PROMPT = 256  # tokens of a prompt's end that analogies see
_MAX_BETWEEN = 1024  # tokens behind a gen after which the next one is none that follows it
_MAX_PROGRAMS = 256  # whose last gens are known
_MAX_ENDED = 4  # of these, for each: branches take turns
_TAIL = 16  # tokens by which a prompt is known again

OnLikely = Callable[[str, float], None]
"""(text, chance): the whole output as it probably will be, without a stop string."""


class Foreteller:
    """Owns the outputs from which those of later gens are told, each account's for itself."""

    def __init__(
        self,
        load: Callable[[], float] = lambda: 0.0,
        num_running: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`load`: of the device, see `StepCosts.load`; `num_running`: requests that wait for the
        engine's loop. Raises BuildError where there is no compiler."""
        self._load = load
        self._num_running = num_running
        self._clock = clock
        self._credit = TimeCredit(ANALOGY_SHARE, ANALOGY_BURST_S, clock)
        self._drafter = SuffixDrafter(MAX_BYTES)
        self._analogies = Analogies()
        self._ended: OrderedDict[Hashable, deque[_End]] = OrderedDict()  # by program
        self.num_gens = 0  # that were followed to their end
        self.num_told = 0  # outputs that were told
        self.num_right = 0  # gens of which what was told last came true
        self.num_wrong = 0  # gens of which what was told last did not

    def open(
        self,
        request: Request,
        output: Detokenizer,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        on_likely: OnLikely,
    ) -> Foretelling | None:
        """Follow a gen's output, whose text is `output`'s; what it will say may be told at once.
        None under load: the device is what programs wait for then, not their tools."""
        if self._load() >= MAX_LOAD:
            return None
        place = Place(request.history, request.program_key, request.op_key)
        text = self._drafter.open_at(place, request.prompt)
        analogy = None
        if self.may_ask:
            with self.asking():
                analogy = self._open_analogy(request, tokenizer)
        begun = _Begun(_program(request), len(request.prompt), request.prompt[-_TAIL:])
        followed = _Followed(begun, output, tokenizer, stop, on_likely)
        return Foretelling(self, followed, text, analogy)

    @property
    def may_ask(self) -> bool:
        """Whether there is time for analogies."""
        return self._credit.is_left

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What the block takes counts as theirs."""
        began_s = self._clock()
        yield
        self._credit.spend((self._clock() - began_s) * max(1, self._num_running()))

    def note_end(self, begun: _Begun, analogy: Analogy, output: str) -> None:
        """A gen has ended so; the next one of its program may follow it."""
        if begun.program is None:
            return
        ended = self._ended.setdefault(begun.program, deque(maxlen=_MAX_ENDED))
        ended.appendleft((begun, analogy, output))
        self._ended.move_to_end(begun.program)
        if len(self._ended) > _MAX_PROGRAMS:
            self._ended.popitem(last=False)

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        names = ("num_gens", "num_told", "num_right", "num_wrong")
        counts = {name: getattr(self, name) for name in names}
        return {**counts, "num_examples": self._analogies.num_examples}

    def _open_analogy(self, request: Request, tokenizer: Tokenizer) -> Analogy:
        decode = tokenizer.decode_cached
        op = (request.history, _pattern(request.op_key))
        prompt = decode(request.prompt[-_MAX_PROMPT:], skip_special=False)
        for begun, analogy, output in self._ended.get(_program(request), ()):
            if not begun.is_of(request.prompt):
                continue
            behind = decode(request.prompt[begun.num_prompt :], skip_special=False)
            if behind.startswith(output):
                return self._analogies.open(op, prompt, analogy, behind[len(output) :])
        return self._analogies.open(op, prompt)


@dataclass(frozen=True, slots=True)
class _Begun:
    """Where a gen began: in which program, behind how many tokens, and the last of these."""

    program: Hashable
    num_prompt: int
    tail: array[int]

    def is_of(self, prompt: array[int]) -> bool:
        """Whether a prompt begins, as far as is known, with this one, and ends not far behind."""
        end = self.num_prompt
        is_near = 0 < len(prompt) - end <= _MAX_BETWEEN
        return is_near and prompt[max(0, end - _TAIL) : end] == self.tail


@dataclass(frozen=True, slots=True)
class _Followed:
    """A gen whose output is followed; `output` has its text so far."""

    begun: _Begun
    output: Detokenizer
    tokenizer: Tokenizer
    stop: Sequence[str]
    on_likely: OnLikely


_End = tuple[_Begun, Analogy, str]  # of a gen that has said this


def _program(request: Request) -> Hashable:
    """None: not known."""
    key = request.program_key
    return None if key is None else (request.history, key)


def _pattern(op: Hashable) -> Hashable:
    """Ops of one source line whose names differ in numbers alone are the turns of a loop."""
    if not isinstance(op, tuple):
        return op
    return tuple(re.sub(r"\d+", "#", part) if isinstance(part, str) else part for part in op)


class Foretelling:
    """One output. Invariant: `_draft` was made behind the first `_num_followed` tokens, which the
    drafter knows; those since then, where it has any, are as it says."""

    def __init__(
        self,
        foreteller: Foreteller,
        followed: _Followed,
        text: SuffixText,
        analogy: Analogy | None,
    ) -> None:
        self._foreteller = foreteller
        self._followed = followed
        self._text = text
        self._analogy = analogy
        self._ids = array("i")
        self._num_followed = 0
        self._draft: Draft = NO_DRAFT
        self._told: list[str] = []
        self._told_next: list[str] = []
        self._chance = 0.0  # of what was told last
        self._num_asked = -1  # characters of whole words of which analogies were asked
        self._guess()
        self._ask_analogies()

    def extend(self, token_id: int) -> None:
        """A token was drawn or forced."""
        place = len(self._ids) - self._num_followed
        self._ids.append(token_id)
        tokens = self._draft.tokens
        is_right = place < len(tokens) and tokens[place] == token_id
        if place + 1 >= _NUM_FOLLOWED or (tokens and not is_right):
            self._follow()
            self._guess()
        self._ask_analogies()

    def end(self, text: str | None) -> None:
        """The output is over, and this is it; None: it was cut short, and says nothing."""
        if text is not None:
            self._ids.append(END)
            self._follow()
            self._foreteller.num_gens += 1
            if self._told:
                is_right = self._told[-1] == text
                self._foreteller.num_right += is_right
                self._foreteller.num_wrong += not is_right
        self._text.close()
        if self._analogy is not None:
            with self._foreteller.asking():
                self._end_analogy(self._analogy, text)

    def _end_analogy(self, analogy: Analogy, text: str | None) -> None:
        if text is not None and self._foreteller.may_ask:
            self._tell_next(analogy.propose_next(text))  # no true call has begun yet
        analogy.end(text)
        if text is not None:
            self._foreteller.note_end(self._followed.begun, analogy, text)

    def _follow(self) -> None:
        """Tell the drafter what came since its last guess, and what of that was right."""
        fresh, draft = self._ids[self._num_followed :], self._draft
        self._num_followed = len(self._ids)
        self._text.extend(fresh)
        if draft.tokens:
            num_right = num_same(draft.tokens, fresh)
            self._text.note(draft.first(num_right + (num_right < len(fresh))), num_right)
        self._draft = NO_DRAFT

    def _guess(self) -> None:
        """Guess what follows, and tell the whole output if that is likely and new."""
        if len(self._told) >= MAX_TOLD:
            return
        self._draft = draft = self._text.propose(MAX_DRAFT)
        if END not in draft.tokens:
            return
        end = draft.tokens.index(END)
        chance = prod(draft.confidences[: end + 1])
        if chance < MIN_CHANCE:
            return
        self._tell(self._cut(self._followed.output.text, draft.tokens[:end]), chance)

    def _ask_analogies(self) -> None:
        """Ask once for each new word, if there is time, and unless what was told may still come
        true: of other guesses then one in ten was right."""
        if self._analogy is None or self._analogy.is_over:
            return
        text = self._followed.output.text
        if self._holds(text):
            return
        num_whole = num_settled(text)
        if num_whole == self._num_asked or not self._foreteller.may_ask:
            return
        self._num_asked = num_whole
        with self._foreteller.asking():
            proposal = self._analogy.propose(text)
        if proposal is not None and proposal.own.chance >= MIN_ANALOGY_CHANCE:
            self._tell(proposal.own.text, proposal.own.chance)
            self._tell_next(proposal.next)

    def _holds(self, output: str) -> bool:
        """Whether what was told last may still come true."""
        return bool(self._told) and self._told[-1].startswith(output)

    def _tell(self, likely: str, chance: float) -> None:
        """Unless what was told last is surer, and may still come true."""
        if self._holds(self._followed.output.text) and chance <= self._chance:
            return
        if self._told and likely == self._told[-1]:
            self._chance = chance
        elif len(self._told) < MAX_TOLD:
            self._chance = chance
            self._told.append(likely)
            self._foreteller.num_told += 1
            self._followed.on_likely(likely, chance)

    def _tell_next(self, guess: Guess | None) -> None:
        if guess is None or guess.chance < MIN_ANALOGY_CHANCE or guess.text in self._told_next:
            return
        if len(self._told_next) < MAX_TOLD_NEXT:
            self._told_next.append(guess.text)
            self._followed.on_likely(guess.text, guess.chance)

    def _cut(self, text: str, ids: Sequence[int]) -> str:
        """The text with that of these tokens, up to a stop string."""
        decode, before = self._followed.tokenizer.decode, self._ids[-_WINDOW:].tolist()
        whole = text + decode([*before, *ids])[len(decode(before)) :]
        longest = max(map(len, self._followed.stop), default=0)
        ends = [whole.find(stop, max(0, len(text) - longest)) for stop in self._followed.stop]
        return whole[: min((end for end in ends if end >= 0), default=len(whole))]
