"""Whether torch's kernels attend for prompts or ours do: measured on the device, once for a shape.

Both compute whole prompts of a few lengths, torch's with the gathering of keys and values that the
seam adds (`prefill_attention`); their results must agree. Torch's are chosen from the least length
on from which they are faster at every length measured. What was measured is kept in a file, so that
an engine that starts again chooses alike, and its results have the same bits.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .attention_rows import AttentionRows
from .ops import DevicePlan
from .prefill_attention import (
    FusedAttention,
    PrefillChoice,
    attend_whole,
    cudnn_attention,
    flash_attention,
)
from .registry import Kernels
from .triton.availability import triton_version

log = logging.getLogger(__name__)

LENGTHS = (2048, 8192, 32_768)
CUDNN, FLASH_2, FLASH_3 = "cuDNN", "FlashAttention-2", "FlashAttention-3"
FUSED: dict[str, FusedAttention] = {
    CUDNN: cudnn_attention,
    FLASH_2: flash_attention,
    FLASH_3: flash_attention,
}
_ENOUGH = 0.95  # of our time: a smaller gain is no reason for another kernel (a guess)
_MAX_ERROR = 1.5e-2  # ||theirs - ours|| / ||ours||, in 16 bits: each rounds its probabilities

Seconds = Callable[[Callable[[], object]], float]
"""Of one call, on the device."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """The attention of a model's layers, and of its engine's steps."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and KV
    page_size: int
    max_tokens: int  # of a step

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those of LENGTHS that a step can compute whole."""
        return tuple(length for length in LENGTHS if length <= self.max_tokens)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a prompt's attention by its length: ours, and by name those of torch's kernels
    that do as well at every length."""

    ours: Mapping[int, float]
    theirs: Mapping[str, Mapping[int, float]]

    def choice(self, *, is_asked_for: bool = False) -> PrefillChoice | None:
        """Of torch's kernels that are faster than ours the fastest at the longest prompts; None:
        there is none. is_asked_for: faster or not."""
        found = []
        for name, seconds in self.theirs.items():
            first = min(seconds) if is_asked_for else self._first_faster(seconds)
            if first is not None:
                found.append((seconds[max(seconds)], name, first))
        if not found:
            return None
        _, name, first = min(found)
        return PrefillChoice(name, FUSED[name], first)

    def _first_faster(self, seconds: Mapping[int, float]) -> int | None:
        first = None
        for length in sorted(self.ours, reverse=True):
            if seconds[length] > _ENOUGH * self.ours[length]:
                break
            first = length
        return first

    def __str__(self) -> str:
        parts = []
        for length, ours in self.ours.items():
            beside = [f", {name} {1e6 * taken[length]:.0f}" for name, taken in self.theirs.items()]
            parts.append(f"{length} tokens: ours {1e6 * ours:.0f} us{''.join(beside)}")
        return "; ".join(parts)


def measured(
    kernels: Kernels, shape: PromptShape, device: torch.device, seconds: Seconds
) -> Measured:
    """Compute prompts of each length by these kernels, an accelerator's, and by torch's. Of those
    that refuse one, or do not agree, a line in the log says so."""
    ours: dict[int, float] = {}
    theirs: dict[str, dict[int, float]] = {name: {} for name in torch_kernels()}
    for length in shape.lengths:
        prompt = Prompt.of(shape, length, device)
        own = prompt.call(kernels)
        expected = own()
        ours[length] = seconds(own)
        for name in tuple(theirs):
            call = prompt.torch_call(name)
            refusal = refusal_of(call, expected)
            if refusal is None:
                theirs[name][length] = seconds(call)
            else:
                log.warning("no %s for prompts, at %d tokens: %s", name, length, refusal)
                del theirs[name]
    return Measured(ours, {name: taken for name, taken in theirs.items() if taken})


