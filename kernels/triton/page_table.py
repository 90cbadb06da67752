"""A step's changes to its own inputs on the device: sampled tokens and new pages."""

from __future__ import annotations

from torch import Tensor

from .language import tl, triton

_BLOCK = 128


def take_inputs(token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    taken = token_ids.new_empty(token_ids.shape)
    num_tokens = len(token_ids)
    if num_tokens:
        _take_inputs[(triton.cdiv(num_tokens, _BLOCK),)](
            token_ids, sources, previous, taken, num_tokens, BLOCK=_BLOCK, num_warps=4
        )
    return taken


def update_pages(page_table: Tensor, updates: Tensor) -> None:
    assert page_table.is_contiguous() and updates.is_contiguous()
    num_updates = len(updates)
    if num_updates:
        _update_pages[(triton.cdiv(num_updates, _BLOCK),)](
            page_table, updates, num_updates, page_table.shape[1], BLOCK=_BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _take_inputs(token_ids, sources, previous, taken, num_tokens, BLOCK: tl.constexpr):
    """BLOCK tokens a program."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    source = tl.load(sources + token, mask=is_token, other=-1)
    known = tl.load(token_ids + token, mask=is_token, other=0)
    sampled = tl.load(previous + source, mask=source >= 0, other=0)
    tl.store(taken + token, tl.where(source >= 0, sampled, known), mask=is_token)


@triton.jit(do_not_specialize=["num_updates", "num_columns"])
def _update_pages(page_table, updates, num_updates, num_columns, BLOCK: tl.constexpr):
    """BLOCK updates a program."""
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_update = update < num_updates
    row = tl.load(updates + update * 3, mask=is_update, other=-1)
    column = tl.load(updates + update * 3 + 1, mask=is_update, other=0)
    page = tl.load(updates + update * 3 + 2, mask=is_update, other=0)
    tl.store(page_table + row.to(tl.int64) * num_columns + column, page, mask=row >= 0)
