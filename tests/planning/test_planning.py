"""Sizes and predictions before a model is loaded: counted right, and moving the right way."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_long_token
from hypothesis import given
from hypothesis import strategies as st
from mixtures import change_config, make_mixture, pack_experts
from safetensors.torch import save_file

from stemma.__main__ import main
from stemma.bench.harness.model import Shape, checkpoint_config
from stemma.cli.model_report import examine_model
from stemma.errors import InvalidRequest, ModelLoadError
from stemma.kernels.model_options import AttentionOptions, LatentOptions, RoutingOptions
from stemma.kernels.registry import select_kernels
from stemma.planning.closed_loop import ClosedLoop, Load, ModelledDevice
from stemma.planning.devices import GPUS
from stemma.planning.formats import AdapterRoom, stored_quantization
from stemma.planning.model_shape import AttentionLayers
from stemma.planning.pipeline import Pipeline, decode_s, prompt_s
from stemma.planning.prediction import NamedStep, predict_load, predict_step
from stemma.planning.probe import cost_model
from stemma.planning.rank_shape import config_of_rank, num_sums, parts_of
from stemma.planning.resident_memory import PROCESS_BYTES, resident_memory
from stemma.planning.roofline import CostModel
from stemma.planning.served_model import ServedModel
from stemma.planning.stored_weights import StoredWeights, stored_weights
from stemma.runtime.checkpoint.config.model_config import (
    ExpertsConfig,
    IndexerConfig,
    LatentConfig,
)
from stemma.runtime.checkpoint.config.varied_layers import VariedLayers
from stemma.runtime.checkpoint.formats import stored_method
from stemma.runtime.checkpoint.loader import DummyWeights, open_weights
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.build import ModelBuild
from stemma.runtime.models.layers.rotary import LayerRotary
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.queue.prompt_limits import share_of_stage

TINY = read_model_config(EMBEDDED_MODEL)
# Llama 3 8B.
EIGHT_B = replace(
    TINY, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
    tie_word_embeddings=False,
)  # fmt: skip
LIMITS = {"kv_tokens": 100_000, "token_budget": 2048, "max_running_requests": 64}


def test_parameters_are_those_of_the_checkpoint() -> None:
    model = ServedModel.of(TINY, "bfloat16")
    stored = stored_weights(EMBEDDED_MODEL)
    assert stored is not None and stored.formats == ("BF16",)
    assert model.shape.num_parameters == stored.num_bytes // 2
    assert model.shape.num_active_parameters == model.shape.num_parameters
    eight = ServedModel.of(EIGHT_B, "bfloat16")
    assert eight.shape.num_parameters == 8_030_261_248  # what the model's card says
    assert eight.weight_bytes == 2 * eight.shape.num_parameters


def test_each_format_is_smaller_than_the_one_before() -> None:
    sizes = [ServedModel.of(EIGHT_B, "bfloat16", q).weight_bytes for q in ("none", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] < 0.6 * sizes[0] and sizes[2] < 0.4 * sizes[0]


def test_what_does_not_fit_leaves_no_kv() -> None:
    model = ServedModel.of(EIGHT_B, "bfloat16")
    assert model.fit(model.weight_bytes, is_gpu=True).kv_tokens == 0
    fit = model.fit(model.weight_bytes + 10 * 1000 * model.kv_bytes_per_token, is_gpu=True)
    assert 8_900 <= fit.kv_tokens <= 9_000 and fit.num_requests(4096) == 2


def test_ranks_have_their_part_of_weights_kv_and_work_and_sum_over_the_link() -> None:
    whole = CostModel(ServedModel.of(EIGHT_B, "bfloat16"), GPUS["h100"])
    for num_ranks, kv_part in ((2, 2), (8, 8), (16, 8)):  # of 16, two have the same KV head
        model = ServedModel.of(config_of_rank(EIGHT_B, num_ranks), "bfloat16")
        assert model.weight_bytes == pytest.approx(whole.model.weight_bytes / num_ranks, rel=4e-2)
        assert model.kv_bytes_per_token == whole.model.kv_bytes_per_token / kv_part
        sums = num_sums(EIGHT_B, num_ranks)
        assert sums == 1 + 2 * 32  # as tests/runtime/parallel/test_orders.py counts them
        alone, together = (CostModel(model, GPUS["h100"], *of) for of in ((), (num_ranks, sums)))
        for num_tokens in (1, 2048):
            steps = [
                predict_step(each, NamedStep("", ((num_tokens, 0),))) for each in (alone, together)
            ]
            way_s = 2 * (num_ranks - 1) / num_ranks * num_tokens * 4096 * 2 / (450e9 * 0.8)
            expected = steps[0].overhead_s + sums * (10e-6 + way_s)
            assert steps[1].overhead_s == pytest.approx(expected)


def test_ranks_that_divide_tokens_exchange_what_is_counted_on_paper() -> None:
    """Of 32 layers the heads, then the parts of attention; of the last one the hidden states."""
    model, num = ServedModel.of(EIGHT_B, "bfloat16"), 4
    alone, divided = (CostModel(model, GPUS["h100"], num_shares=each) for each in (1, num))
    prompt, decode = NamedStep("", ((2048, 2048),)), NamedStep("", ((1, 4000),) * 8)
    for step, own in ((prompt, 512), (decode, 2)):
        whole, part = (predict_step(each, step) for each in (alone, divided))
        heads, parts = own * (32 + 2 * 8) * 128 * 2, num * own * 32 * (128 + 1) * 4
        num_bytes = (num - 1) * (32 * (heads + parts) + own * 4096 * 2)
        exchanged_s = (1 + 2 * 32) * 10e-6 + num_bytes / (450e9 * 0.8)
        assert part.overhead_s == pytest.approx(whole.overhead_s + exchanged_s)
        assert part.attention_s == pytest.approx(whole.attention_s / num)
    computed = [predict_step(each, prompt).computing_s for each in (alone, divided)]
    assert computed[1] == pytest.approx(computed[0] / num, rel=0.01)
    read = [predict_step(each, decode).reading_s for each in (alone, divided)]
    assert read[0] == read[1], "each has all weights"


def test_a_plan_of_divided_tokens_has_the_kv_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = Shape(4096, 32, 32, 8, 128, 14336, 128_256, 131_072)  # 16 of 24 GB
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_config(shape)))
    flags = ["plan", str(tmp_path), "--device", "l4", "--clients", "1", "--json"]
    flags += ["--prompt-tokens", "20000", "--output-tokens", "1"]
    tokens = []
    for size in (1, 2):
        assert main([*flags, "--cp-size", str(size)]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["kv_tokens"])
    assert tokens[0] < 4 * 20_001 and tokens[1] == min(2 * tokens[0], 4 * 20_001)


def test_what_is_not_divided_is_whole_on_each_rank() -> None:
    odd = replace(EIGHT_B, num_heads=7 * 4, num_kv_heads=7)
    assert config_of_rank(odd, 8).num_heads == 28 and num_sums(odd, 8) == 1 + 32
    assert num_sums(EIGHT_B, 1) == 0 and config_of_rank(EIGHT_B, 1) == EIGHT_B


def test_a_decode_step_reads_the_weights_once_whatever_the_batch() -> None:
    costs = CostModel(ServedModel.of(EIGHT_B, "bfloat16"), GPUS["h200"])
    one, many = (predict_step(costs, NamedStep("", ((1, 512),) * num)) for num in (1, 32))
    assert one.bound_by == many.bound_by == "weights"
    assert one.reading_s == many.reading_s
    read_bytes = 2 * (costs.model.shape.num_parameters - 4096 * 128256)
    assert one.reading_s == pytest.approx(read_bytes / (4.8e12 * 0.8), rel=1e-3)
    prompt = predict_step(costs, NamedStep("", ((2048, 0),)))
    assert prompt.bound_by == "arithmetic" and prompt.total_s > 5 * one.total_s


@given(
    num_tokens=st.integers(1, 40),
    before=st.integers(0, 60),
    visible=st.none() | st.integers(1, 70),
)
def test_what_queries_see_is_counted_one_by_one(
    num_tokens: int, before: int, visible: int | None
) -> None:
    layers = AttentionLayers(1, visible, num_kv_heads=1, head_dim=1)
    seen = [
        range(0 if visible is None else max(0, at + 1 - visible), at + 1)
        for at in range(before, before + num_tokens)
    ]
    assert layers.num_keys(num_tokens, before) == len(set().union(*seen))
    assert layers.num_pairs(num_tokens, before) == sum(map(len, seen))
    alone = [len(queries) for queries in seen]
    assert layers.num_seen(range(before, before + num_tokens)) == sum(alone)


def test_layers_with_a_window_cost_no_more_beyond_it() -> None:
    """Gemma 2's: every other layer sees 4,096 tokens. Their KV is held all the same."""
    kinds = (AttentionOptions(window=4096), AttentionOptions())
    windows = replace(EIGHT_B, attention_kinds=kinds, kind_of_layer=(0, 1) * 16)
    full, half = (
        CostModel(ServedModel.of(c, "bfloat16"), GPUS["h200"]) for c in (EIGHT_B, windows)
    )

    def attention_s(costs: CostModel, context: int, num_tokens: int = 1) -> float:
        return costs.step_time([(num_tokens, context - num_tokens)], 1).attention_s

    assert attention_s(half, 4096) == pytest.approx(attention_s(full, 4096))
    for context in (8192, 100_000):
        expected = (attention_s(full, context) + attention_s(full, 4096)) / 2
        assert attention_s(half, context) == pytest.approx(expected)
    prompt = attention_s(half, 65_536, 65_536) / attention_s(full, 65_536, 65_536)
    assert prompt == pytest.approx(0.5 + 0.5 * (2 * 4096 / 65_536), rel=0.05)
    assert half.model.kv_bytes_per_token == full.model.kv_bytes_per_token


