"""The free list of a KV pool: the ids of free pages.

Ids only: the tree and the requests know what the other pages hold and who owns them; `radix.check`
adds the three up. Every call is a few block copies, whatever the number of pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

from ..errors import OutOfPages

__all__ = ["PageAllocator", "Pages", "as_ids"]

Pages: TypeAlias = "array[int]"
"""A run of page ids as `array('i')`: 4 bytes an id, sliced and joined by block copies."""


class PageAllocator:
    """Owns the free ids in [0, num_pages); each is allocated to one owner at a time.

    A stack that grows down in an array of fixed size: pages freed last are allocated first, and
    each run is written and read in its own order, so contiguous runs stay contiguous if they can.
    No call resizes or reverses anything.

        | belongs to others, stale | top of the stack ... bottom |
        0                     _num_used                      num_pages
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = array("i", range(num_pages))
        self._num_used = 0

    @property
    def num_free(self) -> int:
        return self.num_pages - self._num_used

    @property
    def num_used(self) -> int:
        """Pages owned by the tree or by requests."""
        return self._num_used

    def allocate(self, num_pages: int) -> Pages:
        """Allocates `num_pages` ids to the caller, all or none.

        Raises OutOfPages if fewer are free.
        """
        assert num_pages >= 0, f"{num_pages} pages wanted"
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages wanted, {self.num_free} of {self.num_pages} free")
        return self._take(num_pages)

    def allocate_at_most(self, num_pages: int) -> Pages:
        """Allocates `num_pages` ids to the caller, or as many as are free; never fails."""
        assert num_pages >= 0, f"{num_pages} pages wanted"
        return self._take(min(num_pages, self.num_free))

    def _take(self, num_pages: int) -> Pages:
        start = self._num_used
        self._num_used += num_pages
        return self._stack[start : self._num_used]

    def free(self, pages: Iterable[int]) -> None:
        """Takes back ids that the caller owns."""
        returned = as_ids(pages)
        start = self._num_used - len(returned)
        assert start >= 0, (
            f"{len(returned)} pages freed and now {self.num_pages - start} of {self.num_pages} "
            "are free: some were freed twice"
        )
        self._stack[start : self._num_used] = returned
        self._num_used = start

    def free_pages(self) -> Pages:
        """A copy of the free ids, for checks."""
        return self._stack[self._num_used :]


def as_ids(ids: Iterable[int]) -> array[int]:
    """The ids as `array('i')`: the object itself when it is one."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    return array("i", ids)
