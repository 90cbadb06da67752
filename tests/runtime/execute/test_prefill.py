"""Whose kernels attend for prompts: as asked for, as the model allows, as the device measures."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fused_attention import plain_attention

from stemma.kernels import prefill_choice
from stemma.kernels.model_options import AttentionOptions
from stemma.kernels.prefill_attention import OP
from stemma.kernels.prefill_choice import Measured, PromptShape
from stemma.kernels.registry import select_kernels
from stemma.runtime.checkpoint.config.varied_layers import VariedLayers
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.config import PrefillAttention
from stemma.runtime.execute import prefill
from stemma.runtime.execute.accelerator import InterpretedAccelerator
from stemma.runtime.execute.prefill import with_prefill
from stemma.runtime.models.layers.ranks import ALONE, Ranks
from stemma.runtime.models.model_config import ModelConfig, read_model_config


class Clock:
    """A device on which calls, each timed five times, take these seconds in turn."""

    is_interpreted = False
    device = torch.device("cpu")

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.num_events = 0
        self.now_s = 0.0

    def queue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> Any:
        self.num_events += 1
        if self.num_events % 2 == 0:
            self.now_s += self.seconds[(self.num_events // 2 - 1) // 5]  # five repeats
        return Passed(self.now_s)


class Passed:
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Passed) -> float:
        return self.at_s - earlier.at_s


class Gathered:
    """What ranks say, one after the other: each is told of the first, and of itself."""

    def __init__(self) -> None:
        self._said: list[Any] = []

    def all_gather(self, data: Any) -> Any:
        self._said.append(data)
        return np.stack([self._said[0], data])


@pytest.fixture
def config() -> ModelConfig:
    found = read_model_config(EMBEDDED_MODEL)
    return replace(found, num_heads=2, num_kv_heads=1, head_dim=16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names a device, has a cache of its own, and torch's plain kernel as its FlashAttention."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(prefill_choice, "LENGTHS", (5, 9))
    monkeypatch.setitem(prefill_choice.FUSED, prefill_choice.FLASH_2, plain_attention)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def told(
    config: ModelConfig, accelerator: Any, asked: PrefillAttention = "auto", **options: Any
) -> tuple[str, str]:
    dtype = options.pop("dtype", torch.float16)
    kernels = options.pop("kernels", None) or select_kernels(dtype, "cuda", "triton")
    fixed: dict[str, Any] = {
        "kv_cache_dtype": "auto", "page_size": 4, "max_step_tokens": 16, "graph_max_tokens": 2,
        "ranks": ALONE,
    }  # fmt: skip
    found = with_prefill(kernels, asked, config, accelerator, dtype=dtype, **{**fixed, **options})
    choice = next(c for c in found.describe() if c.op == OP)
    return choice.implementation, choice.reason


def test_the_faster_kernel_is_taken_and_a_second_start_does_not_measure(
    config: ModelConfig, gpu: None
) -> None:
    clock = Clock(1.0, 2.0, 3.0, 1.0)  # ours and torch's, of both lengths
    assert told(config, clock) == ("torch", "FlashAttention-2, of prompts from 9 tokens on")
    assert clock.num_events == 4 * 5 * 2
    again = Clock()
    assert told(config, again) == ("torch", "FlashAttention-2, of prompts from 9 tokens on")
    assert again.num_events == 0
    assert told(config, again, "torch")[1] == "FlashAttention-2, of prompts from 5 tokens on"
    beyond = told(config, again, graph_max_tokens=12)
    assert beyond == ("torch", "FlashAttention-2, of prompts from 13 tokens on")


def test_all_ranks_take_the_choice_of_the_first_which_alone_measures(
    config: ModelConfig, gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seconds, chosen in (
        ((1.0, 2.0, 3.0, 1.0), ("torch", "FlashAttention-2, of prompts from 9 tokens on")),
        ((1.0, 1.0, 3.0, 3.0), ("triton", "faster than torch's here, or torch's refuse the shape")),
    ):
        clocks, gathered = (Clock(*seconds), Clock(1.0, 0.1, 3.0, 0.1)), cast(Any, Gathered())
        for rank, clock in enumerate(clocks):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{chosen} {rank}"))
            assert told(config, clock, ranks=Ranks(rank, 2, gathered)) == chosen
        assert clocks[0].num_events and not clocks[1].num_events


def test_ours_stay_where_they_are_faster_or_asked_for(config: ModelConfig, gpu: None) -> None:
    assert told(config, Clock(1.0, 1.0, 3.0, 3.0))[0] == "triton"
    assert told(config, Clock(), "triton") == ("triton", "asked for")


def test_what_torch_cannot_compute_is_not_measured(
    config: ModelConfig, gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    near = replace(config, attention_kinds=(AttentionOptions(window=8),))
    for said, of, options in (
        ("16 bits", config, {"dtype": torch.float32}),
        ("no KV in int8", config, {"kv_cache_dtype": "int8"}),
        ("no attention like that", replace(config, has_sink_logits=True), {}),
        ("windows, chunks or soft caps", near, {}),
        ("up to 4 tokens are short", config, {"max_step_tokens": 4}),
    ):
        implementation, reason = told(of, Clock(), **options)
        assert implementation == "triton" and said in reason
    assert told(config, InterpretedAccelerator())[1].endswith("are interpreted")
    assert not caplog.records
    told(near, Clock(), "torch")
    assert "attend for no prompt" in caplog.text


def test_layers_of_several_shapes_are_measured_in_that_of_the_plain_ones(
    config: ModelConfig, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are Gemma 4's kinds: 2 KV heads of 16 behind a window, 1 of 32 that see all."""
    varied = VariedLayers(
        head_dims=(16, 32), num_kv_heads=(2, 1), kv_sources=(0, 1), has_values=(True, True),
        intermediate_sizes=(8, 8), sparsities=(0.0, 0.0), token_input_size=0, token_input_vocab=0,
    )  # fmt: skip
    config = replace(
        config, num_layers=2, num_kv_heads=2, varied=varied, kind_of_layer=(0, 1),
        attention_kinds=(AttentionOptions(window=8), AttentionOptions()),
    )  # fmt: skip
    shapes: list[PromptShape] = []

    def noted(_: Any, shape: PromptShape, *__: object) -> Measured:
        shapes.append(shape)
        return Measured({}, {})

    monkeypatch.setattr(prefill, "measured", noted)
    told(config, Clock())
    assert [(shape.num_kv_heads, shape.head_dim) for shape in shapes] == [(1, 32)]


def test_the_reference_attends_for_prompts_itself(config: ModelConfig, gpu: None) -> None:
    reference = select_kernels(torch.float64, "cuda")
    assert told(config, Clock(), kernels=reference)[0] == "reference"
