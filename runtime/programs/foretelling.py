"""What a gen will probably say, told to its client before it is known.

A client that can make a call of a tool early (`frontend/client/early_calls.py`) does so on this. No
output depends on it: the client makes use of an early call only where the true one is equal to it.
The idea: PASTE, arXiv 2603.18897; there patterns of whole calls are learnt, here the text is
guessed, so that nothing has to be said of tools.

The guess is the suffix drafter's (`../speculate/suffix.py`), over outputs that foretold gens have
had: after the same prompt, or the same few tokens, the same follows. An output's end is a token
like any other (END), so it is known from where on a guess is whole. Its chance is the product of
the drafter's confidences, which are learnt from what became of guesses; from MIN_CHANCE on it is
told. Cost: 1.4 us a token, and some 6 us for each eighth one or where a guess turned out wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..schedule.request import Request
from ..speculate.drafter import NO_DRAFT, Draft
from ..speculate.suffix import MAX_DRAFT, Place, SuffixDrafter, SuffixText
from ..tokenizer.tokenizer import Tokenizer

MIN_CHANCE = (
    0.25  # of an output that is told; of 23 early calls on these 23 were right, see the docs
)
MAX_TOLD = 4  # outputs told of one gen: each may be a call
MAX_BYTES = 16 << 20  # of outputs: some 700,000 tokens
END = -(1 << 30)  # behind an output's last token; ids of images are negative, too, but small
_NUM_FOLLOWED = 8  # right tokens after which a guess is made anew, with what they say (guess)
_WINDOW = 8  # tokens decoded with what follows, so that characters across tokens are whole

OnLikely = Callable[[str, float], None]
"""(text, chance): the whole output as it probably will be, without a stop string."""


class Foreteller:
    """Owns the outputs from which those of later gens are told, each account's for itself."""

    def __init__(self) -> None:
        """Raises BuildError where there is no compiler."""
        self._drafter = SuffixDrafter(MAX_BYTES)
        self.num_gens = 0  # that were followed to their end
        self.num_told = 0  # outputs that were told
        self.num_right = 0  # gens of which what was told last came true
        self.num_wrong = 0  # gens of which what was told last did not

    def open(
        self, request: Request, tokenizer: Tokenizer, stop: Sequence[str], on_likely: OnLikely
    ) -> Foretelling:
        """Follow a gen's output; what it will say may be told at once."""
        place = Place(request.history, request.program_key, request.op_key)
        text = self._drafter.open_at(place, request.prompt)
        return Foretelling(self, text, tokenizer, stop, on_likely)

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        names = ("num_gens", "num_told", "num_right", "num_wrong")
        return {name: getattr(self, name) for name in names}


class Foretelling:
    """One output. Invariant: of `_draft`, which was made behind the first tokens, the next
    `_num_right` were drawn since."""

    def __init__(
        self,
        foreteller: Foreteller,
        text: SuffixText,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        on_likely: OnLikely,
    ) -> None:
        self._foreteller = foreteller
        self._text = text
        self._tokenizer = tokenizer
        self._stop = stop
        self._on_likely = on_likely
        self._ids = array("i")
        self._draft: Draft = NO_DRAFT
        self._num_right = 0
        self._told: list[str] = []
        self._guess("")

    def extend(self, token_id: int, text: str) -> None:
        """A token was drawn or forced; `text`: all that is known of the output."""
        self._ids.append(token_id)
        self._take(token_id)
        self._guess(text)

    def end(self, text: str | None) -> None:
        """The output is over, and this is it; None: it was cut short, and says nothing."""
        if text is not None:
            self._take(END)
            self._foreteller.num_gens += 1
            if self._told:
                is_right = self._told[-1] == text
                self._foreteller.num_right += is_right
                self._foreteller.num_wrong += not is_right
        self._text.close()

    def _take(self, token_id: int) -> None:
        self._text.extend((token_id,))
        draft, place = self._draft, self._num_right
        if not draft.tokens:
            return
        is_right = draft.tokens[place] == token_id
        self._num_right += is_right
        is_over = self._num_right == len(draft.tokens) or token_id == END
        if not is_right or is_over or self._num_right >= _NUM_FOLLOWED:
            self._text.note(draft.first(place + 1), self._num_right)
            self._draft = NO_DRAFT

    def _guess(self, text: str) -> None:
        if not self._draft.tokens:
            self._draft, self._num_right = self._text.propose(MAX_DRAFT), 0
        left, sure = self._draft.tokens[self._num_right :], self._draft.confidences
        if END not in left or len(self._told) >= MAX_TOLD:
            return
        end = left.index(END)
        chance = prod(sure[self._num_right : self._num_right + end + 1])
        if chance < MIN_CHANCE:
            return
        likely = self._cut(text, left[:end])
        if not self._told or likely != self._told[-1]:
            self._told.append(likely)
            self._foreteller.num_told += 1
            self._on_likely(likely, chance)

    def _cut(self, text: str, ids: Sequence[int]) -> str:
        """The text with that of these tokens, up to a stop string."""
        decode, before = self._tokenizer.decode, self._ids[-_WINDOW:].tolist()
        whole = text + decode([*before, *ids])[len(decode(before)) :]
        longest = max(map(len, self._stop), default=0)
        ends = [whole.find(stop, max(0, len(text) - longest)) for stop in self._stop]
        return whole[: min((end for end in ends if end >= 0), default=len(whole))]
