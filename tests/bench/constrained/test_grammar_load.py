"""`stemma bench grammar-load`: its adversaries, and what it counts."""

from __future__ import annotations

import itertools
import json

from stemma.bench.constrained.grammar_load import Phase, _note, _row, adversarial_grammars


def test_no_adversarial_grammar_comes_twice() -> None:
    some = [json.dumps(one) for one in itertools.islice(adversarial_grammars(), 100)]
    assert len(set(some)) == len(some)


def test_adversarial_requests_are_counted_apart_from_ordinary_ones() -> None:
    phase = Phase()
    for took_s in (0.1, 0.2, 0.3):
        _note(phase, took_s, None, is_attack=False)
    _note(phase, 1.5, "too large", is_attack=True)
    _note(phase, 0.5, None, is_attack=True)
    row = _row("with", phase, 0.15)
    assert (row["requests"], row["failed"], row["adversarial"], row["refused"]) == (3, 0, 2, 1)
    assert (row["p99_ms"], row["p99_ratio"], row["worst_s"]) == (300.0, 2.0, 1.5)
