"""What a step does to its own inputs on the device, in plain torch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor


def take_inputs(token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    return torch.where(sources >= 0, previous[sources.clamp(min=0)], token_ids)


def update_pages(page_table: Tensor, updates: Tensor) -> None:
    rows, columns, pages = updates[updates[:, 0] >= 0].unbind(1)
    page_table[rows.long(), columns.long()] = pages
