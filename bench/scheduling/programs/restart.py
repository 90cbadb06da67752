"""What a store of prefixes saves over a restart: the first token after a long known prompt."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median

from ....frontend.backend import Engine
from ....frontend.dsl.expr import tokens
from ....frontend.dsl.function import open_program
from ....frontend.dsl.generation import gen
from ...harness.workloads import BOS, LOW

PROMPT_TOKENS = 2000


def measure_restart(model: Path, *, vocab: int, num_prompt: int, repeats: int) -> dict[str, float]:
    """Median seconds to the first token after a restart, for a prompt that was computed before it
    and for one that was not, in this order, and their ratio."""
    known_s, cold_s = [], []
    for repeat in range(repeats):
        known, new, warm = (_prompt(f"{repeat} {i}", num_prompt, vocab) for i in range(3))
        with tempfile.TemporaryDirectory(prefix="stemma-bench-") as folder:
            with Engine(model, kv_store=folder) as engine:
                _first_token_s(engine, known)
            with Engine(model, kv_store=folder) as engine:
                _first_token_s(engine, warm)  # costs that only the first prompt of this length pays
                known_s.append(_first_token_s(engine, known))
                cold_s.append(_first_token_s(engine, new))
    pairs = [cold / known for known, cold in zip(known_s, cold_s, strict=True)]
    return {"known_s": median(known_s), "cold_s": median(cold_s), "ratio": median(pairs)}


def _prompt(seed: str, num_prompt: int, vocab: int) -> tuple[int, ...]:
    numbers = random.Random(f"restart {seed}")
    return (BOS, *numbers.choices(range(LOW, vocab), k=num_prompt - 1))


def _first_token_s(engine: Engine, prompt: tuple[int, ...]) -> float:
    started = time.perf_counter()
    s = open_program(engine)
    s += tokens(prompt)
    s += gen("first", max_tokens=1, temperature=0, ignore_eos=True)
    s["first"]
    seconds = time.perf_counter() - started
    s.end()
    return seconds
