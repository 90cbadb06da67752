"""A step while it is planned: each request's share as a row, then all of them as a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...constrained.matcher import Mask
from ...constrained.serving.follower import Follower
from ...radix.checkpoints import Checkpoint
from ..memory.copies import TierCopy
from .cache.kv_cache import KVCacheManager
from .cache.prefix_cache import PendingCopies
from .cache.state_cache import NO_COPIES
from .cache.tiers import InsertedPrefix
from .guess import Verified
from .image_rows import image_parts
from .in_flight import InFlightStep
from .plan import Branch, EncodeSlice, PageUpdate, Row, Selection, StepPlan, StreamedKV
from .request import Request, Scoring
from .speculation import Speculation
from .tree_order import TreeOrder

PLACEHOLDER = (0,)


class StepDraft:
    """Owns the rows of the step that is being planned, in the order in which its tokens were shared
    out, with what they have published."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        tree_order: TreeOrder,
        segment_cost_tokens: int,
        num_mask_words: int,
    ) -> None:
        """`segment_cost_tokens`: see `TreeOrder.segments`."""
        self._kv_cache = kv_cache
        self._tree_order = tree_order
        self._segment_cost_tokens = segment_cost_tokens
        self._num_mask_words = num_mask_words
        self.rows: list[Row] = []
        self._requests: list[Request] = []
        self._publications: list[InsertedPrefix | None] = []
        self._checkpoints: list[Checkpoint | None] = []  # one a row, where the model has a state
        self._masked: list[Follower | Mask] = []  # a follower's own next mask, or one ahead of it

    def fill(self, shares: Iterable[tuple[Request, int]], continued: Mapping[Request, int]) -> None:
        """Make a row of each request's share, and publish prompts before the next is asked for.
        `continued`: see `InFlightStep`."""
        rows, requests, publications = self.rows, self._requests, self._publications
        publish, masked = self._kv_cache.publish, self._masked
        states = self._kv_cache.states
        for request, num_tokens in shares:
            rows.append(_row_of(request, num_tokens, masked, continued.get(request)))
            requests.append(request)
            # What was generated enters the tree with its whole run, when the request ends.
            is_output = request.num_scheduled_tokens >= len(request.prompt)
            end = request.num_scheduled_tokens + num_tokens
            publications.append(None if is_output else publish(request, end))
            if states is not None:
                self._checkpoints.append(states.save(request, end))
            request.num_scheduled_tokens = end

    def add_drafts(self, speculation: Speculation, token_budget: int) -> None:
        """Append guesses of what follows to rows that sample, where they pay."""
        rows = self.rows
        num_tokens = sum(len(row.input_ids) for row in rows)
        drafting = [
            index
            for index, (row, request) in enumerate(zip(rows, self._requests, strict=True))
            if row.sampling is not None
            and row.from_previous is None
            and request.num_new_tokens > 1
            and request.beam is None  # whose next tokens are several
        ]
        if not drafting:
            return
        requests = [self._requests[index] for index in drafting]
        for place, verified in speculation.choose(requests, num_tokens, token_budget - num_tokens):
            request, row = requests[place], rows[drafting[place]]
            end = row.start + len(row.input_ids) + verified.depth + verified.num_branch_tokens
            if self._kv_cache.reserve_for_drafts(request, end):
                rows[drafting[place]] = self._with_drafts(row, request, verified)
            else:
                speculation.drop(request)

    def guess_ahead(self, speculation: Speculation) -> None:
        """Have the draft model guess what follows the rows that sample, where that pays."""
        asked = [
            index
            for index, (row, request) in enumerate(zip(self.rows, self._requests, strict=True))
            if request.is_followed
            and row.sampling is not None
            and request.beam is None
            and request.num_new_tokens - _depth(row) > 2
        ]
        if not asked:
            return
        wanted = speculation.num_ahead([self._requests[index] for index in asked])
        num_beside = speculation.num_beside() if any(wanted) else 0
        for index, num_ahead in zip(asked, wanted, strict=True):
            row, request = self.rows[index], self._requests[index]
            depth = _depth(row)
            num_ahead = min(num_ahead, request.num_new_tokens - depth - 2)
            end = row.known_end + depth + num_ahead
            num_candidates = num_beside if self._may_branch(request) else 0
            num_expanded = num_ahead - 1 if num_candidates else 0
            if num_ahead and self._kv_cache.reserve_for_drafts(request, end + num_expanded):
                self.rows[index] = row._replace(
                    num_ahead=num_ahead,
                    num_beside=num_candidates,
                    expand_at=end if num_expanded else 0,
                    page_update=_new_pages(request, row.page_update),
                )

    def _may_branch(self, request: Request) -> bool:
        """A branch needs pages of its own from its first token on; a recurrent state goes on behind
        one path."""
        is_plain = self._kv_cache.states is None and not request.images
        return is_plain and self._kv_cache.page_size == 1

    def _with_drafts(self, row: Row, request: Request, verified: Verified) -> Row:
        last = len(row.input_ids) - 1
        mask = row.mask
        if mask is not None:  # they stand side by side, behind all others
            own = self._masked[mask]
            self._masked[mask] = np.zeros(self._num_mask_words, np.uint32)  # no row has it now
            mask = len(self._masked)
            self._masked += [own, *verified.masks]
        return row._replace(
            input_ids=(*row.input_ids, *verified.tokens),
            page_update=_new_pages(request, row.page_update),
            adjustments=request.adjustments_behind(verified.tokens, verified.draws),
            mask=mask,
            sampled_at=tuple([last + draw for draw in verified.draws]),
            num_drafts=len(verified.tokens),
            branches=tuple(self._branches(row, request, verified)),
        )

    def _branches(self, row: Row, request: Request, verified: Verified) -> Iterator[Branch]:
        num_known = len(row.input_ids)
        page_at = row.start + num_known + verified.depth
        for branch in verified.branches:
            path, num_tokens = branch.path, len(branch.sides)
            mask = None
            if row.mask is not None:
                mask = len(self._masked)
                self._masked += branch.masks
            yield Branch(
                num_known + branch.behind,
                path[-num_tokens:],
                page_at,
                tuple(range(num_tokens)),
                request.adjustments_behind(path, range(len(path) - num_tokens + 1, len(path) + 1)),
                mask,
            )
            page_at += num_tokens

    def finish(
        self,
        step_id: int,
        transfers: tuple[TierCopy, ...],
        unsettled: PendingCopies,
        dropped_images: tuple[int, ...] = (),
        encodes: tuple[EncodeSlice, ...] = (),
    ) -> InFlightStep:
        """The plan, its rows in depth-first order of the tree, with what they share and their
        masks."""
        order = self._tree_order.depth_first(self._requests)
        rows = [self.rows[index] for index in order]
        requests = tuple([self._requests[index] for index in order])
        starts = [row.start for row in rows]
        segments = self._tree_order.segments(starts, self._segment_cost_tokens)
        masks = _masks_of(self._masked, self._num_mask_words)
        streams = _streams(requests, rows, self._kv_cache.page_size)
        states = self._kv_cache.states
        accepts, loads, saves, written = NO_COPIES if states is None else states.take_copies()
        return InFlightStep(
            StepPlan(
                step_id,
                tuple(rows),
                segments,
                masks,
                transfers,
                accepts,
                loads,
                saves,
                dropped_images,
                encodes,
                streams,
            ),
            requests,
            tuple([self._publications[index] for index in order]),
            unsettled,
            checkpoints=() if states is None else tuple([self._checkpoints[i] for i in order]),
            written=written,
        )


