"""Bodies as they come in: how large they may be by default."""

from __future__ import annotations

import pytest

from stemma.server.access.request_body import (
    LEAST_DEFAULT_BYTES,
    MOST_DEFAULT_BYTES,
    default_max_bytes,
)


@pytest.mark.parametrize(
    ("context", "most"),
    [(1, LEAST_DEFAULT_BYTES), (131_072, 64 * 131_072), (1 << 24, MOST_DEFAULT_BYTES)],
)
def test_a_body_may_be_about_as_large_as_what_the_context_holds(context: int, most: int) -> None:
    assert default_max_bytes(context) == most
