"""Which tokens' KV lives where: the radix tree over token runs and the page ids that it holds.

Ids and counts only. This pillar knows no tensor, no model and no program; the runtime's KV cache
is its one user and the only place where a page id becomes memory.
"""

from __future__ import annotations

from .node import Node
from .pages import PageAllocator, Pages
from .tree import Inserted, Match, RadixTree

__all__ = ["Inserted", "Match", "Node", "PageAllocator", "Pages", "RadixTree"]
