"""Which kernels attend for prompts on a GPU: as asked for, or as measured when a model loads.

Of ranks the first measures, and all take its choice: heads that cannot be divided are each rank's,
and two kernels' bits would part what ranks must have alike, as routers' choices of experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ...kernels.kv_cache_dtype import KVCacheDtype
from ...kernels.model_options import AttentionOptions
from ...kernels.prefill_attention import (
    OP,
    PrefillChoice,
    described,
    is_plain,
    with_prefill_attention,
)
from ...kernels.prefill_choice import (
    FUSED,
    Measured,
    MeasuredFile,
    PromptShape,
    Seconds,
    key_of,
    measured,
    torch_kernels,
)
from ...kernels.registry import Kernels
from ...native_library import cache_folder
from ..checkpoint.config.model_config import ModelConfig
from ..config import PrefillAttention
from ..models.layers.ranks import Ranks
from .accelerator import Accelerator

log = logging.getLogger(__name__)

_FILE = "prefill-attention.json"
_WARM_UPS, _REPEATS = 2, 5
# 2 ms at 1.98 GHz, within which the host has queued a call: in steps it runs ahead, too.
_ASLEEP_CYCLES = 4_000_000


def with_prefill(
    kernels: Kernels,
    asked: PrefillAttention,
    config: ModelConfig,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDtype,
    page_size: int,
    max_step_tokens: int,
    graph_max_tokens: int,
    ranks: Ranks,
) -> Kernels:
    """The kernels with torch's attention of prompts, where that is asked for, or faster.

    Rows of steps that are captured, of up to `graph_max_tokens`, are never torch's. All ranks call
    it together.
    """
    if not any(c.op == OP and c.implementation == "triton" for c in kernels.choices):
        return kernels
    if asked == "triton":
        return described(kernels, "triton", "asked for")
    layers = _plain_layers(config)
    # One of several shapes, as Gemma 4's with windows have another: of those that torch is given.
    kv_shape = config.kv_shape(layers[0]) if layers else (config.num_kv_heads, config.head_dim)
    shape = PromptShape(config.num_heads, *kv_shape, dtype, page_size, max_step_tokens)
    refusal = _why_not(config, accelerator, shape, kv_cache_dtype)
    if refusal is not None:
        if asked == "torch":
            log.warning("torch's kernels attend for no prompt: %s", refusal)
        return described(kernels, "triton", refusal)
    choice = None
    if ranks.rank == 0:
        figures = _figures(kernels, shape, accelerator)
        choice = figures.choice(is_asked_for=asked == "torch")
    choice = _of_first(choice, ranks)
    if choice is None:
        return described(kernels, "triton", "faster than torch's here, or torch's refuse the shape")
    return with_prefill_attention(kernels, choice.beyond(graph_max_tokens))


def _figures(kernels: Kernels, shape: PromptShape, accelerator: Accelerator) -> Measured:
    """As kept, or measured now and kept."""
    file = MeasuredFile(cache_folder() / _FILE)
    key = key_of(shape, torch.cuda.get_device_name(accelerator.device))
    figures = file.find(key)
    if figures is None:
        with torch.inference_mode(), accelerator.queue():
            figures = measured(kernels, shape, accelerator.device, _seconds_on(accelerator))
        file.keep(key, figures)
    log.info("attention of prompts: %s", figures)
    return figures


def _of_first(choice: PrefillChoice | None, ranks: Ranks) -> PrefillChoice | None:
    """The first rank's."""
    names = torch_kernels()  # which every rank must ask for before it uses one
    own = [-1, 0] if choice is None else [names.index(choice.name), choice.min_tokens]
    number, min_tokens = ranks.of_first(np.array(own, dtype=np.int64)).tolist()
    return None if number < 0 else PrefillChoice(names[number], FUSED[names[number]], min_tokens)


def _why_not(
    config: ModelConfig, accelerator: Accelerator, shape: PromptShape, kv_cache_dtype: KVCacheDtype
) -> str | None:
    """Why torch's kernels cannot attend for any prompt."""
    if accelerator.is_interpreted:
        return "nothing is measured where kernels are interpreted"
    if shape.dtype.itemsize != 2:
        return f"torch's fused kernels compute in 16 bits, not in {shape.dtype}"
    if kv_cache_dtype != "auto":
        return f"torch's read no KV in {kv_cache_dtype}"
    if config.latent is not None or config.has_sink_logits:
        return f"torch's have no attention like that of {config.architecture}"
    if not _plain_layers(config):
        return f"{config.architecture} has windows, chunks or soft caps in all layers"
    if not shape.lengths:
        return f"steps of up to {shape.max_tokens} tokens are short"
    return None


def _plain_layers(config: ModelConfig) -> list[int]:
    """Those with KV whose attention is `is_plain`."""
    kinds = [config.attention_kinds[kind] for kind in config.layer_kinds]
    return [
        layer
        for layer in config.attention_layers
        if isinstance(kind := kinds[layer], AttentionOptions) and is_plain(kind)
    ]


def _seconds_on(accelerator: Accelerator) -> Seconds:
    """The least of a few."""

    def seconds(call: Callable[[], object]) -> float:
        for _ in range(_WARM_UPS):
            call()
        times = []
        for _ in range(_REPEATS):
            torch.cuda._sleep(_ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
            first = accelerator.event()
            call()
            last = accelerator.event()
            last.wait()
            times.append(last.seconds_since(first))
        return min(times)

    return seconds