def test_beyond_the_selected_keys_a_context_costs_their_index_alone() -> None:
    """DeepSeek-V3.2's: 2,048 latents of 576 numbers, and a key of 128 of each token."""
    latent = LatentConfig(512, 64, 128, 128, 1536, indexer=IndexerConfig(4, 128, tuple(range(32))))
    config = replace(
        EIGHT_B, latent=latent, attention_kinds=(LatentOptions(0.1, num_selected=2048),)
    )
    costs = CostModel(ServedModel.of(config, "bfloat16"), GPUS["h200"])
    before, after = (costs.step_time([(1, n)], 1).attention_s for n in (4096, 104_096))
    read_s = 100_000 * 128 * 2 / costs.device.kv_bytes_s
    assert after - before == pytest.approx(32 * read_s)
    assert costs.model.kv_bytes_per_token == 32 * 704 * 2


def test_layers_of_unlike_heads_read_what_each_has() -> None:
    """Of two layers the second keeps one head of 16 numbers, an eighth of the first."""
    varied = VariedLayers(
        head_dims=(64, 16), num_kv_heads=(2, 1), kv_sources=(0, 1), has_values=(True, True),
        intermediate_sizes=(8, 8), sparsities=(0.0, 0.0), token_input_size=0, token_input_vocab=0,
    )  # fmt: skip
    config = replace(
        TINY, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64, varied=varied,
        attention_kinds=(AttentionOptions(window=100), AttentionOptions()), kind_of_layer=(0, 1),
    )  # fmt: skip
    model = ServedModel.of(config, "bfloat16")
    assert model.kv_bytes_per_token == 2 * 2 * (2 * 64 + 16)
    costs = CostModel(model, GPUS["h200"])
    short, long = (costs.step_time([(1, n)], 1).attention_s for n in (1000, 101_000))
    read_s = 100_000 * 2 * 2 * 16 / costs.device.kv_bytes_s
    assert long - short == pytest.approx(read_s)


