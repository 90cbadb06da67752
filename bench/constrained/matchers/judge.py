"""Whether a grammar takes an instance: token by token, the mask looked at before each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .protocol import BoundGrammar, Walk, allows
from .spelling import spelled, spellings
from .tokenizer_file import TokenizerFile


@dataclass(slots=True)
class Verdict:
    """The result for one instance."""

    text: str | None  # the spelling that was accepted
    num_disagreements: int = 0  # tokens that the mask allows and consume() refuses, or vice versa
    needs_other_order: bool = False  # accepted, but not with its keys in the order given


def judge(
    grammar: BoundGrammar, file: TokenizerFile, instance: object, names: Iterable[str]
) -> Verdict:
    """Accepted if one of its spellings is; text that is not Unicode never is."""
    verdict = Verdict(None)
    for text in spellings(instance, names):
        try:
            ids = file.encode(text)
        except UnicodeEncodeError:
            break
        if accepts(grammar.start(), ids, verdict):
            verdict.text = text
            break
    given = spelled(instance)
    if verdict.text not in (None, given):
        verdict.needs_other_order = not accepts(grammar.start(), file.encode(given), verdict)
    return verdict


def accepts(walk: Walk, ids: list[int], verdict: Verdict) -> bool:
    """Whether the walk accepts all of these tokens and may end there; counts disagreements."""
    for token_id in ids:
        walk.mask()
        is_allowed, is_consumed = allows(walk.words, token_id), walk.consume(token_id)
        verdict.num_disagreements += is_allowed != is_consumed
        if not (is_allowed and is_consumed):
            return False
    return walk.is_accepting()
