"""What the device can do at most: copying, reading, multiplying, torch's own flash attention.

Measured in the same process conditions as all else, on random numbers: zeros multiply faster.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .rows import Row
from .sizes import Heads, Sizes
from .timing import Timer

_QUERY = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu",
    "power.draw", "utilization.gpu", "memory.used", "memory.total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits of this device in this run."""

    copy_bytes_s: float  # counts bytes read and bytes written
    read_bytes_s: float
    gemm_flop_s: float
    sdpa_flop_s: float  # causal forward; counts half of the square


def measure(timer: Timer, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """A row for each field of `Ceilings`, in their order; its rate is in the details."""
    yield from _bandwidth(timer, sizes, device)
    yield _gemm(timer, sizes, device, dtype)
    yield _sdpa(timer, sizes, device, dtype)


def _bandwidth(timer: Timer, sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """For a copy both sides count; for reading, the better of two reductions."""
    count = sizes.copy_bytes // 4
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    found = timer.time(
        {
            "copy": [lambda: target.copy_(source)],
            "sum": [lambda: source.view(-1, 1024).sum()],
            "amax": [lambda: source.view(-1, 1024).amax()],
        }
    )
    yield _rate("copy", 2 * source.nbytes, found["copy"].median_s, "GB/s", 1e9)
    least = min(found["sum"].median_s, found["amax"].median_s)
    yield _rate("read", source.nbytes, least, "GB/s", 1e9)


def _gemm(timer: Timer, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Row:
    side = sizes.gemm_side
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    found = timer.time({"gemm": [lambda: torch.mm(left, right, out=out)]})["gemm"]
    return _rate(f"gemm {side}^3", 2 * side**3, found.median_s, "TFLOP/s", 1e12)


def _sdpa(timer: Timer, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Row:
    length, heads = sizes.extend_tokens, sizes.heads
    shape = (1, heads.query, length, heads.dim)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    found = timer.time({"sdpa": [lambda: flash_sdpa(q, k, v)]})["sdpa"]
    flop = causal_flop(length, heads)
    return _rate(f"sdpa flash, {length} causal", flop, found.median_s, "TFLOP/s", 1e12)


def flash_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's flash attention over [1, heads, length, head_dim], causal; no other backend."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_flop(length: int, heads: Heads) -> int:
    """FLOP of scores and values, of the lower half of the square only."""
    return 2 * 2 * length * length // 2 * heads.query * heads.dim


def _rate(case: str, amount: int, seconds: float, unit: str, scale: float) -> Row:
    rate = amount / seconds
    return Row(case, rate / scale, unit, details={"rate": rate, "ms": seconds * 1e3})


def device_record(device: torch.device) -> dict[str, Any]:
    """The device, its clocks now, and the software that computes on it."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        return found | {"device": "no GPU: Triton's interpreter, or the CPU"}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "nvidia_smi": clocks(),
    }


def clocks() -> dict[str, str]:
    """Clocks of the first device from nvidia-smi; empty where it fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in asked.stdout.strip().split(",")]
    return dict(zip(_QUERY, values))
