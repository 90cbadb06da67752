"""Bodies as they come in: how large they may be by default."""

from __future__ import annotations

import pytest

from stemma.server.access.request_body import (
    LEAST_DEFAULT_BYTES,
    MOST_DEFAULT_BYTES,
    BodyLimit,
    default_max_bytes,
)


@pytest.mark.parametrize(
    ("context", "most"),
    [(1, LEAST_DEFAULT_BYTES), (131_072, 64 * 131_072), (1 << 24, MOST_DEFAULT_BYTES)],
)
def test_a_body_may_be_about_as_large_as_what_the_context_holds(context: int, most: int) -> None:
    assert default_max_bytes(context) == most


def test_the_limit_is_told_with_the_context_by_which_clients_know_that_it_is_exceeded() -> None:
    told = BodyLimit(4_000_000, 2048).text
    assert (
        told == "a body may have at most 4 MB. This model's maximum context length is 2048 tokens"
    )
    assert BodyLimit(4_000_000).text == "a body may have at most 4 MB"
