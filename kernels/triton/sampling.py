"""Samples the next token of each row, in three launches and two passes over the logits.

    survey   each span of a row: its best token, its mass, the maximum of each group of tokens
    narrow   each span: a bound below which no token can be drawn; then the best score, or, if a row
             is truncated, the list of the remaining tokens
    settle   each row: combine the spans, or find the drawn token in the list

The kept set is never built. top-k, top-p and min-p each keep a prefix of the tokens in descending
order of (logit, -id), so a token is kept if few enough tokens with little enough mass precede it.
The token with the best score of all is tried first; if it is not kept, the tokens before it are a
smaller set that contains the kept one, and its best is tried next. The result is exactly the best
score of the kept set, ties included: no order of the tokens and no threshold is needed.

A span has every num_spans-th group of tokens, so that all spans have equal work even if frequent
tokens have neighbouring ids. Every sum has a fixed order, which depends only on the row and the
vocabulary. Passes and bytes: docs/how-it-works/gpu-sampling.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling_rows import SamplingRows
from .language import tl, triton

SPAN = 4096  # tokens of a program of the first two launches; their offsets fit 16 bits
GROUP = 64  # consecutive tokens, whose maximum is stored
SCORED_AT_ONCE = 1024  # tokens of a span whose noise is computed, or skipped, together
LISTED_AT_ONCE = 1024  # tokens of a row's list that are processed together

# Noise is within [-3.13, 22.87], so no token with a scaled logit this far below the best is drawn.
_NOISE_RANGE = tl.constexpr(27.0)
# Margin by which a bound is lowered, in scaled logits, for rounding in its inputs.
_SLACK = tl.constexpr(1e-6)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**31))


def sample(
    logits: Tensor, rows: SamplingRows, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`ops.Sample` of float32 logits [N, vocab_size], contiguous."""
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "contiguous float32 logits"
    num_rows, vocab_size = logits.shape
    num_spans = triton.cdiv(vocab_size, SPAN)
    padded_spans = triton.next_power_of_2(num_spans)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    span_best = empty(num_rows, num_spans, dtype=torch.float32)
    span_token = empty(num_rows, num_spans, dtype=torch.int32)
    span_mass = empty(num_rows, num_spans, dtype=torch.float64)
    group_best = empty(num_rows, num_spans, SPAN // GROUP, dtype=torch.float32)
    span_score = empty(num_rows, num_spans, dtype=torch.float64)
    scored_token = empty(num_rows, num_spans, dtype=torch.int32)
    lowest_key = empty(num_rows, dtype=torch.int32)
    list_size = empty(num_rows, num_spans, dtype=torch.int32)
    listed = empty(num_rows, num_spans, SPAN, dtype=torch.int16)
    if out is None:
        out = empty(num_rows, dtype=torch.int64), empty(num_rows, dtype=torch.bool)
    token_ids, is_finite = out
    _survey[(num_spans, num_rows)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        span_best,
        span_token,
        span_mass,
        group_best,
        vocab_size,
        num_spans,
        SPAN=SPAN,
        GROUP=GROUP,
        num_warps=4,
    )
    _narrow[(num_spans, num_rows)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        span_best,
        span_token,
        span_mass,
        group_best,
        span_score,
        scored_token,
        lowest_key,
        list_size,
        listed,
        vocab_size,
        num_spans,
        PADDED_SPANS=padded_spans,
        SPAN=SPAN,
        GROUPS=SPAN // GROUP,
        SCORED=SCORED_AT_ONCE,
        num_warps=4,
    )
    _settle[(num_rows,)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        span_best,
        span_token,
        span_mass,
        span_score,
        scored_token,
        lowest_key,
        list_size,
        listed,
        token_ids,
        is_finite,
        vocab_size,
        num_spans,
        PADDED_SPANS=padded_spans,
        SPAN=SPAN,
        GROUP=GROUP,
        LISTED=max(1, LISTED_AT_ONCE // padded_spans),
        num_warps=8,
        maxnreg=160,  # without it, 16 bytes are spilled to stay at 128
    )
    return token_ids, is_finite


@triton.jit
def _survey(
    logits,
    temperature,
    top_k,
    top_p,
    span_best,
    span_token,
    span_mass,
    group_best,
    vocab_size,
    num_spans,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a span and row. NaN counts as +inf, so that it shows in a row's best."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = tl.arange(0, SPAN // GROUP)
    tokens = _tokens_of_groups(groups, span, num_spans, GROUP)
    logit = tl.load(
        logits + row * vocab_size + tokens, mask=tokens < vocab_size, other=-float("inf")
    )
    logit = tl.where(logit != logit, float("inf"), logit)
    maxima = tl.max(logit, axis=1)
    best = tl.max(maxima, axis=0)
    place = row * num_spans + span
    tl.store(group_best + place * (SPAN // GROUP) + groups, maxima)
    tl.store(span_best + place, best)
    tl.store(span_token + place, _smallest(tokens, logit == best))
    scale = tl.load(temperature + row)
    has_top_k = _has_top_k(tl.load(top_k + row), vocab_size)
    needs_mass = (scale > 0.0) & (tl.load(top_p + row) < 1.0) & (has_top_k == 0)
    if needs_mass:
        shift = tl.where(tl.abs(best) == float("inf"), 0.0, best).to(tl.float64)
        tl.store(span_mass + place, _sum(tl.exp((logit.to(tl.float64) - shift) / scale)))


@triton.jit
def _narrow(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    span_best,
    span_token,
    span_mass,
    group_best,
    span_score,
    scored_token,
    lowest_key,
    list_size,
    listed,
    vocab_size,
    num_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    SCORED: tl.constexpr,
):
    """One program a span and row."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scale, k = tl.load(temperature + row), tl.load(top_k + row)
    spans = tl.arange(0, PADDED_SPANS)
    bests = tl.load(
        span_best + row * num_spans + spans, mask=spans < num_spans, other=-float("inf")
    )
    best = tl.max(bests, axis=0)
    is_drawn = (scale > 0.0) & (k != 1) & (best > -float("inf")) & (best < float("inf"))
    if is_drawn:
        p, share = tl.load(top_p + row), tl.load(min_p + row)
        has_top_k, has_top_p = _has_top_k(k, vocab_size), p < 1.0
        highest = best.to(tl.float64)
        least = tl.full([], -float("inf"), tl.float64)
        if (has_top_k & has_top_p) == 0:
            # No token below is drawn, and no mass below counts for those above.
            least = tl.maximum(-_NOISE_RANGE * scale, _least_of_min_p(share, scale))
            if has_top_p:
                total = _total_mass(span_mass + row * num_spans, bests, spans, num_spans, scale)
                rest = (1.0 - p) * total / vocab_size
                least = tl.maximum(least, (tl.log(rest) - _SLACK) * scale)
        own = logits + row * vocab_size
        place = row * num_spans + span
        if has_top_k | has_top_p:
            bound = tl.full([], _NO_KEY, tl.int32)
            if has_top_k:
                all_groups = group_best + row * num_spans * GROUPS
                bound = _bound_of_top_k(all_groups, num_spans * GROUPS, k, PADDED_SPANS * GROUPS)
            if span == 0:
                tl.store(lowest_key + row, bound)
            tokens = _tokens_of_groups(tl.arange(0, GROUPS), span, num_spans, SPAN // GROUPS)
            is_token = tokens < vocab_size
            logit = tl.load(own + tokens, mask=is_token, other=-float("inf"))
            is_left = is_token & (_key(logit) >= bound)
            is_left = tl.ravel(is_left & (logit.to(tl.float64) - highest >= least))
            index = tl.cumsum(is_left.to(tl.int32), axis=0)
            offsets = tl.arange(0, SPAN).to(tl.int16)
            tl.store(listed + place * SPAN + index - 1, offsets, mask=is_left)
            tl.store(list_size + place, tl.max(index, axis=0))
        else:
            key, at = tl.load(seed + row), tl.load(position + row)
            best_tokens = tl.load(
                span_token + row * num_spans + spans, mask=spans < num_spans, other=_NO_TOKEN
            )
            # The likeliest token's noise is the bound: other tokens' noise is computed only if a
            # word is high enough for the likeliest of its tile to reach it.
            to_beat = _gumbel(_word(key, at, _smallest(best_tokens, bests == best)))
            to_beat -= _SLACK + 1e-14 * tl.abs(highest) / scale
            top = tl.full([], -float("inf"), tl.float64)
            top_token = tl.full([], 0, tl.int32)
            for start in range(0, SPAN, SCORED):
                offsets = start // 4 + tl.arange(0, SCORED // 4)
                blocks = _tokens_of(offsets, span, num_spans, SPAN // GROUPS // 4)
                tokens = blocks[:, None] * 4 + tl.arange(0, 4)[None, :]
                logit = tl.load(own + tokens, mask=tokens < vocab_size, other=-float("inf"))
                tile_best = tl.max(tl.max(logit, axis=1), axis=0).to(tl.float64)
                if tile_best - highest >= least:
                    words = _four_words(key, at, blocks)
                    needed = to_beat + (highest - tile_best) / scale
                    least_word = tl.exp(-tl.exp(-needed)) * 2.0**32 - 2.0
                    own_words = tl.where(logit > -float("inf"), words, 0)
                    if tl.max(tl.max(own_words, axis=1), axis=0).to(tl.float64) >= least_word:
                        wide = logit.to(tl.float64)
                        is_left = (tokens < vocab_size) & (wide - highest >= least)
                        score = tl.where(is_left, wide / scale + _gumbel(words), -float("inf"))
                        tile_top = tl.max(tl.max(score, axis=1), axis=0)
                        if tile_top > top:
                            top = tile_top
                            top_token = _smallest(tokens, score == tile_top)
            tl.store(span_score + place, top)
            tl.store(scored_token + place, top_token)


@triton.jit
def _settle(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    span_best,
    span_token,
    span_mass,
    span_score,
    scored_token,
    lowest_key,
    list_size,
    listed,
    token_ids,
    is_finite,
    vocab_size,
    num_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One program a row. A tile of its list is a few tokens of each span: [spans, LISTED]."""
    row = tl.program_id(0).to(tl.int64)
    scale, k = tl.load(temperature + row), tl.load(top_k + row)
    spans = tl.arange(0, PADDED_SPANS)
    is_span = spans < num_spans
    of_row = row * num_spans + spans
    bests = tl.load(span_best + of_row, mask=is_span, other=-float("inf"))
    best = tl.max(bests, axis=0)
    token = _smallest(tl.load(span_token + of_row, mask=is_span, other=_NO_TOKEN), bests == best)
    is_good = (best > -float("inf")) & (best < float("inf"))
    tl.store(is_finite + row, is_good)
    if is_good & (scale > 0.0) & (k != 1):
        p, share = tl.load(top_p + row), tl.load(min_p + row)
        has_top_k, has_top_p = _has_top_k(k, vocab_size), p < 1.0
        if has_top_k | has_top_p:
            sizes = tl.load(list_size + of_row, mask=is_span, other=0)
            lists = listed + row * num_spans * SPAN
            own = logits + row * vocab_size
            highest = best.to(tl.float64)
            limit = tl.where(has_top_k, k, vocab_size)
            # If both are set: the logit of the last of the top k, which all of them reach.
            pivot = tl.full([], -float("inf"), tl.float32)
            if has_top_k & has_top_p:
                low = tl.load(lowest_key + row)
                pivot = _kth_best(
                    own, lists, sizes, spans, num_spans, k, low, _key(best), SPAN, GROUP, LISTED
                )
            total = tl.full([], 0.0, tl.float64)
            if has_top_p & (has_top_k == 0):
                total = _total_mass(span_mass + row * num_spans, bests, spans, num_spans, scale)
            least = _least_of_min_p(share, scale)
            key, at = tl.load(seed + row), tl.load(position + row)
            token = tl.full([], _NO_TOKEN, tl.int32)
            is_kept = tl.full([], 0, tl.int32)
            # NOTE: ends because scores are finite: each next token comes before the last one.
            while is_kept == 0:
                count, mass, next_token = _before(
                    own, lists, sizes, spans, num_spans, pivot, token, highest, least, scale,
                    key, at, SPAN, GROUP, LISTED,
                )  # fmt: skip
                if token == _NO_TOKEN:
                    if has_top_k & has_top_p:
                        # Of the tokens equal to the last, subtract those beyond the k-th.
                        equal = tl.exp((pivot.to(tl.float64) - highest) / scale)
                        total = mass - (count - k) * equal
                else:
                    is_light = (has_top_p == 0) | (mass < p * total)
                    is_kept = ((count < limit) & is_light).to(tl.int32)
                if is_kept == 0:
                    token = next_token
                    pivot = tl.load(own + token)
        else:
            scores = tl.load(span_score + of_row, mask=is_span, other=-float("inf"))
            found = tl.load(scored_token + of_row, mask=is_span, other=_NO_TOKEN)
            token = _smallest(found, scores == tl.max(scores, axis=0))
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _before(
    own,
    lists,
    sizes,
    spans,
    num_spans,
    pivot,
    pivot_token,
    highest,
    least,
    scale,
    key,
    at,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Of the list's tokens that precede the pivot: how many, their mass, and the one with the best
    score (of those that min-p keeps)."""
    count = tl.full([], 0, tl.int64)
    mass = tl.full([], 0.0, tl.float64)
    top = tl.full([], -float("inf"), tl.float64)
    top_token = tl.full([], 0, tl.int32)
    for first in range(0, tl.max(sizes, axis=0), LISTED):
        tokens, logit, is_listed = _listed_tile(
            own, lists, sizes, spans, num_spans, first, SPAN, GROUP, LISTED
        )
        is_before = (logit > pivot) | ((logit == pivot) & (tokens < pivot_token))
        is_before = is_listed & is_before
        num_before = _sum(is_before.to(tl.int32))
        if num_before > 0:
            count += num_before
            above = logit.to(tl.float64) - highest
            mass += _sum(tl.where(is_before, tl.exp(above / scale), 0.0))
            noise = _gumbel(_word(key, at, tokens))
            score = logit.to(tl.float64) / scale + noise
            score = tl.where(is_before & (above >= least), score, -float("inf"))
            tile_top = tl.max(tl.max(score, axis=1), axis=0)
            tile_token = _smallest(tokens, score == tile_top)
            if (tile_top > top) | ((tile_top == top) & (tile_token < top_token)):
                top = tile_top
                top_token = tile_token
    return count, mass, top_token


@triton.jit
def _kth_best(
    own,
    lists,
    sizes,
    spans,
    num_spans,
    k,
    low,
    high,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The k-th largest logit of the list, by bisection over the keys from `low`, which k tokens
    reach, to `high`, the best one's."""
    low = low.to(tl.int64)
    end = high.to(tl.int64) + 1  # no token reaches it
    while end - low > 1:
        middle = (low + end) >> 1
        count = tl.full([], 0, tl.int64)
        for first in range(0, tl.max(sizes, axis=0), LISTED):
            _, logit, is_listed = _listed_tile(
                own, lists, sizes, spans, num_spans, first, SPAN, GROUP, LISTED
            )
            count += _sum((is_listed & (_key(logit) >= middle)).to(tl.int32))
        is_reached = count >= k
        low = tl.where(is_reached, middle, low)
        end = tl.where(is_reached, end, middle)
    key = low.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _listed_tile(
    own,
    lists,
    sizes,
    spans,
    num_spans,
    first,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """LISTED tokens of each span's list, with their logits and whether they exist."""
    columns = first + tl.arange(0, LISTED)
    is_listed = columns[None, :] < sizes[:, None]
    at = lists + spans[:, None].to(tl.int64) * SPAN + columns[None, :]
    offsets = tl.load(at, mask=is_listed, other=0).to(tl.int32)
    tokens = _tokens_of(offsets, spans[:, None], num_spans, GROUP)
    logit = tl.load(own + tokens, mask=is_listed, other=-float("inf"))
    return tokens, logit, is_listed


@triton.jit
def _tokens_of_groups(groups, span, num_spans, GROUP: tl.constexpr):
    """Ids of a span's tokens, [groups, GROUP]; some may be beyond the vocabulary."""
    return (groups * num_spans + span)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _tokens_of(offsets, span, num_spans, GROUP: tl.constexpr):
    """Ids of the tokens at offsets in their spans."""
    return (offsets // GROUP * num_spans + span) * GROUP + offsets % GROUP


@triton.jit
def _bound_of_top_k(group_best, num_groups, k, PADDED: tl.constexpr):
    """A key that k tokens reach: the k-th largest of the groups' maxima, cut to 16 bits; the lowest
    possible key if there are fewer groups than k."""
    groups = tl.arange(0, PADDED)
    maxima = tl.load(group_best + groups, mask=groups < num_groups, other=-float("inf"))
    keys = tl.where(groups < num_groups, _key(maxima) >> 16, -32769)
    bound = tl.full([], -32768, tl.int32)
    for bit in range(16):
        higher = bound + (32768 >> bit)
        bound = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= k, higher, bound)
    return bound << 16


@triton.jit
def _total_mass(span_mass, bests, spans, num_spans, scale):
    """The mass of a row; that of the best token is 1."""
    masses = tl.load(span_mass + spans, mask=spans < num_spans, other=0.0)
    below = bests.to(tl.float64) - tl.max(bests, axis=0).to(tl.float64)
    return tl.sum(masses * tl.exp(below / scale), axis=0)


@triton.jit
def _least_of_min_p(share, scale):
    """How far below the best a logit may be."""
    return tl.where(share > 0.0, tl.log(tl.where(share > 0.0, share, 1.0)) * scale, -float("inf"))


@triton.jit
def _has_top_k(k, vocab_size):
    return (k > 0) & (k < vocab_size)


@triton.jit
def _four_words(seed, position, blocks):
    """Philox words of the tokens 4 * blocks + (0, 1, 2, 3): [blocks, 4]."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = tl.zeros_like(blocks).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, blocks.to(tl.uint32), zero + low, zero + high, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [blocks.shape[0], 4])


@triton.jit
def _word(seed, position, tokens):
    """The Philox word of each token."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = tl.zeros_like(tokens).to(tl.uint32)
    blocks = (tokens >> 2).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, blocks, zero + low, zero + high, zero)
    is_odd, is_late = (tokens & 1) == 1, (tokens & 2) == 2
    return tl.where(is_late, tl.where(is_odd, w3, w2), tl.where(is_odd, w1, w0))


@triton.jit
def _gumbel(word):
    uniform = (word.to(tl.float64) + 0.5) * 2.0**-32
    return -tl.log(-tl.log(uniform))


@triton.jit
def _key(logit):
    """int32 ordered like float32; -0.0 is 0.0."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _smallest(tokens, is_meant):
    """The smallest id of the selected ones, of one or two dimensions."""
    return tl.min(tl.ravel(tl.where(is_meant, tokens, _NO_TOKEN)), axis=0)


@triton.jit
def _sum(x):
    """Over two dimensions, columns first."""
    return tl.sum(tl.sum(x, axis=1), axis=0)
