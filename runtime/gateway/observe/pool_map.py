"""The owner of each page of the KV pool, as runs of cells: a picture of a pool of any size.

Cost: a few block operations over the pool, and one for each shown node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ....radix.node import Node
from ...schedule.cache.kv_cache import KVCacheManager
from ...schedule.request import Request

MAX_CELLS = 2048
FREE, REQUESTS, UNSHOWN = 0, -1, -2  # other owners are ids of nodes


def pool_map(
    kv_cache: KVCacheManager, shown: Iterable[Node], running: Iterable[Request]
) -> dict[str, Any]:
    """`cells`: [owner, how many cells in a row], from page 0 on. An owner is a shown node's id or
    one of FREE, REQUESTS (the output of running requests, not in the tree yet), UNSHOWN (cached in
    a node that is not shown). A cell of several pages has the owner of its first page in use."""
    owners = np.full(kv_cache.num_pages, UNSHOWN, dtype=np.int32)
    owners[_index(kv_cache.allocator.free_pages())] = FREE
    nodes = list(shown)
    if nodes:
        numbers = np.array([node.id for node in nodes])
        pages = b"".join([node.pages for node in nodes])
        owners[_index(pages)] = np.repeat(numbers, [len(node.pages) for node in nodes])
    for request in running:
        owners[_index(request.pages[request.num_published // kv_cache.page_size :])] = REQUESTS
    pages_per_cell = -(-kv_cache.num_pages // MAX_CELLS)
    return {
        "page_size": kv_cache.page_size,
        "num_pages": kv_cache.num_pages,
        "pages_per_cell": pages_per_cell,
        "cells": _runs(_cells(owners, pages_per_cell)),
    }


def _index(pages: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(pages, dtype=np.int32)


def _cells(owners: Any, pages_per_cell: int) -> Any:
    if pages_per_cell == 1:
        return owners
    num_cells = -(-len(owners) // pages_per_cell)
    padded = np.zeros(num_cells * pages_per_cell, dtype=np.int32)
    padded[: len(owners)] = owners
    grid = padded.reshape(num_cells, pages_per_cell)
    first = (grid != FREE).argmax(axis=1)
    return grid[np.arange(num_cells), first]


def _runs(cells: Any) -> list[list[int]]:
    starts = np.flatnonzero(np.diff(cells, prepend=cells[0] + 1))
    lengths = np.diff(starts, append=len(cells))
    return [list(pair) for pair in zip(cells[starts].tolist(), lengths.tolist())]
