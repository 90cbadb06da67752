"""What this machine can do at most: reading memory with all threads, multiplying matrices.

Matrices are bf16 or float32, whichever the machine multiplies faster: where the CPU has no bf16
instructions torch multiplies bf16 tens of times more slowly. Each figure is the best of several
repeats and shapes: a limit is what no run passes.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .report import write_report

REPEATS = 8
READ_BYTES = 256 * 2**20  # far more than any cache holds
MATMUL_SIDES = (1024, 2048)
Clock = Callable[[], float]  # seconds
PROBE = 256  # the side at which the faster dtype is found


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this machine."""

    read_gb_s: float
    matmul_gflop_s: float


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The memory and arithmetic costs of a model, counted from its checkpoint.

    The embedding is looked up, not multiplied; the head is, whether tied to the embedding or not.
    """

    body_weights: int
    head_weights: int
    bytes_per_weight: int
    attention_width: int  # layers * query heads * head_dim

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a decode step reads, whatever its batch."""
        return (self.body_weights + self.head_weights) * self.bytes_per_weight

    def prefill_flop(self, num_tokens: int) -> int:
        """FLOP of one causal prompt whose last token alone needs logits."""
        linears = 2 * self.body_weights * num_tokens + 2 * self.head_weights
        scores_and_values = 2 * 2 * self.attention_width * num_tokens * (num_tokens + 1) // 2
        return linears + scores_and_values


def model_costs(folder: Path) -> ModelCosts:
    """Read from `config.json` and the safetensors files' headers."""
    config = json.loads((folder / "config.json").read_text())
    body = head = embedding = 0
    for path in folder.glob("*.safetensors"):
        for name, shape in _matrices(path):
            size = shape[0] * shape[1]
            if "embed_tokens" in name:
                embedding += size
            elif "lm_head" in name:
                head += size
            else:
                body += size
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    return ModelCosts(
        body_weights=body,
        head_weights=head or embedding,
        bytes_per_weight=2,
        attention_width=config["num_hidden_layers"] * heads * head_dim,
    )


def measure(num_threads: int | None = None, clock: Clock = time.perf_counter) -> Limits:
    """Both limits, with as many threads as there are cores, unless told, by a clock in seconds."""
    import torch

    num_threads = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    read_gb_s, matmul_gflop_s = _read_gb_s(torch, clock), _matmul_gflop_s(torch, clock)
    read_gb_s = max(read_gb_s, _read_by_linear_gb_s(torch, clock))
    torch.set_num_threads(num_threads)  # the kernels took them
    return Limits(read_gb_s, matmul_gflop_s)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`stemma bench limits` has no flags of its own."""


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    found = measure()
    rows = [
        {"limit": "read_gb_s", "value": found.read_gb_s},
        {"limit": "matmul_gflop_s", "value": found.matmul_gflop_s},
    ]
    write_report("limits", rows, args)
    return 0


def _read_gb_s(torch: Any, clock: Clock) -> float:
    """By a dot product, or what else of torch's reads fastest."""
    values = torch.ones(READ_BYTES // 4)
    half = values.numel() // 2
    first, second = values[:half], values[half:]
    ways = (lambda: torch.dot(first, second), lambda: values.view(64, -1).amax(1), values.sum)
    return READ_BYTES / min(_best_s(way, clock) for way in ways) / 1e9


def _read_by_linear_gb_s(torch: Any, clock: Clock) -> float:
    """By a linear layer of ours for one token, which reads many streams at once where torch's calls
    read one or two a thread; 0 without compiled kernels."""
    from ...kernels.native.bindings import why_not_native
    from ...kernels.native.linear import make_linear

    if why_not_native(torch.bfloat16) is not None:
        return 0.0
    linear = make_linear(torch.zeros(READ_BYTES // 4096, 2048, dtype=torch.bfloat16), None)
    token = torch.zeros(1, 2048, dtype=torch.bfloat16)
    return READ_BYTES / _best_s(partial(linear, token), clock) / 1e9


def _matmul_gflop_s(torch: Any, clock: Clock) -> float:
    speed = partial(_mm_gflop_s, torch, clock)
    dtype = max((torch.bfloat16, torch.float32), key=partial(speed, PROBE))
    return max(speed(side, dtype) for side in MATMUL_SIDES)


def _mm_gflop_s(torch: Any, clock: Clock, side: int, dtype: Any) -> float:
    left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / _best_s(partial(torch.mm, left, right, out=out), clock) / 1e9


def _best_s(work: Callable[[], object], clock: Clock) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


def _matrices(path: Path) -> list[tuple[str, list[int]]]:
    """Names and shapes of the two-dimensional tensors (the header: a length, then JSON)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [
        (name, tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__" and len(tensor["shape"]) == 2
    ]
