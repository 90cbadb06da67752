"""Which kernels attend for prompts, by what was measured; time is a script's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fused_attention import plain_attention

from stemma.kernels import prefill_choice
from stemma.kernels.prefill_attention import flash_attention
from stemma.kernels.prefill_choice import (
    CUDNN,
    FLASH_2,
    FLASH_3,
    Measured,
    MeasuredFile,
    PromptShape,
    key_of,
    measured,
    refusal_of,
    torch_kernels,
)
from stemma.kernels.registry import select_kernels

OURS = {2048: 10.0, 8192: 100.0, 32_768: 1000.0}
SHAPE = PromptShape(4, 2, 16, torch.float32, 4, max_tokens=64)


@pytest.mark.parametrize(
    ("theirs", "chosen"),
    [
        ({CUDNN: (9.0, 70.0, 600.0), FLASH_2: (9.0, 80.0, 700.0)}, (CUDNN, 2048)),
        ({CUDNN: (9.6, 70.0, 600.0), FLASH_2: (9.0, 80.0, 700.0)}, (CUDNN, 8192)),
        ({CUDNN: (9.0, 96.0, 600.0)}, (CUDNN, 32_768)),  # faster at every longer one, too
        ({CUDNN: (5.0, 50.0, 951.0), FLASH_2: (20.0, 90.0, 940.0)}, (FLASH_2, 8192)),
        ({CUDNN: (5.0, 50.0, 951.0)}, None),
        ({}, None),
    ],
)
def test_torchs_kernel_is_chosen_from_where_it_is_faster(
    theirs: dict[str, tuple[float, ...]], chosen: tuple[str, int] | None
) -> None:
    by_length = {name: dict(zip(OURS, seconds)) for name, seconds in theirs.items()}
    choice = Measured(OURS, by_length).choice()
    assert (choice and (choice.name, choice.min_tokens)) == chosen


def test_asked_for_it_is_chosen_however_slow() -> None:
    slow = Measured(OURS, {FLASH_2: {length: 9 * taken for length, taken in OURS.items()}})
    assert slow.choice() is None
    choice = slow.choice(is_asked_for=True)
    assert choice is not None and choice.min_tokens == 2048
    assert choice.fused is flash_attention
    assert Measured(OURS, {}).choice(is_asked_for=True) is None
    assert choice.beyond(512) == choice and choice.beyond(2048).min_tokens == 2049


def test_kernels_that_refuse_or_disagree_are_left_out_of_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU: cuDNN's is not there, and the plain one computes what the interpreter does."""
    timed: list[Callable[[], object]] = []

    def seconds(call: Callable[[], object]) -> float:
        timed.append(call)
        return float(len(timed))

    monkeypatch.setattr(prefill_choice, "LENGTHS", (17, 24, 99))
    monkeypatch.setitem(prefill_choice.FUSED, FLASH_2, plain_attention)
    kernels = select_kernels(torch.float32, "cuda")
    found = measured(kernels, SHAPE, torch.device("cpu"), seconds)
    assert found == Measured({17: 1.0, 24: 3.0}, {FLASH_2: {17: 2.0, 24: 4.0}})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "no cuDNN for prompts, at 17 tokens"
    ]
    ones = torch.ones(4)
    assert refusal_of(lambda: 1.01 * ones, ones) is None
    assert "differ by 0.1" in (refusal_of(lambda: 1.1 * ones, ones) or "")
    assert refusal_of(lambda: ones * torch.nan, ones) is not None


def test_what_was_measured_is_found_by_the_next_engine_on_the_same_device(tmp_path: Path) -> None:
    file = MeasuredFile(tmp_path / "stemma" / "prefill.json")
    first, other = key_of(SHAPE, "H200"), key_of(SHAPE, "A100")
    assert first != other and file.find(first) is None
    figures = Measured(OURS, {CUDNN: OURS})
    file.keep(first, figures)
    file.keep(other, Measured({}, {}))
    again = MeasuredFile(tmp_path / "stemma" / "prefill.json")
    assert again.find(first) == figures and again.find(other) == Measured({}, {})
    (tmp_path / "stemma" / "prefill.json").write_text("[")
    assert again.find(first) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_torch_is_told_of_flash_attention_3_once_and_where_it_runs(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(prefill_choice, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", told.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    prefill_choice._has_flash_attention_3.cache_clear()
    is_hopper = capability == (9, 0)
    for _ in range(2):
        assert torch_kernels() == (CUDNN, FLASH_3 if is_hopper else FLASH_2)
    assert told == (["FA3"] if is_hopper else [])
    prefill_choice._has_flash_attention_3.cache_clear()
