from __future__ import annotations

import pytest

from stemma.errors import InvalidProgram
from stemma.frontend.protocol.kv_policy import KVPolicy, h2o, snapkv, streaming


@pytest.mark.parametrize("text", ["snapkv:0.25", "snapkv:512", "h2o:0.5", "streaming:1024"])
def test_a_policy_is_written_as_it_is_read(text: str) -> None:
    assert str(KVPolicy.from_text(text)) == text
    assert KVPolicy.from_wire(KVPolicy.from_text(text).to_wire()) == KVPolicy.from_text(text)


def test_a_policy_says_what_else_was_given() -> None:
    assert str(snapkv(0.5, window=8, pool=1)) == "snapkv:0.5 window=8 pool=1"
    assert str(h2o(64, recent=200)) == "h2o:64 window=200"
    assert str(streaming(64, sinks=0)) == "streaming:64 sinks=0"


def test_only_snapkv_pools_and_bounds_what_it_looks_at() -> None:
    assert KVPolicy("h2o", 0.5).num_pooled == h2o(0.5).num_pooled == 1
    assert snapkv(0.5, pool=5).num_pooled == 5
    with pytest.raises(InvalidProgram, match=r"kv_policy\.window=65"):
        snapkv(0.5, window=65)
    with pytest.raises(InvalidProgram, match=r"kv_policy\.window=0"):
        h2o(0.5, recent=0)
