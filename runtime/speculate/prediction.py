"""Drafts from a text that the caller expects: an edited file, a form filled in again.

The output is followed along the prediction. Where it leaves it, it is found again by its last two
tokens, ahead of where it was first, so that insertions and deletions cost a few tokens each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from .drafter import NO_DRAFT, Draft, Subject

NAME = "prediction"
REACH = 1 << 16  # tokens in which the place is looked for: two passes of numpy over 256 KB
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
        """`prediction`, of type 'i', is not changed."""
        self._prediction = prediction
        self._ids = np.frombuffer(prediction, np.int32)
        self._at: int | None = 0
        self._left_at = 0  # where the output was in it last
        self._last: int | None = None  # the output's last token
        self._num_right, self._num_seen = _PRIOR * _MEMORY / 4, _MEMORY / 4

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self._at, self._left_at = self._after(token_id, self._at, self._left_at, self._last)
            self._last = token_id

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        at, left_at, last = self._at, self._left_at, self._last
        for token_id in tail:
            at, left_at = self._after(token_id, at, left_at, last)
            last = token_id
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
        self, token_id: int, at: int | None, left_at: int, last: int | None
    ) -> tuple[int | None, int]:
        """Where the prediction goes on behind one more token, and where the output was last."""
        prediction = self._prediction
        if at is not None and at < len(prediction) and prediction[at] == token_id:
            return at + 1, at + 1
        if last is None:
            return None, left_at
        found = self._behind(last, token_id, left_at)
        if found is None and left_at:
            found = self._behind(last, token_id, 0)
        return (None, left_at) if found is None else (found, found)

    def _behind(self, first: int, second: int, start: int) -> int | None:
        """The place behind the first such pair that begins at `start` or within reach of it."""
        ids = self._ids[start : start + REACH + 1]
        found = np.flatnonzero((ids[:-1] == first) & (ids[1:] == second))
        return start + int(found[0]) + 2 if len(found) else None
