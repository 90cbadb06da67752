"""A new schema as a request brings it: time to the first mask, masks along documents, verdicts.

All times are CPU time: of the process for the compilation, which may have threads, of the thread
for a mask. Nothing of the schema is known before; what an engine keeps across schemas, it may use.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .protocol import BoundGrammar, GrammarRequest, MaskEngine, allows
from .tokenizer_file import TokenizerFile


@dataclass(slots=True)
class Following:
    """One schema on one engine. An instance is a list of spellings: one of them is enough."""

    path: str
    first_mask_ms: float  # from the schema's text
    mask_us: list[float] = field(default_factory=list)  # of each token of accepted documents
    accepted: list[bool] = field(default_factory=list)  # of each valid instance
    over_generated: list[bool] = field(default_factory=list)  # of each invalid one


def follow(
    engine: MaskEngine,
    file: TokenizerFile,
    request: GrammarRequest,
    valid: Sequence[Sequence[str]],
    invalid: Sequence[Sequence[str]],
) -> Following:
    """Compile and follow each instance in its spellings, the first that is accepted."""
    gc.collect()
    gc.disable()
    try:
        started = time.process_time_ns()
        grammar = engine.compile(request)
        grammar.start().mask()
        found = Following(grammar.path, (time.process_time_ns() - started) / 1e6)
        for texts in valid:
            found.accepted.append(_is_accepted(grammar, file, texts, found.mask_us))
        for texts in invalid:
            found.over_generated.append(_is_accepted(grammar, file, texts, []))
    finally:
        gc.enable()
    return found


def _is_accepted(
    grammar: BoundGrammar, file: TokenizerFile, texts: Sequence[str], times: list[float]
) -> bool:
    """Appends the microseconds of each mask where a spelling is accepted."""
    return any(_follows(grammar, file.encode(text), times) for text in texts)


def _follows(grammar: BoundGrammar, ids: list[int], times: list[float]) -> bool:
    walk, clock, own = grammar.start(), time.thread_time_ns, []
    for token_id in ids:
        started = clock()
        walk.mask()
        own.append((clock() - started) / 1e3)
        if not (allows(walk.words, token_id) and walk.consume(token_id)):
            return False
    if not walk.is_accepting():
        return False
    times += own
    return True
