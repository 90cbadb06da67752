"""The free list of a KV pool: which page ids belong to nobody.

Ids only: what a page holds, and who owns a page that is not free, is known elsewhere (the tree and
the requests); `radix.check` adds the three up. Every call is a few block copies, whatever the
number of pages.
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
    """Owns the ids in [0, num_pages) that are free; each is handed out to one owner at a time.

    A stack: pages freed last are handed out first, and a run that was freed whole comes back in
    its old order, so contiguous runs stay contiguous where they can.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages owned by the tree or by requests."""
        return self.num_pages - len(self._free)

    def allocate(self, num_pages: int) -> Pages:
        """Hands `num_pages` ids to the caller, all or none.

        Raises OutOfPages when fewer are free.
        """
        rest = len(self._free) - num_pages
        if rest < 0:
            raise OutOfPages(
                f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages} free"
            )
        taken = self._free[rest:]
        del self._free[rest:]
        taken.reverse()
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Takes back ids that the caller owns."""
        returned = as_ids(pages)[::-1]
        self._free.extend(returned)
        assert len(self._free) <= self.num_pages, (
            f"{len(returned)} pages freed and now {len(self._free)} of {self.num_pages} are free: "
            "some were freed twice"
        )

    def free_pages(self) -> Pages:
        """A copy of the free ids, for checks."""
        return self._free[:]


def as_ids(ids: Iterable[int]) -> array[int]:
    """The ids as `array('i')`: the object itself when it is one."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    return array("i", ids)
