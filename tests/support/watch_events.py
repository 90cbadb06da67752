"""Made-up states of `/watch`: a tree of any size, with all kinds of nodes."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "with", "as")
NOW_S = 1000.0


def large_state(num_nodes: int, *, seed: int, run: str) -> dict[str, Any]:
    """A whole state with that many nodes, and 24 requests that run on some of them."""
    drawn = random.Random(seed)
    rows: list[list[Any]] = [[1, None, 1, 0, 0, 0, 0, 0, 0, 0, None, 0, None]]
    texts: dict[str, str] = {}
    for number in range(2, num_nodes + 1):
        above = rows[int(drawn.random() ** 1.7 * min(len(rows), 400))]
        num_tokens = 1 + int(drawn.random() ** 3 * 300)
        rows.append(
            [
                number, above[0], 1, above[3] + above[4], num_tokens, 0, drawn.random() < 0.02,
                drawn.random() < 0.005, 0, drawn.randrange(9),
                NOW_S - drawn.random() ** 3 * 900, 0, None,
            ]
        )  # fmt: skip
        texts[str(number)] = " ".join(drawn.choices(WORDS, k=10))
    by_id = {row[0]: row for row in rows}
    running = [_running(number, by_id[num_nodes - 3 * number]) for number in range(24)]
    for request in running:
        row = by_id[request["node"]]
        while row is not None:
            row[5] += 1
            row = by_id.get(row[1])
    num_cells = min(1900, num_nodes)
    return {
        "run": run, "model": "made-up", "now_s": NOW_S, "is_whole": True, "evicted_tokens": 321,
        "engine": {
            "total_tokens": 65_536, "free_tokens": 9_000, "cached_tokens": 50_000,
            "evictable_tokens": 40_000, "leases": {"leased_tokens": 3_000}, "host": None,
        },
        "rates": {
            "seconds": 1.0, "prefill_tokens": 900, "decode_tokens": 2_100, "forced_tokens": 120,
            "score_tokens": 0, "cached_tokens": 800, "steps": 88, "busy": 0.93, "hit_rate": 0.81,
        },
        "queue": {
            "policy": "program", "num_running": 24, "num_waiting": 1, "running": running,
            "waiting": [{"id": 99, "program": "2/1", "why": "prefix", "prompt": 100, "age_s": 1.0,
                         "num_preemptions": 0}],
        },
        "steps": {"items": [_step(i) for i in range(1, 200)], "names": {}, "num_missed": 0},
        "tree": {
            "version": 1, "is_whole": True, "nodes": rows, "texts": texts, "removed": [],
            "roots": {"1": ""}, "num_nodes": num_nodes + 3_000, "num_hidden": 3_000,
        },
        "pool": {
            "version": 1, "page_size": 1, "num_pages": 65_536, "pages_per_cell": 32,
            "cells": [[number + 2, 1] for number in range(num_cells)] + [[0, 2_048 - num_cells]],
        },
        "leases": [],
    }  # fmt: skip


def _running(number: int, row: list[Any]) -> dict[str, Any]:
    return {
        "id": number, "program": f"1/{number}", "tenant": "t", "namespace": "", "node": row[0],
        "prompt": 300, "computed": 280, "cached": 200, "output": 10, "max_output": 200,
        "forced": 0, "age_s": 2.0, "num_preemptions": 0, "task": "generate", "depth": 280,
        "lacks_grammar": False,
    }  # fmt: skip


def _step(number: int) -> dict[str, Any]:
    tokens = {"prefill": 0 if number % 17 else 128, "decode": 24, "forced": 0, "score": 0}
    return {
        "id": number, "tokens": {**tokens, "cached": 0 if number % 17 else 80}, "decode": [1],
        "rows": [], "num_more": 0, "num_shared": 100, "num_copies": 0, "start_s": 0.0,
        "ms": 8 + number * 7 % 9, "plan_ms": 1.0, "device_ms": 7.0, "num_waiting": 1,
        "num_running": 24, "free_tokens": 9_000, "evicted_tokens": 0, "num_preempted": 0,
        "num_jumped": 0,
        "num_drafted": 0,
        "num_accepted": 0,
    }  # fmt: skip
