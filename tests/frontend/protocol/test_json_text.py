"""JSON text of what may be large."""

from __future__ import annotations

import json

import pytest

from stemma.frontend.protocol.json_text import json_text


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, {}], "é": '"\\'}, [], "", 10**30])
def test_the_text_is_that_of_the_other_encoder(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert json_text(value, len(text)) == text
    assert json_text(value, len(text) - 1) is None


def test_no_more_is_encoded_than_is_allowed() -> None:
    """What comes behind is not even looked at."""
    assert json_text([[1, 2, 3], object()], 6) is None
    with pytest.raises(TypeError):
        json_text([[1, 2, 3], object()], 100)
