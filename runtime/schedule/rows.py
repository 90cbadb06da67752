"""Converts a request's part of a step to a row of the plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...constrained.matcher import Mask
from ...constrained.serving.grammar_state import GrammarState
from .plan import PageUpdate, Row
from .request import Request, Scoring

PLACEHOLDER = (0,)


def row_of(
    request: Request, num_tokens: int, masked: list[GrammarState], from_previous: int | None = None
) -> Row:
    """The row of the next `num_tokens` tokens. Appends to `masked` if it samples under a grammar.
    `from_previous`: the row of the previous plan that samples the one token."""
    token_ids, pages = request.token_ids, request.pages
    start = request.num_scheduled_tokens
    end = start + num_tokens
    update = None
    first = request.num_sent_pages
    if first < len(pages):
        update = PageUpdate(first, tuple(pages[first:]))
        request.num_sent_pages = len(pages)
    sampling, pooled_from = None, None
    targets: tuple[int, ...] = ()
    target_start = 0
    if request.scoring is not None:
        targets, target_start = _targets(request, request.scoring, start, end)
    elif request.hidden is not None:
        pooled_from = request.hidden.first_wanted(start, end, len(token_ids))
    elif end == len(token_ids) or from_previous is not None:
        sampling = request.sampling
    mask = None
    if sampling is not None and request.follower is not None:
        mask = len(masked)
        masked.append(request.follower)
    return Row(
        request.id,
        request.table_row,
        start,
        tuple(token_ids[start:end]) if from_previous is None else PLACEHOLDER,
        update,
        from_previous,
        sampling,
        None if sampling is None else request.adjustment_after(from_previous is not None),
        targets,
        target_start,
        mask,
        pooled_from,
        0 if request.scoring is None else request.scoring.num_top,
        request.adapter_slot,
    )


def masks_of(followers: Sequence[GrammarState], num_words: int) -> Mask | None:
    """A row of `num_words` words for each of them."""
    if not followers:
        return None
    masks = np.zeros((len(followers), num_words), dtype=np.uint32)
    for follower, mask in zip(followers, masks):
        follower.mask(mask)
    return masks


def _targets(
    request: Request, scoring: Scoring, start: int, end: int
) -> tuple[tuple[int, ...], int]:
    """The scored targets within the inputs [start, end), and where the first one is."""
    first = max(start, scoring.start + len(request.scores))  # scores from before a preemption
    last = min(end, scoring.start + len(scoring.targets))
    wanted: Sequence[int] = scoring.targets[first - scoring.start : last - scoring.start]
    return (tuple(wanted), first - start) if last > first else ((), 0)