def refusal_of(call: Callable[[], Tensor], expected: Tensor) -> str | None:
    """Why a kernel will not do: it refuses, or gives something else. None: it does."""
    try:
        found = call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as refusal:
        return str(refusal).partition("\n")[0]
    wide = expected.float()
    error = float((found.float() - wide).norm() / wide.norm())
    return None if error <= _MAX_ERROR else f"its results differ by {error:.2g} of ours"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of random numbers, its KV in pages of any order."""

    q: Tensor  # [n, num_heads, head_dim]
    kv_layer: Tensor
    rows: AttentionRows
    page_table: Tensor  # on the device

    @classmethod
    def of(cls, shape: PromptShape, num_tokens: int, device: torch.device) -> Prompt:
        """Its queries are, as in a layer, a part of what has keys and values, too."""
        num_pages = -(-num_tokens // shape.page_size)
        pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)[None]
        generator = torch.Generator(device).manual_seed(num_tokens)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=shape.dtype, device=device, generator=generator)

        heads = random(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        rows = AttentionRows(
            query_start=np.array([0, num_tokens], dtype=np.int32),
            seq_lens=np.array([num_tokens], dtype=np.int32),
            page_table=pages,
            table_rows=np.zeros(1, dtype=np.int32),
            page_size=shape.page_size,
        )
        return cls(
            heads[:, : shape.num_heads],
            random(2, shape.num_kv_heads, num_pages * shape.page_size, shape.head_dim),
            rows,
            torch.from_numpy(pages).to(device),
        )

    def call(self, kernels: Kernels) -> Callable[[], Tensor]:
        """Its attention by an accelerator's kernels."""
        plan = kernels.plan_attention(self.rows, self.kv_layer, self.q.shape[1])
        assert isinstance(plan, DevicePlan), "an accelerator's"
        lists = {name: torch.from_numpy(x).to(self.q.device) for name, x in plan.arrays.items()}
        bound = plan.bind(lists, self.page_table)
        return lambda: kernels.paged_attention(self.q, self.kv_layer, bound)

    def torch_call(self, name: str) -> Callable[[], Tensor]:
        """The same by torch's kernel of this name."""
        fused = FUSED[name]
        return lambda: attend_whole(self.q, self.kv_layer, self.page_table, self.rows, fused)


def torch_kernels() -> tuple[str, ...]:
    """The names of those that there may be here; which of them refuse a shape shows when they are
    called. torch's flash attention is FlashAttention-3 behind this, where there is any."""
    return CUDNN, FLASH_3 if _has_flash_attention_3() else FLASH_2


@cache  # it is told once: older torch registers no kernel twice
def _has_flash_attention_3() -> bool:
    """torch takes that of the package flash_attn_interface, if told to (torch 2.13,
    torch/nn/attention/_fa3.py). It refuses all but compute capability 9."""
    activate = getattr(nn.attention, "activate_flash_attention_impl", None)
    if activate is None or find_spec("flash_attn_interface") is None:
        return False
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError) as refusal:
        log.warning("torch does not take FlashAttention-3: %s", refusal)
        return False
    return True


class MeasuredFile:
    """What was measured on this user's machines: a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: str) -> Measured | None:
        """None where it was not measured, or the file cannot be read."""
        found = self._table().get(key)
        if found is None:
            return None
        by_name = {
            name: {int(length): taken for length, taken in seconds.items()}
            for name, seconds in found.items()
        }
        return Measured(by_name.pop(_OURS), by_name)

    def keep(self, key: str, figures: Measured) -> None:
        """Where the file cannot be written all is measured again at the next start."""
        table = {**self._table(), key: {_OURS: figures.ours, **figures.theirs}}
        written = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(table, indent=1), encoding="utf-8")
            written.replace(self._path)
        except OSError as error:
            log.warning("measured again at the next start: %s", error)

    def _table(self) -> dict[str, Any]:
        try:
            table = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}


_OURS = "ours"


def key_of(shape: PromptShape, device_name: str) -> str:
    """What a measurement holds for."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = torch.__version__, cudnn, triton_version(), *torch_kernels()
    return ", ".join(map(str, (device_name, *versions, *astuple(shape))))
