"""The drafters that an engine has, by the names that `--speculate` takes.

suffix        what followed where the end of the text has occurred before: in the request's own
              text, in outputs of the same op, in others of its history
siblings      the same in outputs of its program's other branches, those that run included
ngram         the same in its own text alone, by its last few tokens (prompt lookup)
prediction    the text that the caller expects
model         what a draft model guesses, or the model's own first layers
grammar       no drafter: guesses are also made under a grammar, which cuts them and splices in
              what it forces
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ...errors import InvalidRequest
from ...native_library import BuildError
from .choice import DRAFTERS, GRAMMAR, MODEL, chosen_drafters
from .drafter import Drafter
from .drafting import Drafting
from .guesses import ModelDrafter
from .prediction import PredictionDrafter
from .suffix import Scope, SuffixDrafter

log = logging.getLogger(__name__)

_SCOPES = {
    "suffix": (Scope.OWN, Scope.OP, Scope.NAMESPACE),
    "siblings": (Scope.PROGRAM,),
    "ngram": (Scope.OWN,),
}
NGRAM_TOKENS = 3  # that "ngram" looks at, at most


def make_drafting(
    speculate: str,
    max_tokens: int,
    *,
    is_cpu: bool,
    has_model: bool = False,
    max_ahead: int | None = None,
    num_candidates: int = 0,
    has_kv: bool = True,
) -> Drafting | None:
    """What `--speculate` asks for; None: nothing. has_model: the executor has a draft model, which
    guesses at most `max_ahead` tokens, and `num_candidates` beside each; has_kv: and must have
    followed a text for that. Raises InvalidRequest."""
    names = chosen_drafters(speculate)
    is_automatic = names is None
    if names is None:
        # A step on a CPU is mostly the reading of the weights. On a GPU steps are planned ahead,
        # which drafts forbid: what pays there is not measured yet.
        names = tuple(name for name in DRAFTERS if name != "ngram") if is_cpu else ()
        names = tuple(name for name in names if name != MODEL or has_model)
    if not names or not max_tokens:
        return None
    of_model = ModelDrafter(max_ahead, num_candidates, has_kv) if MODEL in names else None
    try:
        drafters = _drafters(names)
    except BuildError as error:
        if not is_automatic:
            allowed = f"off or prediction, where no C++ compiler is ({error})"
            raise InvalidRequest.of("speculate", speculate, allowed) from error
        log.warning("drafts from predictions only: %s", error)
        drafters = [PredictionDrafter()]
    if of_model is not None:
        drafters.append(of_model)
    return Drafting(tuple(drafters), max_tokens, GRAMMAR in names, of_model)


def _drafters(names: Collection[str]) -> list[Drafter]:
    """Raises BuildError where one needs a compiler, and there is none."""
    drafters: list[Drafter] = []
    if "prediction" in names:
        drafters.append(PredictionDrafter())
    scopes = {scope for name in names for scope in _SCOPES.get(name, ())}
    if scopes == {Scope.OWN}:
        drafters.append(SuffixDrafter(scopes=scopes, max_match=NGRAM_TOKENS))
    elif scopes:
        drafters.append(SuffixDrafter(scopes=scopes))
    return drafters
