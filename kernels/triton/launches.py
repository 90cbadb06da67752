"""Every way in which the ops launch kernels, as calls to be made inside `offline()`.

Tensors have the sizes of real models and of an H200's KV pool; they are never touched. A launch
marked `is_rare` is left to `make soak`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, empty

from . import dense

NUM_TOKENS = 64  # of a decode step
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an op, which may launch several kernels."""

    name: str
    run: Callable[[], object]
    is_rare: bool = False


def all_launches() -> list[Launch]:
    """The longest to compile first, so that none of them is left at the end."""
    return [*_dense()]


def _dense() -> Iterator[Launch]:
    for name, dtype in DTYPES.items():
        is_rare = name == "fp16"  # compiled as bf16 is
        for size in (2048, 4096, 896):
            run = partial(_rms_norm, dtype, size)
            yield Launch(f"rms_norm {name} {size}", run, is_rare or size == 2048)
        for activation in ("silu", "gelu", "gelu_tanh"):
            gate_up = empty(NUM_TOKENS, 2 * 14336, dtype=dtype)
            run = partial(dense.act_and_mul, gate_up, activation)
            yield Launch(f"act_and_mul {name} {activation}", run, is_rare)
        run = partial(dense.gather_rows, empty(128256, 4096, dtype=dtype), _ints(NUM_TOKENS))
        yield Launch(f"gather_rows {name} 4096", run, is_rare)


def _rms_norm(dtype: torch.dtype, size: int) -> None:
    norm = dense.make_rms_norm(empty(size, dtype=dtype), 1e-5)
    x = empty(NUM_TOKENS, size, dtype=dtype)
    norm(x)
    norm(x, torch.empty_like(x))


def _ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return empty(shape, dtype=dtype)
