"""Drafts from a text that the caller expects: an edited file, a form filled in again.

The output is followed along the prediction. Where it leaves it, it is found again by its last few
tokens, ahead of where it was first, so that insertions and deletions cost a few tokens each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .drafter import NO_DRAFT, Draft, Subject

NAME = "prediction"
_NUM_ANCHOR_TOKENS = 2  # that find the place again
_PRIOR = 0.9  # confidence in the first tokens, and its weight in drafts
_MEMORY = 24.0  # tokens that the share of right ones remembers


class PredictionDrafter:
    """Keeps nothing of ended requests."""

    def open(self, subject: Subject) -> PredictedText | None:
        return PredictedText(subject.prediction) if len(subject.prediction) else None


class PredictedText:
    """One output along its prediction. Invariant: `_at` is where the prediction goes on, or None
    while the output is not in it."""

    def __init__(self, prediction: array[int]) -> None:
        self._prediction = prediction
        self._data = prediction.tobytes()
        self._at: int | None = 0
        self._left_at = 0  # where the output was in it last
        self._recent: list[int] = []
        self._num_right, self._num_seen = _PRIOR * _MEMORY / 4, _MEMORY / 4

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self._at, self._left_at = self._after(token_id, self._at, self._left_at, self._recent)
            self._recent = [*self._recent, token_id][1 - _NUM_ANCHOR_TOKENS :]

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        at, left_at, recent = self._at, self._left_at, self._recent
        for token_id in tail:
            at, left_at = self._after(token_id, at, left_at, recent)
            recent = [*recent, token_id][1 - _NUM_ANCHOR_TOKENS :]
        if at is None:
            return NO_DRAFT
        tokens = tuple(self._prediction[at : at + room])
        return Draft(tokens, (self._num_right / self._num_seen,) * len(tokens), NAME)

    def note(self, draft: Draft, num_accepted: int) -> None:
        num_seen = num_accepted + (num_accepted < len(draft.tokens))
        fade = max(0.0, 1.0 - num_seen / _MEMORY)
        self._num_right = fade * self._num_right + num_accepted
        self._num_seen = fade * self._num_seen + num_seen

    def close(self) -> None:
        pass

    def _after(
        self, token_id: int, at: int | None, left_at: int, recent: Sequence[int]
    ) -> tuple[int | None, int]:
        """Where the prediction goes on behind one more token, and where the output was last."""
        prediction = self._prediction
        if at is not None and at < len(prediction) and prediction[at] == token_id:
            return at + 1, at + 1
        anchor = array("i", [*recent, token_id])
        if len(anchor) < _NUM_ANCHOR_TOKENS:
            return None, left_at
        found = self._end_of(anchor, left_at)
        if found is None and left_at:
            found = self._end_of(anchor, 0)
        return (None, left_at) if found is None else (found, found)

    def _end_of(self, part: array[int], start: int) -> int | None:
        """The end of the first occurrence that begins at `start` or later."""
        size, wanted = part.itemsize, part.tobytes()
        at = self._data.find(wanted, start * size)
        while at >= 0 and at % size:
            at = self._data.find(wanted, at + 1)
        return None if at < 0 else at // size + len(part)
