"""An image of a prompt, and where it stands among tokens.

    token ids    ... 151652  -7  -7  -7  -7  -7  -7  151653 ...      one id a patch of the grid
    time                  4   5   5   5   5   5   5       8          positions by which they are
    height                4   5   5   5   6   6   6       8          turned, of a grid of 2 x 3
    width                 4   5   6   7   5   6   7       8

Its tokens all have one id below 0, which no other image has (`registry.py`): so whatever compares
token ids tells images apart, and nothing that is drawn or typed is an image.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image's bytes and its grid of patches; two of the same bytes are one object."""

    token_id: int  # < 0
    grid: tuple[int, int]  # rows and columns of patches
    merge_size: int  # so many patches, and as many rows of them, become one token
    data: bytes = field(repr=False)
    read: Callable[[bytes], npt.NDArray[np.float32]] = field(repr=False)

    @property
    def rows(self) -> int:
        """Of tokens."""
        return self.grid[0] // self.merge_size

    @property
    def columns(self) -> int:
        """Of tokens."""
        return self.grid[1] // self.merge_size

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    def patches(self) -> npt.NDArray[np.float32]:
        """[num_patches, patch_dim], as the vision tower takes them."""
        return self.read(self.data)


class ImageSpan(NamedTuple):
    """An image at tokens [start, end) of a request."""

    image: Image
    start: int
    end: int
    base: int  # the position at which its grid begins
    rope_shift: int  # what is added to the positions of the tokens behind it


def spans_of(token_ids: array[int], find: Callable[[int], Image]) -> tuple[ImageSpan, ...]:
    """The images among these tokens, in order. `find`: by token id."""
    ids = np.frombuffer(token_ids, dtype=np.int32) if token_ids else np.zeros(0, np.int32)
    places = np.flatnonzero(ids < 0)
    spans: list[ImageSpan] = []
    shift, done = 0, 0
    for place in places.tolist():
        if place < done:
            continue
        image = find(token_ids[place])
        end = place + image.num_tokens
        assert token_ids[place:end] == array("i", [image.token_id]) * image.num_tokens, (
            "a part of an image"
        )
        base = place + shift
        shift += max(image.rows, image.columns) - image.num_tokens
        spans.append(ImageSpan(image, place, end, base, shift))
        done = end
    return tuple(spans)
