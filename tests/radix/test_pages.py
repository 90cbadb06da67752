"""The free list: all or none, ascending runs, nothing freed twice."""

from __future__ import annotations

from array import array

import pytest

from stemma.errors import OutOfPages
from stemma.radix.pages import PageAllocator


def test_every_page_is_handed_out_once() -> None:
    allocator = PageAllocator(10)
    pages = [*allocator.allocate(3), *allocator.allocate(0), *allocator.allocate(7)]
    assert pages == list(range(10)) and allocator.num_free == 0 and allocator.num_used == 10


def test_allocate_takes_all_or_none() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(OutOfPages, match="5 pages wanted, 4 of 4 free"):
        allocator.allocate(5)
    assert allocator.num_free == 4


def test_allocate_at_most_takes_what_is_free() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate_at_most(3) == array("i", [0, 1, 2])
    assert allocator.allocate_at_most(3) == array("i", [3])
    assert not allocator.allocate_at_most(3) and allocator.num_free == 0


def test_a_run_that_was_freed_comes_back_in_its_order() -> None:
    allocator = PageAllocator(8)
    run = allocator.allocate(5)
    allocator.free(list(run))
    assert allocator.allocate(2) + allocator.allocate(3) == run


def test_pages_freed_last_are_handed_out_first() -> None:
    allocator = PageAllocator(8)
    first, second = allocator.allocate(2), allocator.allocate(3)
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(6) == second + first + array("i", [5])
    assert allocator.free_pages() == array("i", [6, 7])


def test_freeing_twice_is_refused_when_more_than_all_are_free() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)