def _depth(row: Row) -> int:
    """How many drafts may turn out right."""
    if not row.branches:
        return row.num_drafts
    return row.branches[0].page_at - row.known_end


def _row_of(
    request: Request,
    num_tokens: int,
    masked: list[Follower | Mask],
    from_previous: int | None = None,
) -> Row:
    """The row of the next `num_tokens` tokens. Appends to `masked` if it samples under a grammar.
    `from_previous`: the row of the previous plan that samples the one token."""
    token_ids = request.token_ids
    start = request.num_scheduled_tokens
    end = start + num_tokens
    update = _new_pages(request)
    sampling, pooled_from = None, None
    targets: tuple[int, ...] = ()
    target_start = 0
    if request.scoring is not None:
        targets, target_start = _targets(request, request.scoring, start, end)
    elif request.hidden is not None:
        pooled_from = request.hidden.first_wanted(start, end, len(token_ids))
    elif request.encoding is None and (end == len(token_ids) or from_previous is not None):
        sampling = request.sampling
    shift, images = image_parts(request.images, start, end) if request.images else (0, ())
    mask, adjustment = None, None
    if sampling is not None:
        adjustment = request.adjustment_after(from_previous is not None)
        if request.follower is not None:
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
        () if adjustment is None else (adjustment,),
        targets,
        target_start,
        mask,
        pooled_from,
        0 if request.scoring is None else request.scoring.num_top,
        request.adapter_slot,
        num_best=0 if request.beam is None else request.beam.num_best,
        state_slot=request.state_slot,
        kv_start=request.num_published,
        encoding=request.encoding,
        rope_shift=shift + request.rope_shift,
        num_dropped=request.num_dropped,
        images=images,
        is_output=start >= len(request.prompt),
        is_followed=request.is_followed,
        selection=_selection_of(request, end),
    )


def _selection_of(request: Request, end: int) -> Selection | None:
    """What the row that ends there is to keep of the request's KV, or to observe for that."""
    compaction = request.compaction
    if compaction is None:
        return None
    prefix = compaction.prefix
    if end == len(prefix.source):
        return Selection(prefix.policy, compaction.pages, prefix.candidates)
    return Selection(prefix.policy) if prefix.policy.kind == "h2o" else None


def _new_pages(request: Request, told: PageUpdate | None = None) -> PageUpdate | None:
    """The pages that the executor does not know yet, those of `told` included; it does now."""
    first, pages = request.num_sent_pages if told is None else told.first, request.pages
    if first >= len(pages):
        return None
    request.num_sent_pages = len(pages)
    return PageUpdate(first, pages[first:])


def _streams(
    requests: Sequence[Request], rows: Sequence[Row], page_size: int
) -> tuple[StreamedKV, ...]:
    """What other engines have asked for of these rows' KV."""
    taken = [
        request.stream.take(row.known_end, request.pages, page_size)
        for request, row in zip(requests, rows, strict=True)
        if request.stream is not None
    ]
    return tuple([each for each in taken if each is not None])


def _masks_of(masked: Sequence[Follower | Mask], num_words: int) -> Mask | None:
    """A row of `num_words` words for each of them."""
    if not masked:
        return None
    masks = np.zeros((len(masked), num_words), dtype=np.uint32)
    for source, mask in zip(masked, masks):
        if isinstance(source, np.ndarray):
            mask[:] = source
        else:
            source.mask(mask)
    return masks


def _targets(
    request: Request, scoring: Scoring, start: int, end: int
) -> tuple[tuple[int, ...], int]:
    """The scored targets within the inputs [start, end), and where the first one is."""
    first = max(start, scoring.start + len(request.scores))  # scores from before a preemption
    last = min(end, scoring.start + len(scoring.targets))
    wanted: Sequence[int] = scoring.targets[first - scoring.start : last - scoring.start]
    return (tuple(wanted), first - start) if last > first else ((), 0)
