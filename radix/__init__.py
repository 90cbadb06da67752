"""Maps token prefixes to KV pages: the radix tree over token runs and the page ids that it holds.

Ids and counts only. This package knows no tensor, no model and no program; the runtime's KV cache
is its only user and the only place where a page id becomes memory.
"""

from __future__ import annotations

from .node import Node
from .pages import PageAllocator, Pages
from .tree import Inserted, Match, RadixTree

__all__ = ["Inserted", "Match", "Node", "PageAllocator", "Pages", "RadixTree"]
