"""The least time for the steps of an engine, against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.bench.harness.limits import Limits, model_costs
from stemma.bench.serving.floor import floor_s, limits_of
from stemma.planning.roofline import CostModel
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import Row, SamplingParams
from stemma.runtime.schedule.step_log import work_of

LIMITS = Limits(read_gb_s=10.0, matmul_gflop_s=100.0)
CONFIG = read_model_config(EMBEDDED_MODEL)
KEY_BYTES = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2 * CONFIG.num_layers
PAIR_FLOP = 4 * CONFIG.num_heads * CONFIG.head_dim * CONFIG.num_layers


def costs_of_embedded() -> CostModel:
    costs = limits_of(EMBEDDED_MODEL, LIMITS)
    assert costs is not None
    return costs


def step(rows: list[Row], num_shared: int = 0) -> dict[str, Any]:
    return {"work": work_of(rows), "num_shared": num_shared}


def decode(start: int) -> Row:
    return Row(0, 0, start, (1,), sampling=SamplingParams())


def test_a_row_reads_its_keys_and_a_prompt_makes_pairs_with_them() -> None:
    prompt = Row(1, 1, 10, (1,) * 4, sampling=SamplingParams())
    assert work_of([decode(99), prompt]) == {
        "tokens": 5, "logits": 2, "keys": 100 + 14, "pairs": 100 + (11 + 12 + 13 + 14),
    }  # fmt: skip
    assert work_of([prompt._replace(sampling=None)])["logits"] == 0


def test_a_step_of_few_rows_reads_all_weights_and_keys_once() -> None:
    costs = costs_of_embedded()
    read_s = (model_costs(EMBEDDED_MODEL).bytes_per_step + 100 * KEY_BYTES) / 10e9
    assert floor_s([step([decode(99)])], costs) == pytest.approx(read_s, rel=0.01)
    twice = [step([decode(99)]), step([decode(99)])]
    assert floor_s(twice, costs) == pytest.approx(2 * read_s, rel=0.01)


def test_keys_that_rows_share_are_read_once() -> None:
    costs = costs_of_embedded()
    rows = [decode(999)] * 8
    saved_s = floor_s([step(rows)], costs) - floor_s([step(rows, 7 * 900)], costs)
    assert saved_s <= 7 * 900 * KEY_BYTES / 10e9 * 1.001
    assert floor_s([step(rows, 7 * 1000)], costs) >= 8000 * PAIR_FLOP / 100e9


def test_a_long_prompt_is_arithmetic() -> None:
    costs = costs_of_embedded()
    flop = model_costs(EMBEDDED_MODEL).prefill_flop(1024)
    prompt = Row(1, 1, 0, (1,) * 1024, sampling=SamplingParams())
    assert floor_s([step([prompt])], costs) == pytest.approx(flop / 100e9, rel=0.02)


def test_models_that_are_not_counted_so_have_no_floor(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    windows = {
        "sliding_window": 64,
        "use_sliding_window": True,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }
    for other in (windows, {"quantization_config": quantized}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **other}))
        assert limits_of(tmp_path, LIMITS) is None
