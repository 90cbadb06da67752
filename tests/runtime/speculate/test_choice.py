"""`--speculate`: what it names, and an answer to what it cannot be."""

from __future__ import annotations

import pytest

import stemma as st
from stemma.runtime.config import EngineConfig
from stemma.runtime.speculate.choice import DRAFTERS, chosen_drafters


def test_drafters_are_named_once_each_or_left_to_the_engine_or_switched_off() -> None:
    assert chosen_drafters("suffix, grammar,suffix") == ("suffix", "grammar")
    assert chosen_drafters(",".join(DRAFTERS)) == DRAFTERS
    assert chosen_drafters("off") == () and chosen_drafters("auto") is None
    assert EngineConfig().speculate == "auto" and EngineConfig().speculative_num_tokens == 8


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("ngram,predictions", "did you mean 'prediction'"),
        ("on", "auto, off, or"),
        ("", "auto, off, or"),
        ("off,suffix", "auto, off, or"),
        ("suffix,", "auto, off, or"),
        ("grammar", "as in 'suffix,grammar'"),
        ("grammar,grammar", "alone it guesses nothing"),
    ],
)
def test_another_name_is_refused_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(st.InvalidRequest, match=hint) as caught:
        EngineConfig(speculate=text)
    assert caught.value.field == "speculate"


@pytest.mark.parametrize("number", [-1, 33, 2.5])
def test_a_number_of_guesses_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(st.InvalidRequest, match=r"speculative_num_tokens.*\[0, 32\]"):
        EngineConfig(speculative_num_tokens=number)
    assert EngineConfig(speculative_num_tokens=0).speculative_num_tokens == 0
