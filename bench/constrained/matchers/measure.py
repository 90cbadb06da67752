"""What is timed of one grammar: compilation, masks cold and warm, tokens taken, forced tokens.

Times are in microseconds but for compilation. Cold masks are timed along the canonical tokens of
each instance with a grammar compiled anew for it; where an engine keeps masks by automaton state,
only the first visit of a state is cold.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .protocol import BoundGrammar, GrammarRequest, MaskEngine, Walk, allows
from .tokenizer_file import TokenizerFile


@dataclass(slots=True)
class Figures:
    """One grammar in one process. Equal engines and vocabularies give lists of equal lengths."""

    path: str
    compile_ms: float = 0.0  # with the first mask
    cold_us: list[float] = field(default_factory=list)
    warm_us: list[float] = field(default_factory=list)
    consume_us: list[float] = field(default_factory=list)
    forced_us: list[float] = field(default_factory=list)
    num_instances: int = 0
    num_accepted: int = 0
    num_tokens: int = 0  # of outputs that take every forced run
    num_forced: int = 0
    num_non_canonical: int = 0  # forced, and not in the tokenization of the whole text


def measure(
    engine: MaskEngine, file: TokenizerFile, request: GrammarRequest, texts: Sequence[str]
) -> Figures:
    """Compile and follow `texts`, all of them instances of the language."""
    with _undisturbed():
        started = time.perf_counter()
        grammar = engine.compile(request)
        grammar.start().mask()
        figures = Figures(grammar.path, (time.perf_counter() - started) * 1e3)
        for text in texts:
            _measure_instance(engine, file, request, text, figures)
    return figures


def _measure_instance(
    engine: MaskEngine, file: TokenizerFile, request: GrammarRequest, text: str, figures: Figures
) -> None:
    ids = file.encode(text)
    grammar = engine.compile(request)
    figures.num_instances += 1
    times = _masks(grammar.start(), ids)
    if times is None:
        return
    figures.num_accepted += 1
    figures.cold_us += [times[i] for i in _first_visits(grammar, ids)]
    figures.warm_us += _masks(grammar.start(), ids) or []
    figures.consume_us += _consume_times(grammar.start(), ids)
    figures.forced_us += _forced_times(grammar.start(), ids)
    _jump_forward(grammar.start(), file, ids, figures)


def _first_visits(grammar: BoundGrammar, ids: list[int]) -> list[int]:
    places = grammar.places(ids)
    if places is None:
        return list(range(len(ids)))
    first = {place: i for i, place in reversed(list(enumerate(places)))}
    return sorted(first.values())


def _masks(walk: Walk, ids: list[int]) -> list[float] | None:
    """Microseconds per mask; None where the text is not accepted."""
    clock, times = time.perf_counter_ns, []
    for token_id in ids:
        started = clock()
        walk.mask()
        times.append((clock() - started) / 1e3)
        if not allows(walk.words, token_id) or not walk.consume(token_id):
            return None
    return times if walk.is_accepting() else None


def _consume_times(walk: Walk, ids: list[int]) -> list[float]:
    clock, times = time.perf_counter_ns, []
    for token_id in ids:
        walk.mask()  # as in decoding: some engines speed up the next mask by this one
        started = clock()
        walk.consume(token_id)
        times.append((clock() - started) / 1e3)
    return times


def _forced_times(walk: Walk, ids: list[int]) -> list[float]:
    clock, times = time.perf_counter_ns, []
    for token_id in ids:
        started = clock()
        walk.forced_tokens()
        times.append((clock() - started) / 1e3)
        walk.consume(token_id)
    return times


def _jump_forward(walk: Walk, file: TokenizerFile, ids: list[int], figures: Figures) -> None:
    """Write the text as a model would: forced runs as they come, and canonical tokens of the
    remaining text between them. A run that does not match the text counts as non-canonical
    throughout."""
    canonical, at = _spans(file, ids, 0), 0
    left = list(ids)
    while left:
        forced = list(walk.forced_tokens())
        text, run = b"".join(file.bytes_of(left)), b"".join(file.bytes_of(forced))
        if forced and text.startswith(run):
            figures.num_forced += len(forced)
            figures.num_non_canonical += len(_spans(file, forced, at) - canonical)
            if left[: len(forced)] == forced:
                left = left[len(forced) :]
            else:
                left = file.encode(text[len(run) :].decode())
        else:
            figures.num_non_canonical += len(forced)
            forced, left = left[:1], left[1:]
        for token_id in forced:
            assert walk.consume(token_id), "a token of an instance, or a forced one, is refused"
        figures.num_tokens += len(forced)
        at += sum(map(len, file.bytes_of(forced)))


def _spans(file: TokenizerFile, ids: list[int], at: int) -> set[tuple[int, int]]:
    """The begin and end of each token, in bytes from `at`."""
    spans = set()
    for data in file.bytes_of(ids):
        spans.add((at, at + len(data)))
        at += len(data)
    return spans


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without Python's garbage collections."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
