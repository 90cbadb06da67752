"""Recorded work for an accelerator: which sizes there are, and what was recorded for each.

Attention is data (kernels/triton/work_list.py), so a recording holds for every step of up to so
many tokens, whatever they are: decode rows, prompt chunks, shared segments. Hence whole steps are
recorded, mixed ones too, with nothing run piecewise between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable

from .accelerator import Accelerator

# Past this many tokens a step of a large model takes longer than its launches, which then cost
# nothing (8 launches a layer at some 10 us: a guess).
DEFAULT_MAX_GRAPH_TOKENS = 512


def padded_sizes(max_tokens: int) -> list[int]:
    """Ascending: close where a padded row costs a share of the step, an eighth apart above."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(320, 513, 64), *range(640, 1025, 128)]
    sizes += range(1280, max_tokens + 256, 256)
    return [size for size in sizes if size <= max_tokens]


class Graphs:
    """Owns the recordings."""

    def __init__(self, accelerator: Accelerator, max_tokens: int) -> None:
        """max_tokens: of the largest step that is recorded; 0: none is."""
        self._accelerator = accelerator
        self.sizes = padded_sizes(max_tokens)
        self._recorded: dict[Hashable, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def padded(self, num_tokens: int) -> int | None:
        """The size that a step of so many tokens is recorded at; None: it is too large."""
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queue what was recorded under `key`, or do `work` and record it.

        NOTE: the recording reads and writes the tensors of its first time; later contents must
        have been put there.
        """
        if key in self._recorded:
            self._recorded[key]()
        else:
            self._recorded[key] = self._accelerator.capture(work)
