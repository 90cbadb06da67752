"""Prompts of random token ids for an engine that is measured without texts."""

from __future__ import annotations

import random
from array import array

_FIRST, _LAST = 300, 4000  # ids before these are special tokens and single bytes in most models


def plain_ids(vocab_size: int) -> range:
    """Ids that a prompt may hold, all within the vocabulary: of a small one its upper half."""
    return range(min(_FIRST, vocab_size // 2), min(_LAST, vocab_size))


def random_prompt(rng: random.Random, num_tokens: int, ids: range) -> array[int]:
    """`num_tokens` ids drawn from these."""
    return array("i", (rng.choice(ids) for _ in range(num_tokens)))