def test_rotary_tables_take_what_they_take() -> None:
    """One for layers with a window, which have a base of their own, and one for the others."""
    kinds = (AttentionOptions(window=64), AttentionOptions())
    windows = replace(
        TINY, attention_kinds=kinds, kind_of_layer=(0,) * (TINY.num_layers - 1) + (1,),
        window_rope_theta=1e3, max_position_embeddings=512,
    )  # fmt: skip
    for config in (TINY, windows):
        build = ModelBuild(
            config, DummyWeights(torch.float32), select_kernels(torch.float32), torch.float32,
            torch.device("cpu"), config.context_length,
        )  # fmt: skip
        model = ServedModel.of(config, "float32")
        tables = LayerRotary(build).tables
        assert model.rotary_bytes == sum(table.num_bytes for table in tables)
        left = 100 * model.kv_bytes_per_token
        taken = model.weight_bytes + model.rotary_bytes
        assert model.fit(taken, is_gpu=True).kv_bytes == 0
        assert model.fit(taken + left, is_gpu=True).kv_tokens == 90


@pytest.mark.parametrize("family", ["embedded", "DeepseekV2", "Qwen2Moe", "GptOss"])
def test_adapters_take_what_their_tables_take(family: str, tmp_path: Path) -> None:
    """Experts and what latent attention absorbs have none, shared experts have."""
    folder = EMBEDDED_MODEL
    if family != "embedded":
        make_mixture(tmp_path, family)
        folder = tmp_path
    config = read_model_config(folder)
    model = ServedModel.of(config, "float32", adapters=AdapterRoom(3, 4))
    tables = ModelRunner(
        folder, config, dtype="float32", max_total_tokens=64, max_model_len=32,
        num_adapter_slots=3, max_adapter_rank=4,
    ).adapter_modules  # fmt: skip
    numbers = sum(shape.in_features + shape.out_features for shape in tables.values())
    assert model.adapter_bytes == 4 * 3 * 4 * numbers


