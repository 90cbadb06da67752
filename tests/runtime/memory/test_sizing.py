"""How many pages fit, and what is said when they don't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stemma.errors import InvalidRequest
from stemma.runtime.checkpoint.config.model_config import ModelConfig
from stemma.runtime.execute import encoder_runner, model_runner
from stemma.runtime.execute.encoder_runner import encoder_dtype
from stemma.runtime.execute.model_runner import ModelRunner, resolve_dtype
from stemma.runtime.memory import sizing
from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.host_pool import HostKVPool
from stemma.runtime.memory.kv_layout import KVLayout

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=50,
    max_position_embeddings=128,
    rope_theta=1e4,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
    torch_dtype=None,
    default_temperature=None,
    default_top_p=None,
    default_top_k=None,
    default_min_p=None,
    default_repetition_penalty=None,
)
LAYOUT = KVLayout.of(CONFIG, "bfloat16")
BYTES_PER_TOKEN = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, head size, bfloat16


def test_bytes_per_token_are_those_of_the_pool() -> None:
    assert LAYOUT.bytes_per_token == BYTES_PER_TOKEN
    pool = DeviceKVPool(LAYOUT, num_pages=5, page_size=4)
    assert pool.num_bytes == 20 * BYTES_PER_TOKEN


def test_an_explicit_token_count_wins() -> None:
    assert _pages(max_total_tokens=70, page_size=16, available_bytes=1) == 4
    with pytest.raises(InvalidRequest, match="max_total_tokens=15"):
        _pages(max_total_tokens=15, page_size=16)


def test_a_share_of_memory_is_taken_but_no_more_than_all_requests_can_use() -> None:
    room = 500 * BYTES_PER_TOKEN
    assert _pages(available_bytes=room, mem_fraction=0.5, max_running_requests=8) == 250
    assert _pages(available_bytes=room, mem_fraction=0.5, max_running_requests=2) == 200
    assert _pages(available_bytes=10**12, page_size=16, max_running_requests=3) == 3 * 7


def test_a_gpu_s_memory_is_taken_but_for_a_tenth() -> None:
    room = 1000 * BYTES_PER_TOKEN
    assert _pages(available_bytes=room, max_running_requests=99, is_gpu=True) == 900
    assert _pages(available_bytes=room, max_running_requests=99) == 300


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(InvalidRequest, match="max_model_len=100 tokens needs") as caught:
        _pages(available_bytes=99 * BYTES_PER_TOKEN, mem_fraction=1.0)
    assert caught.value.field == "mem_fraction"
    with pytest.raises(InvalidRequest, match=r"mem_fraction=1\.5"):
        _pages(mem_fraction=1.5)


def test_available_memory_is_the_tighter_of_machine_and_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(sizing, "_MEMINFO", meminfo)
    monkeypatch.setattr(sizing, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(sizing, "_cgroup_paths", list)
    assert sizing.available_memory_bytes() == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert sizing.available_memory_bytes() == 4000 * 1024
    (tmp_path / "memory.max").write_text("1005\n")
    assert sizing.available_memory_bytes() == 1000
    meminfo.unlink()
    (tmp_path / "memory.max").unlink()
    assert sizing.available_memory_bytes() > 0


def test_a_runner_sizes_its_own_pool_from_dummy_weights() -> None:
    runner = ModelRunner(
        "unused", CONFIG, load_format="dummy", dtype="float32", max_running_requests=2, page_size=16
    )
    assert runner.num_pages == 2 * 128 // 16
    runner.warm_up()


def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"max_model_len=129 .*\[1, 128\]"):
        ModelRunner("unused", CONFIG, load_format="dummy", max_model_len=129)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("AVX2", torch.float32), ("AVX512_CORE", torch.float32), ("AVX512_CORE_BF16", torch.bfloat16)],
)
def test_auto_dtype_obeys_the_limit_set_for_onednn(
    monkeypatch: pytest.MonkeyPatch, limit: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(model_runner, "why_not_native", lambda dtype: "not in this test")
    assert resolve_dtype("auto") is expected


def test_auto_dtype_is_bfloat16_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(model_runner, "why_not_native", lambda dtype: None)
    assert resolve_dtype("auto") is torch.bfloat16


def test_auto_dtype_of_an_encoder_is_what_the_cpu_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "why_not_native", lambda dtype: None)
    for has_fast, expected in ((False, torch.float32), (True, torch.bfloat16)):
        for module in (model_runner, encoder_runner):
            monkeypatch.setattr(module, "has_fast_bfloat16", lambda has_fast=has_fast: has_fast)
        assert encoder_dtype("auto") is expected
        assert encoder_dtype("auto", quantization="int8") is torch.bfloat16
        assert encoder_dtype("bfloat16") is torch.bfloat16


def test_dtypes_are_named_and_others_refused() -> None:
    assert resolve_dtype("bfloat16") is torch.bfloat16
    assert resolve_dtype(torch.float64) is torch.float64
    with pytest.raises(InvalidRequest, match="int8"):
        resolve_dtype("int8")
    with pytest.raises(InvalidRequest, match="dtype"):
        resolve_dtype(torch.int8)


def test_processes_that_have_a_share_of_the_pages_each_have_more_together() -> None:
    """Each of three has memory for 60 tokens; a sequence of 100 needs 34 of each."""
    room = {"available_bytes": 60 * LAYOUT.bytes_per_token, "mem_fraction": 1.0}
    assert _pages(num_shares=3, **room) == 180
    with pytest.raises(InvalidRequest, match="mem_fraction"):
        _pages(num_shares=1, **room)


def _pages(**options: Any) -> int:
    defaults = {"page_size": 1, "max_running_requests": 4, "max_model_len": 100}
    return sizing.num_pages_for(LAYOUT, **{**defaults, **options})


def test_memory_that_the_system_does_not_give_is_told_by_the_name_of_its_flag() -> None:
    layout = KVLayout.of(CONFIG, "float32")
    with pytest.raises(InvalidRequest, match=r"\d GiB here.*: lower max_total_tokens") as refused:
        DeviceKVPool(layout, num_pages=1 << 44, page_size=1)
    assert refused.value.field == "max_total_tokens"
    pool = DeviceKVPool(layout, num_pages=1, page_size=1)
    with pytest.raises(InvalidRequest, match="lower host_kv_tokens"):
        HostKVPool(pool, 1 << 44)
