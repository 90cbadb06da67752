"""What a grammar costs that the runtime has compiled before: a new spec, found in the cache."""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from ...constrained.serving.compiler_service import GrammarCompiler
from ...constrained.spec import GrammarSpec
from ...constrained.vocabulary import Vocabulary
from .matchers.protocol import GrammarRequest
from .matchers.tokenizer_file import TokenizerFile

REPEATS = 21


def cache_hit_us(tokenizer: Path, requests: Sequence[GrammarRequest]) -> float:
    """Median over the grammars of each one's median, in this process."""
    compiler = GrammarCompiler(lambda: _vocabulary(tokenizer))
    try:
        pending = [compiler.ask(_spec(request)) for request in requests]
        while not all(one.is_done for one in pending):
            select.select([compiler.fileno()], [], [])
            compiler.collect()
        return statistics.median(_median_us(compiler, request) for request in requests)
    finally:
        compiler.close()


def _median_us(compiler: GrammarCompiler, request: GrammarRequest) -> float:
    times = []
    for _ in range(REPEATS):
        source = request.source.encode()  # a request's text has no cached hash
        started = time.perf_counter_ns()
        compiler.ask(GrammarSpec(request.kind, source.decode()))
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def _spec(request: GrammarRequest) -> GrammarSpec:
    return GrammarSpec(request.kind, request.source)


def _vocabulary(tokenizer: Path) -> Vocabulary:
    file = TokenizerFile(tokenizer)
    return Vocabulary(file.token_bytes, file.encode, file.size)