def test_a_fused_layer_has_one_module_for_adapters() -> None:
    tables, fused = AdapterRoom(1, 16), replace(TINY, has_fused_projections=True)
    apart, together = (
        ServedModel.of(config, "bfloat16", adapters=tables) for config in (TINY, fused)
    )
    fewer = TINY.num_layers * 16 * (2 + 1) * TINY.hidden_size  # of qkv, of gates and ups
    assert apart.adapter_bytes - together.adapter_bytes == 2 * fewer


def test_rows_with_adapters_read_as_many_as_there_are() -> None:
    plain, adapted = (
        CostModel(ServedModel.of(EIGHT_B, "bfloat16", adapters=tables), GPUS["h200"])
        for tables in (None, AdapterRoom(8, 64))
    )
    reading_s = []
    for num_rows in (1, 8, 64):
        one, other = (costs.step_time([(1, 0)] * num_rows, 1) for costs in (plain, adapted))
        reading_s.append(other.reading_s - one.reading_s)
        assert other.overhead_s - one.overhead_s == pytest.approx(32 * 4 * 5e-6)
    assert reading_s[1] == pytest.approx(8 * reading_s[0]) == pytest.approx(reading_s[2])
    assert reading_s[1] == pytest.approx(adapted.model.adapter_bytes / (4.8e12 * 0.8))
    fixed_bytes = plain.model.weight_bytes + plain.model.rotary_bytes
    memory_bytes = fixed_bytes + 2 * adapted.model.adapter_bytes
    left = [costs.model.fit(memory_bytes, is_gpu=True).kv_bytes for costs in (plain, adapted)]
    assert left[0] == pytest.approx(2 * left[1], rel=1e-6)


def test_prompts_of_different_adapters_share_nothing() -> None:
    costs = CostModel(ServedModel.of(EIGHT_B, "bfloat16"), GPUS["h100"])
    load = Load(8, 2048, 2000, 16)
    shared, apart = (
        predict_load([costs], replace(load, num_adapters=num), **LIMITS) for num in (1, 8)
    )
    assert apart.ttft_p99_s > 3 * shared.ttft_p99_s


def test_experts_are_read_as_tokens_choose_them() -> None:
    experts = ExpertsConfig(tuple(range(32)), 8, 14336, RoutingOptions(num_chosen=2))
    model = ServedModel.of(replace(EIGHT_B, experts=experts), "bfloat16")
    assert model.shape.num_parameters > 5 * model.shape.num_active_parameters / 2
    costs = CostModel(model, GPUS["h200"])
    one, two, many = (costs.step_time([(1, 0)] * num, num).reading_s for num in (1, 2, 64))
    assert one < two < many < 5 * one


