"""Whether two models mean the same by a token id."""

from __future__ import annotations

from .tokenizer import Tokenizer


def first_difference(tokenizer: Tokenizer, other: Tokenizer) -> str | None:
    """The first id that is one text here and another there, for a message; None: all that both have
    are the same. Models pad their vocabularies to different sizes: what only one has is no
    difference."""
    own, others = tokenizer.texts_by_id(), other.texts_by_id()
    for token_id, (text, of_other) in enumerate(zip(own, others)):
        if text != of_other and text is not None and of_other is not None:
            return f"token {token_id} is {text!r} there and {of_other!r} in the draft model"[:200]
    return None
