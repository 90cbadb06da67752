"""Which drafters an engine is told to use: `--speculate`."""

from __future__ import annotations

from difflib import get_close_matches

from ...errors import InvalidRequest

GRAMMAR = "grammar"  # guesses nothing itself
MODEL = "model"  # where the engine has a draft model
DRAFTERS = ("suffix", "siblings", "ngram", "prediction", MODEL, GRAMMAR)
AUTO, OFF = "auto", "off"
MAX_DRAFT_TOKENS = 32


def chosen_drafters(speculate: str) -> tuple[str, ...] | None:
    """The drafters that this names, each once: none for "off", None for "auto", where the engine
    chooses. Raises InvalidRequest."""
    if speculate == AUTO:
        return None
    if speculate == OFF:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in speculate.split(",")))
    for name in names:
        if name not in DRAFTERS:
            allowed = f"{AUTO}, {OFF}, or with commas some of {', '.join(DRAFTERS)}"
            near = get_close_matches(name, DRAFTERS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest.of("speculate", speculate, allowed + hint)
    if names == (GRAMMAR,):
        allowed = f"{GRAMMAR} beside a drafter, as in 'suffix,{GRAMMAR}': alone it guesses nothing"
        raise InvalidRequest.of("speculate", speculate, allowed)
    return names