def test_a_load_waits_for_its_prompts_and_shares_what_they_share() -> None:
    costs = CostModel(ServedModel.of(EIGHT_B, "bfloat16"), GPUS["h100"])
    alone = predict_load([costs], Load(1, 2048, 0, 16), **LIMITS)
    crowd = predict_load([costs], Load(32, 2048, 0, 16), **LIMITS)
    shared = predict_load([costs], Load(32, 2048, 2000, 16), **LIMITS)
    assert alone.ttft_s == pytest.approx(costs.step_time([(2048, 0)], 1).total_s, rel=1e-6)
    assert crowd.ttft_p99_s > 10 * alone.ttft_s and shared.ttft_p99_s < crowd.ttft_p99_s / 5
    assert shared.output_tokens_s > 2 * crowd.output_tokens_s


def test_every_client_gets_its_answers() -> None:
    device = ModelledDevice(CostModel(ServedModel.of(TINY, "bfloat16"), GPUS["l4"]))
    load = Load(5, 40, 8, 7, num_rounds=3)
    loop = ClosedLoop(device, load, clock=device.clock, vocab_size=50, **LIMITS)
    duration_s = loop.run()
    assert duration_s == device.now_s > 0 and len(loop.answers) == 15
    assert all(len(answer.token_times_s) == 7 for answer in loop.answers)


def test_the_probe_measures_this_cpu() -> None:
    costs = cost_model(ServedModel.of(TINY, "float32"))
    step = predict_step(costs, NamedStep("", ((1, 100),)))
    assert 1e-4 < step.total_s < 1.0
    assert costs.device.memory_bytes > 1 << 20


def test_a_broken_header_is_named(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None
    for content in (b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"[1,2]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable"):
            stored_weights(tmp_path)


def test_pickled_weights_are_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="PyTorch pickles only"):
        stored_weights(tmp_path)


