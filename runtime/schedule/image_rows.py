"""What a row computes of its request's images, and how its positions are turned."""

from __future__ import annotations

from collections.abc import Sequence

from ..images.image import ImageSpan
from .plan import ImagePart


def image_parts(
    spans: Sequence[ImageSpan], start: int, end: int
) -> tuple[int, tuple[ImagePart, ...]]:
    """Of the tokens [start, end): `Row.rope_shift` and `Row.images`."""
    shift, parts = 0, []
    for span in spans:
        if span.start >= end:
            break
        if span.end <= start:
            shift = span.rope_shift
            continue
        first = max(span.start, start)
        parts.append(
            ImagePart(
                key=span.image.token_id,
                start=first - start,
                length=min(span.end, end) - first,
                first=first - span.start,
                base=span.base,
                columns=span.image.columns,
                rope_shift=span.rope_shift,
            )
        )
    return shift, tuple(parts)
