"""Panics of native libraries become errors; all else passes as it is."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from stemma.errors import EngineError
from stemma.native_panic import panic_raises


def test_a_panic_becomes_the_error_that_was_named() -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = Split(Regex(r"(a|a|a)+$"), "isolated")

    @panic_raises(EngineError, "it broke")
    def encode(text: str) -> int:
        return len(tokenizer.encode(text))

    with pytest.raises(EngineError, match=r"^it broke: .*retry-limit-in-match over"):
        encode("a" * 300 + "b")
    assert encode("ab") == 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_is_no_panic_passes(kind: type[BaseException]) -> None:
    @panic_raises(EngineError, "it broke")
    def fail() -> None:
        raise kind

    with pytest.raises(kind):
        fail()