def test_a_checkpoint_that_was_cut_is_named(tmp_path: Path) -> None:
    content = (EMBEDDED_MODEL / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(ModelLoadError, match="does not fit its place in the file"):
        stored_weights(tmp_path)


def test_files_that_are_not_loaded_are_not_counted(tmp_path: Path) -> None:
    """Copies of the weights in another layout, an adapter, and parts that the index does not
    name."""
    shutil.copy(EMBEDDED_MODEL / "model.safetensors", tmp_path)
    expected = stored_weights(tmp_path)
    for name in ("consolidated", "adapter_model", "model-00001-of-00002"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"whatever")
    assert stored_weights(tmp_path) == expected is not None
    (tmp_path / "model.safetensors").unlink()  # which would count before the index
    names = ("model-a.safetensors", "model-b.safetensors")
    for name in names:
        save_file({name: torch.zeros(3)}, tmp_path / name)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_weights(tmp_path) == StoredWeights(2, 2, 24, ("F32",))
    (tmp_path / "model-b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"is missing, but model\.safetensors\.index\.json"):
        stored_weights(tmp_path)


def test_the_commands_print_data(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--clients", "1", "4", "--prompt-tokens", "64", "--output-tokens", "8", "--json"]
    assert main(["plan", "--device", "h200", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["clients"] for row in report["loads"]] == [1, 4]
    assert report["parameters"] == 4590848 and report["adapter_bytes"] == 0
    assert main(["plan", "--device", "h200", *flags, "--enable-lora", "--max-lora-rank", "8"]) == 0
    adapted = json.loads(capsys.readouterr().out)
    assert adapted["adapter_bytes"] > 0
    assert adapted["loads"][0]["TPOT p50, ms"] > report["loads"][0]["TPOT p50, ms"]
    assert main(["plan", "--clients", "0"]) == 1
    assert "clients" in capsys.readouterr().err


REFUSED: list[tuple[list[str], str]] = [
    (["--device", "rtx3090", "--kv-cache-dtype", "fp8"], "auto or int8 with dtype=bfloat16 on rtx"),
    (["--device", "h200", "--kv-cache-dtype", "int4"], "auto or int8 or fp8 with dtype=bfloat16"),
    (["--device", "h200", "--dtype", "float32"], "rates are known for these"),
    (["--prompt-tokens", "2000", "--output-tokens", "49"], "at most 2,048 with output_tokens"),
    (["--max-running-requests", "100000000"], "an integer in [1, 65536]"),
    (["--chunked-prefill-size", "0"], "an integer in [1, 1048576]"),
    (["--max-lora-rank", "100000"], "an integer in [1, 4096]"),
    (["--max-loras-per-batch", "5000"], "an integer in [1, 1024]"),
    (["--cp-size", "2", "--device", "cpu"], "1 with --device cpu"),
    (["--cp-size", "2", "--engines", "2"], "1 with cp_size > 1"),
    (["--num-threads", "0"], "an integer in [1, 1024]"),
    (["--num-threads", "-3"], "an integer in [1, 1024]"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED)
def test_what_would_not_be_served_is_not_predicted(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in flags else ["--device", "h200"]
    assert main(["plan", *device, *flags]) == 1
    said = capsys.readouterr()
    assert says in said.err and not said.out


def test_weights_that_are_quantized_already_are_planned_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading them with --quantization is refused in the same words."""
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["plan", str(tmp_path), "--device", "h200", "--clients", "1", "--json"]
    assert main([*command, "--quantization", "int8"]) == 1
    refusal = capsys.readouterr().err
    with (
        pytest.raises(InvalidRequest, match="are quantized already") as error,
        open_weights(tmp_path, "auto", "int8", torch.float32, torch.device("cpu")),
    ):
        pass
    assert str(error.value) in refusal
    for flags in ([], ["--quantization", "none"]):
        assert main([*command, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["quantization"] == "int4"


@pytest.mark.parametrize(("kind", "expected"), [("Q4_0", "GGUF"), ("F16", None)])
def test_a_gguf_file_is_quantized_if_one_of_its_tensors_is(
    kind: str, expected: str | None, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("norm", np.zeros(32, np.float32))
    own = gguf.GGMLQuantizationType[kind]
    packed = gguf.quantize(np.zeros((1, 32), np.float32), own)
    writer.add_tensor("weight", packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert stored_method(tmp_path) == expected
    stored = stored_weights(tmp_path)
    assert stored is not None and (stored.num_files, stored.formats) == (1, ("F32", kind))
    assert stored.num_bytes == 4 * 32 + packed.nbytes


def test_the_doctor_says_what_a_model_needs() -> None:
    report = examine_model("tiny", EMBEDDED_MODEL, "bfloat16", 10_000_000, is_gpu=False)
    assert report["architecture"] == "LlamaForCausalLM" and report["parameters"] == 4590848
    assert report["kv_bytes_per_1k_tokens"]["auto"] == 1000 * 6 * 2 * 2 * 64 * 2
    assert report["stored"]["bytes"] == 2 * 4590848 and report["request_tokens"] == 2048
    fits = {fit["quantization"]: fit["requests"] for fit in report["fits"]}
    assert fits == {"none": 0, "int8": 0, "w8a8": 0, "int4": 0}
    roomy = examine_model("tiny", EMBEDDED_MODEL, "bfloat16", 10**9, is_gpu=False)
    assert all(fit["requests"] > 10 for fit in roomy["fits"])
    for fit in roomy["fits"]:
        assert fit["process_bytes"] > PROCESS_BYTES + fit["weight_bytes"]
    on_gpu = examine_model("tiny", EMBEDDED_MODEL, "bfloat16", 10**9, is_gpu=True)
    assert {fit["process_bytes"] for fit in on_gpu["fits"]} == {None}, "the host's is not told"


def test_the_doctor_refuses_a_draft_model_of_other_tokens(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    other = make_long_token(shutil.copytree(model, tmp_path / "other"), 8)
    for draft, answer in (str(model), None), (str(other), "tokens of tiny: token 259 is"):
        with nullcontext() if answer is None else pytest.raises(InvalidRequest, match=answer):
            report = examine_model(
                "tiny", model, "float32", 10**9, is_gpu=False, draft_flags=(draft, 0, "none")
            )
            assert report["draft_bytes"] > 0


def test_the_doctor_says_what_a_rank_needs() -> None:
    """Half of the heads, blocks and vocabulary, in half of a host's memory or all of a GPU's."""
    alone, rank = (
        examine_model("tiny", EMBEDDED_MODEL, "bfloat16", 10**9, is_gpu=False, tp_size=n)
        for n in (1, 2)
    )
    assert rank["parameters"] == alone["parameters"], "of the model"
    assert rank["memory_bytes"] == alone["memory_bytes"] // 2
    kv = [report["kv_bytes_per_1k_tokens"]["auto"] for report in (alone, rank)]
    assert kv[0] == 2 * kv[1]
    for whole, part in zip(alone["fits"], rank["fits"], strict=True):
        assert 0.45 * whole["weight_bytes"] < part["weight_bytes"] < 0.6 * whole["weight_bytes"]
    on_gpu = examine_model("tiny", EMBEDDED_MODEL, "bfloat16", 10**9, is_gpu=True, tp_size=2)
    assert on_gpu["memory_bytes"] == 10**9


def test_the_doctor_says_what_a_stage_needs() -> None:
    """Of layers, embedding and output projection, which all stages together have once."""
    for config in (EIGHT_B, TINY):  # whose projection is its embedding
        whole = ServedModel.of(config, "bfloat16")
        parts = [
            ServedModel.of(part, "bfloat16", stage=stage) for part, stage in parts_of(config, 1, 3)
        ]
        assert sum(each.kv_bytes_per_token for each in parts) == whole.kv_bytes_per_token
        num_bytes = sum(each.weight_bytes for each in parts)
        assert num_bytes == pytest.approx(whole.weight_bytes, rel=1e-3)  # each has a last norm
    alone, stage, token_share = (
        examine_model("tiny", EMBEDDED_MODEL, "bfloat16", 10**9, is_gpu=True, **division)
        for division in ({}, {"pp_size": 2}, {"cp_size": 2})
    )
    kv = [each["kv_bytes_per_1k_tokens"]["auto"] for each in (alone, stage, token_share)]
    assert kv == [kv[0], 4 * kv[0] // 6, kv[0] // 2], "of 6 layers a stage has 4"
    weights = [each["fits"][0]["weight_bytes"] for each in (alone, stage, token_share)]
    assert weights[1] < weights[0] == weights[2]
    tokens = [each["fits"][0]["kv_tokens"] for each in (alone, stage, token_share)]
    assert tokens[1] == pytest.approx(1.5 * tokens[0], rel=0.02) and tokens[2] == 2 * tokens[0]


def test_stages_wait_for_the_first_chunks_to_come_and_the_last_ones_to_leave() -> None:
    parts = parts_of(EIGHT_B, 1, 3)
    stages = [
        CostModel(ServedModel.of(part, "bfloat16", stage=stage), GPUS["h100"])
        for part, stage in parts
    ]
    for num_steps in (1, 5):
        pipeline = Pipeline(3 * [stages[1]])
        for _ in range(num_steps):
            pipeline.pass_through([(256, 0)], 0)
        assert pipeline.lost_share == pytest.approx(2 / (num_steps + 2), rel=0.02)
    chunk = share_of_stage(2048, 3, LIMITS["max_running_requests"])
    alone = predict_load(stages, Load(1, 2048, 0, 2), **LIMITS)
    first_s, _ = prompt_s(stages, 2048, chunk)
    next_s, lost = decode_s(stages, [(1, 2048)])
    assert alone.ttft_s == pytest.approx(first_s) and alone.tpot_s == pytest.approx(next_s)
    assert lost == pytest.approx(2 / 3, rel=0.02), "one request is in one stage at a time"
    _, lost = decode_s(stages, [(1, 2048)] * 3)
    assert lost < 0.1


def test_kv_takes_memory_as_it_is_written_by_the_page() -> None:
    """4 KiB for each vector of a layer, or all of a smaller pool."""
    model = ServedModel.of(read_model_config(EMBEDDED_MODEL), "float32")
    fixed = PROCESS_BYTES + model.weight_bytes + model.rotary_bytes
    num_vectors, vector_bytes = 6 * 2 * 2, 64 * 4
    large, small = (resident_memory(model, 1, pool).start_bytes for pool in (10**6, 10))
    assert large == fixed + num_vectors * 4096
    assert small == fixed + num_vectors * 10 * vector_bytes
    peaks = [resident_memory(model, count, 10**6).peak_bytes for count in (64, 2048)]
    assert fixed < peaks[0] < peaks[1]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, "none"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8"),
    ],
)
def test_a_quantized_checkpoint_is_seen_as_one(
    tmp_path: Path, section: dict[str, Any] | None, expected: str
) -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    written = config if section is None else {**config, "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(written))
    report = examine_model("x", tmp_path, "bfloat16", 10**9, is_gpu=False)
    assert report["stored_quantization"] == expected
    assert report["fits"][0]["quantization"] == expected


@pytest.mark.parametrize(("bits", "expected"), [(4.8, "int4"), (8.5, "int8"), (16.0, "none")])
def test_a_gguf_file_is_seen_by_its_size(tmp_path: Path, bits: float, expected: str) -> None:
    shape = ServedModel.of(TINY, "bfloat16").shape
    (tmp_path / "model.gguf").write_bytes(bytes(int(shape.num_parameters * bits / 8)))
    assert stored_quantization(tmp_path, shape) == expected


def test_recurrent_states_are_counted_and_take_their_share(
    tmp_path: Path,
) -> None:
    make_mixture(tmp_path, "Qwen3_5")
    state = 3 * (3 * 168 * 2 + 6 * 12 * 20 * 4)  # of three layers: a tail, and a wide matrix
    report = examine_model("states", tmp_path, "bfloat16", 10**9, is_gpu=False)
    assert report["state_bytes"] == state
    assert report["kv_bytes_per_1k_tokens"]["auto"] == 1000 * 2 * 2 * 24 * 2  # of one layer
    model = ServedModel.of(read_model_config(tmp_path), "bfloat16")
    few, many = (
        model.fit(10**9, is_gpu=False, max_running_requests=number).kv_bytes for number in (1, 101)
    )
    assert few - many == 50 * state
    step = CostModel(model, GPUS["h200"]).step_time([(1, 9)] * 4, 4)
    stateless = CostModel(replace(model, state_bytes=0), GPUS["h200"]).step_time([(1, 9)] * 4, 4)
    read_s = (step.attention_s - stateless.attention_s) * GPUS["h200"].kv_bytes_s
    assert read_s == pytest.approx(4 * 2 * state)  # read and written, of each row


def test_the_doctor_counts_the_experts_that_a_token_takes(tmp_path: Path) -> None:
    make_mixture(tmp_path, "DeepseekV3")
    report = examine_model("experts", tmp_path, "bfloat16", 10**8, is_gpu=True)
    idle = 5 * 3 * 64 * 24  # a token takes 3 of 8 experts of 3 matrices, in one of the two layers
    assert report["parameters"] - report["active_parameters"] == idle
    assert report["kv_bytes_per_1k_tokens"] == {"auto": 1000 * 2 * (32 + 16) * 2}
    assert [fit["quantization"] for fit in report["fits"]] == ["none", "int8", "w8a8", "int4"]
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    change_config(tmp_path, quantization_config=packed)
    report = examine_model("experts", tmp_path, "bfloat16", 10**8, is_gpu=True)
    assert [fit["quantization"] for fit in report["fits"]] == ["int4"]


def test_experts_alone_are_counted_in_four_bits(tmp_path: Path) -> None:
    """Of gpt-oss as it is published; its scales have 4 bytes on a device, one in the file."""
    make_mixture(tmp_path, "GptOss", dtype=torch.bfloat16, intermediate_size=64, hidden_size=64)
    pack_experts(tmp_path)
    report = examine_model("gpt-oss", tmp_path, "bfloat16", 10**8, is_gpu=True)
    assert report["stored_quantization"] == "mxfp4" and len(report["fits"]) == 1
    num_scales = 2 * 6 * 3 * 64 * 64 // 32
    assert report["fits"][0]["weight_bytes"] == report["stored"]["bytes"] + 3 * num_scales
    (tmp_path / "model.safetensors").unlink()
    assert ServedModel.of(read_model_config(tmp_path), "bfloat16", "mxfp4").weight_bytes
