"""A step while it is planned: each request's share as a row, then all of them as a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...constrained.matcher import Mask
from ...constrained.serving.follower import Follower
from ..memory.copies import TierCopy
from .cache.kv_cache import KVCacheManager
from .cache.prefix_cache import PendingCopies
from .cache.tiers import InsertedPrefix
from .in_flight import InFlightStep
from .plan import PageUpdate, Row, StepPlan
from .request import Request, Scoring
from .tree_order import depth_first, shared_segments

PLACEHOLDER = (0,)


class StepDraft:
    """Owns the rows of the step that is being planned, in the order in which its tokens were shared
    out, with what they have published."""

    def __init__(
        self, kv_cache: KVCacheManager, segment_cost_tokens: int, num_mask_words: int
    ) -> None:
        """`segment_cost_tokens`: see `shared_segments`."""
        self._kv_cache = kv_cache
        self._segment_cost_tokens = segment_cost_tokens
        self._num_mask_words = num_mask_words
        self.rows: list[Row] = []
        self._requests: list[Request] = []
        self._publications: list[InsertedPrefix | None] = []
        self._masked: list[Follower] = []

    def fill(self, shares: Iterable[tuple[Request, int]], continued: Mapping[Request, int]) -> None:
        """Make a row of each request's share, and publish prompts before the next is asked for.
        `continued`: see `InFlightStep`."""
        rows, requests, publications = self.rows, self._requests, self._publications
        publish, masked = self._kv_cache.publish, self._masked
        for request, num_tokens in shares:
            rows.append(_row_of(request, num_tokens, masked, continued.get(request)))
            requests.append(request)
            # What was generated enters the tree with its whole run, when the request ends.
            is_output = request.num_scheduled_tokens >= len(request.prompt)
            end = request.num_scheduled_tokens + num_tokens
            publications.append(None if is_output else publish(request, end))
            request.num_scheduled_tokens = end

    def finish(
        self, step_id: int, transfers: tuple[TierCopy, ...], unsettled: PendingCopies
    ) -> InFlightStep:
        """The plan, its rows in depth-first order of the tree, with what they share and their
        masks."""
        order, paths = depth_first(self._requests)
        page_size = self._kv_cache.page_size
        rows = [self.rows[index] for index in order]
        segments = shared_segments(
            paths, [row.start for row in rows], page_size, self._segment_cost_tokens
        )
        masks = _masks_of(self._masked, self._num_mask_words)
        return InFlightStep(
            StepPlan(step_id, tuple(rows), segments, masks, transfers),
            tuple([self._requests[index] for index in order]),
            tuple([self._publications[index] for index in order]),
            unsettled,
        )


def _row_of(
    request: Request, num_tokens: int, masked: list[Follower], from_previous: int | None = None
) -> Row:
    """The row of the next `num_tokens` tokens. Appends to `masked` if it samples under a grammar.
    `from_previous`: the row of the previous plan that samples the one token."""
    token_ids, pages = request.token_ids, request.pages
    start = request.num_scheduled_tokens
    end = start + num_tokens
    update = None
    first = request.num_sent_pages
    if first < len(pages):
        update = PageUpdate(first, pages[first:])
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


def _masks_of(followers: Sequence[Follower], num_words: int) -> Mask | None:
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
