"""What a gen will probably say, told to its client before it is known.

A client that can make a call of a tool early (`frontend/client/early_calls.py`) does so on this. No
output depends on it: the client makes use of an early call only where the true one is equal to it.
The idea: PASTE, arXiv 2603.18897; there patterns of whole calls are learnt, here the text is
guessed, so that nothing has to be said of tools.

The guess is the suffix drafter's (`../speculate/suffix.py`), over outputs that foretold gens have
had: after the same prompt, or the same few tokens, the same follows. An output's end is a token
like any other (END), so it is known from where on a guess is whole. Its chance is the product of
the drafter's confidences, which are learnt from what became of guesses; from MIN_CHANCE on it is
told. The drafter is asked at each eighth token, and where a guess turned out wrong; under load, as
of work ahead, no output is followed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..schedule.draft_tree import num_same
from ..schedule.queue.working_set import MAX_LOAD
from ..schedule.request import Request
from ..speculate.drafter import NO_DRAFT, Draft
from ..speculate.suffix import MAX_DRAFT, Place, SuffixDrafter, SuffixText
from ..tokenizer.detokenizer import Detokenizer
from ..tokenizer.tokenizer import Tokenizer

# Of an output that is told; of 23 early calls on these 23 were right (docs/how-it-works/ahead.md).
MIN_CHANCE = 0.25
MAX_TOLD = 4  # outputs told of one gen: each may be a call
MAX_BYTES = 16 << 20  # of outputs: some 700,000 tokens
END = -(1 << 30)  # behind an output's last token; ids of images are negative, too, but small
_NUM_FOLLOWED = 8  # tokens after which a guess is made anew, with what they say (guess)
_WINDOW = 8  # tokens decoded with what follows, so that characters across tokens are whole

OnLikely = Callable[[str, float], None]
"""(text, chance): the whole output as it probably will be, without a stop string."""


class Foreteller:
    """Owns the outputs from which those of later gens are told, each account's for itself."""

    def __init__(self, load: Callable[[], float] = lambda: 0.0) -> None:
        """`load`: of the device, see `StepCosts.load`. Raises BuildError where there is no
        compiler."""
        self._load = load
        self._drafter = SuffixDrafter(MAX_BYTES)
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
        return Foretelling(self, text, output, tokenizer, stop, on_likely)

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        names = ("num_gens", "num_told", "num_right", "num_wrong")
        return {name: getattr(self, name) for name in names}


class Foretelling:
    """One output. Invariant: `_draft` was made behind the first `_num_followed` tokens, which the
    drafter knows; those since then, where it has any, are as it says."""

    def __init__(
        self,
        foreteller: Foreteller,
        text: SuffixText,
        output: Detokenizer,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        on_likely: OnLikely,
    ) -> None:
        self._foreteller = foreteller
        self._text = text
        self._output = output
        self._tokenizer = tokenizer
        self._stop = stop
        self._on_likely = on_likely
        self._ids = array("i")
        self._num_followed = 0
        self._draft: Draft = NO_DRAFT
        self._told: list[str] = []
        self._guess()

    def extend(self, token_id: int) -> None:
        """A token was drawn or forced."""
        place = len(self._ids) - self._num_followed
        self._ids.append(token_id)
        tokens = self._draft.tokens
        is_right = place < len(tokens) and tokens[place] == token_id
        if place + 1 < _NUM_FOLLOWED and (is_right or not tokens):
            return
        self._follow()
        self._guess()

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
        likely = self._cut(self._output.text, draft.tokens[:end])
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
