"""LoRA adapters through the whole runtime: equal to merged weights, apart from each other."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from adapters import ALL_LINEAR, make_adapter, merged
from checkpoints import make_byte_tokenizer, make_checkpoint
from fakes import FakeListener
from mixtures import FAMILIES, make_mixture
from quantized_checkpoints import write_act_ordered
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.cli.connect import engine_options
from stemma.errors import InvalidRequest, ModelLoadError, ModelNotFound
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.frontend.client.engine_process import _flags
from stemma.runtime.checkpoint.lora import loader
from stemma.runtime.checkpoint.lora.adapter import Adapter, AdapterModule, ModuleShape
from stemma.runtime.checkpoint.lora.registry import AdapterRegistry
from stemma.runtime.config import EngineConfig, add_engine_flags, engine_config
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.queue.adapter_slots import AdapterSlots
from stemma.runtime.schedule.request import FinishReason, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

PROMPT = tuple(range(60, 90))


def load(checkpoint: Path, *adapters: Path, **options: Any) -> LoadedModel:
    """Adapters are named after their folders; float32 through the reference unless told."""
    options = {"dtype": "float32", "kernels": "reference", "max_total_tokens": 1024} | options
    paths = [(folder.name, folder) for folder in adapters]
    return LoadedModel(EngineConfig(model=checkpoint, lora_paths=paths, **options))


def request_of(
    loaded: LoadedModel, adapter: str | None, prompt: Sequence[int] = PROMPT, **fields: Any
) -> Request:
    assert loaded.adapters is not None or adapter is None
    found = None
    if adapter is not None and loaded.adapters is not None:
        found = loaded.adapters.find(adapter)
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 6), temperature=0.0)
    return Request(
        loaded.engine.next_request_id(),
        array("i", prompt),
        sampling,
        FakeListener(),
        namespace="" if found is None else found.namespace(""),
        adapter=found,
        **fields,
    )


def run(loaded: LoadedModel, *requests: Request) -> None:
    for request in requests:
        loaded.engine.submit(request)
    while loaded.engine.has_work:
        loaded.engine.step()
        loaded.engine.scheduler.check()


def scores_of(loaded: LoadedModel, adapter: str | None) -> list[float]:
    """Log probabilities of the prompt's own tokens."""
    request = request_of(loaded, adapter, scoring=Scoring(0, PROMPT[1:]))
    run(loaded, request)
    assert request.finish_reason is FinishReason.STOP, request.error
    return request.scores


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "base", hidden_size=32)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "qwen2"
    return make_checkpoint(folder, "qwen2", hidden_size=32, tie_word_embeddings=True)


# --- equal to merged weights ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("targets", "fields"),
    [
        (ALL_LINEAR, {}),
        (("q_proj", "v_proj"), {"use_rslora": True}),
        (("k_proj", "o_proj"), {"infix": ".default"}),
        (("gate_proj",), {"dtype": torch.bfloat16}),
        (("up_proj", "down_proj"), {"alpha_pattern": {"up_proj": 3}}),
        (ALL_LINEAR, {"rank_pattern": {"down_proj": 7, "q_proj": 1}}),
    ],
)
def test_an_adapter_equals_its_merged_weights(
    family: str,
    targets: tuple[str, ...],
    fields: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    base = request.getfixturevalue(family)
    adapter = make_adapter(tmp_path / "own", base, targets, **fields)
    found = scores_of(load(base, adapter), "own")
    expected = scores_of(load(merged(tmp_path / "merged", base, adapter)), None)
    plain = scores_of(load(base), None)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert (torch.tensor(found) - torch.tensor(plain)).abs().max() > 0.1


def test_an_adapter_sees_inputs_in_order_beside_weights_that_do_not(
    llama: Path, tmp_path: Path
) -> None:
    packed, plain = write_act_ordered(llama, tmp_path)
    adapter = make_adapter(tmp_path / "own", plain)
    found, expected, without = (
        torch.tensor(scores_of(load(folder, adapter), name))
        for folder, name in ((packed, "own"), (plain, "own"), (packed, None))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - without).abs().max() > 0.1


PHI = {"head_dim": 16, "num_key_value_heads": 2, "original_max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "targets", "fields"),
    [
        ("Phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), PHI),  # stacked in files
        ("Gemma2", ALL_LINEAR, GEMMA),  # gelu, soft caps, windows
        ("Qwen2Moe", ("q_proj", "o_proj", "shared_expert.up_proj"), {}),
        ("Ernie4_5_Moe", ("q_proj", "k_proj", "v_proj", "shared_experts.up_proj"), {}),
        ("StableLm", ALL_LINEAR, {**HEADS, "use_parallel_residual": True}),
        ("Phi", ("q_proj", "k_proj", "dense", "fc1", "fc2"), HEADS),
        ("Glm4", ("q_proj", "v_proj", "gate_up_proj"), {**HEADS, "head_dim": 24}),  # GLM's pairs
        ("DeepseekV2", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"), {}),
        ("Nemotron", ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"), {}),
        ("NemotronH", ("q_proj", "o_proj", "mixer.up_proj", "in_proj", "out_proj"), {}),
        (
            "KimiLinear",
            ("q_proj", "v_proj", "kv_a_proj_with_mqa", "o_proj", "shared_experts.up_proj"),
            {},
        ),
        ("Llama4", ("q_proj", "k_proj", "o_proj", "shared_expert.up_proj"), {}),
        ("Gemma3n", ALL_LINEAR, {}),
        ("Gemma4", ALL_LINEAR, {}),
        ("Qwen3_5", ALL_LINEAR, {}),
    ],
)
def test_other_families_equal_their_merged_weights(
    family: str,
    targets: tuple[str, ...],
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = tmp_path / "base"
    monkeypatch.setitem(FAMILIES, family, FAMILIES.get(family, {}))
    make_mixture(base, family, has_tokenizer=True, **fields)
    adapter = make_adapter(tmp_path / "own", base, targets)
    found = torch.tensor(scores_of(load(base, adapter), "own"))
    expected = scores_of(load(merged(tmp_path / "merged", base, adapter)), None)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=2e-4, atol=2e-4)
    assert (found - torch.tensor(scores_of(load(base), None))).abs().max() > 0.05


@pytest.mark.parametrize(
    ("family", "target"),
    [("Qwen2Moe", "experts.1.up_proj"), ("Qwen2Moe", "mlp.gate"), ("DeepseekV2", "kv_b_proj")],
)
def test_what_takes_no_adapter_in_a_family_is_named(
    family: str, target: str, tmp_path: Path
) -> None:
    make_mixture(tmp_path / "base", family, has_tokenizer=True)
    adapter = make_adapter(tmp_path / "own", tmp_path / "base", ("o_proj", target))
    with pytest.raises(ModelLoadError, match=f"takes no adapter at .*{target}"):
        load(tmp_path / "base", adapter)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_adapters_are_added_to_quantized_weights(llama: Path, tmp_path: Path, kernels: str) -> None:
    adapter = make_adapter(tmp_path / "own", llama, std=0.1)
    quantized = load(llama, adapter, quantization="int8", kernels=kernels)
    exact = load(llama, adapter)
    (q_base, q_own), (base, own) = (
        [torch.tensor(scores_of(loaded, name)) for name in (None, "own")]
        for loaded in (quantized, exact)
    )
    error = (q_base - base).abs().max()
    assert 0 < (q_own - own).abs().max() < 3 * error
    assert (q_own - q_base).abs().max() > 10 * error


def assert_as_peft(model: Any, base: Path, folder: Path, **fields: Any) -> None:
    """What PEFT makes of a model computes here, of the checkpoint, what it does there."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **fields)
    wrapped = peft.get_peft_model(model, config).eval()
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    with torch.no_grad():
        logprobs = wrapped(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = logprobs[torch.arange(len(PROMPT) - 1), list(PROMPT[1:])]
    found = torch.tensor(scores_of(load(base, folder), folder.name))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - torch.tensor(scores_of(load(base), None))).abs().max() > 0.05


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear", "use_rslora": True},
        {
            "target_modules": ["q_proj", "v_proj", "model.layers.0.mlp.down_proj"],
            "exclude_modules": ["layers.0.self_attn.v_proj"],
            "rank_pattern": {"^model.layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {"v_proj": 3},
        },
    ],
)
def test_an_adapter_that_peft_has_saved_computes_what_peft_does(
    llama: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert_as_peft(model, llama, tmp_path / "saved", **fields)


@pytest.fixture(scope="module")
def gemma_with_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("lora") / "images"
    text = {
        "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
        "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
        "num_attention_heads": 1, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, dtype="float32"
    )
    torch.manual_seed(1)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    make_byte_tokenizer(folder)
    return folder


def test_an_adapter_of_a_decoder_within_a_model_has_the_names_of_transformers(
    gemma_with_images: Path, tmp_path: Path
) -> None:
    """Its patterns too: `model.language_model`, and the checkpoint says `language_model.model`."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(gemma_with_images)
    own = "model.language_model.layers"
    fields = {
        "target_modules": r"model\.language_model.*\.(q|v|up)_proj",
        "exclude_modules": [f"{own}.0.self_attn.v_proj"],
        "rank_pattern": {f"^{own}.1.self_attn.q_proj": 2},
        "alpha_pattern": {f"{own}.0.mlp.up_proj": 3},
    }
    assert_as_peft(model, gemma_with_images, tmp_path / "saved", **fields)


def test_an_adapter_of_a_decoder_within_a_model_may_have_the_checkpoints_names(
    gemma_with_images: Path, tmp_path: Path
) -> None:
    targets = [
        f"language_model.model.layers.{layer}.self_attn.{part}_proj"
        for layer in range(2)
        for part in "qo"
    ]
    adapter = make_adapter(tmp_path / "own", gemma_with_images, targets)
    found = torch.tensor(scores_of(load(gemma_with_images, adapter), "own"))
    expected = scores_of(load(merged(tmp_path / "merged", gemma_with_images, adapter)), None)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"dtype": "auto"}, {"kernels": "cpu"}, {"device": "cuda"}])
def test_fast_kernels_agree_with_the_reference(tmp_path: Path, options: dict[str, Any]) -> None:
    """Without an adapter too, whose steps may be captured ones."""
    base = make_checkpoint(tmp_path / "base", num_layers=1, hidden_size=32, intermediate_size=32)
    adapter = make_adapter(tmp_path / "own", base, std=0.1)
    true, fast = load(base, adapter), load(base, adapter, **{"kernels": "auto", **options})
    tolerance = 0.3 if fast.runner.dtype is torch.bfloat16 else 1e-3
    plain, adapted = (torch.tensor(scores_of(fast, name)) for name in (None, "own"))
    assert (plain - torch.tensor(scores_of(true, None))).abs().max() < tolerance
    assert (adapted - torch.tensor(scores_of(true, "own"))).abs().max() < tolerance
    assert (adapted - plain).abs().max() > 0.5


# --- slots ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / f"a{i}", llama, seed=i, rank=2 + i) for i in range(4)]


def outputs_of(loaded: LoadedModel, names: Sequence[str | None]) -> list[list[int]]:
    requests = [request_of(loaded, name) for name in names]
    run(loaded, *requests)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    return [list(request.output_ids) for request in requests]


def test_more_adapters_than_slots_take_turns(llama: Path, four: list[Path]) -> None:
    names = ["a0", "a1", None, "a2", "a3", "a1", None, "a0"]
    alone = [outputs_of(load(llama, *four, max_loras_per_batch=1), [name])[0] for name in names]
    loaded = load(llama, *four, max_loras_per_batch=2)
    assert outputs_of(loaded, names) == alone
    assert len({tuple(output) for output in alone}) == 5, "adapters that say the same test nothing"
    told = loaded.engine.describe()["lora"]
    assert told["num_evictions"] == told["num_loads"] - 2 >= 2
    assert told["num_in_use"] == 0
    assert outputs_of(loaded, names[::-1]) == alone[::-1]


def test_the_least_recently_used_adapter_is_evicted_and_read_again() -> None:
    loads: list[tuple[int, str]] = []
    slots = AdapterSlots(2, lambda slot, adapter: loads.append((slot, adapter.revision)))
    a, b, c = (Adapter(name, Path(name), name, 1, None) for name in "abc")
    for adapter in (a, b, a, c, a, b):
        slots.acquire(adapter)
        slots.check([adapter])
        slots.release(adapter)
    assert [revision for _, revision in loads] == ["a", "b", "c", "b"]
    assert slots.num_evictions == 2


def test_a_slot_in_use_is_never_filled_anew() -> None:
    slots = AdapterSlots(2, lambda slot, adapter: None)
    a, b, c = (Adapter(name, Path(name), name, 1, None) for name in "abc")
    at_a, at_b = slots.acquire(a), slots.acquire(b)
    assert not slots.has_room("c") and slots.has_room("a")
    slots.release(b)
    assert slots.has_room("c") and slots.acquire(c) == at_b
    assert slots.acquire(a) == at_a


def test_who_waits_for_a_slot_holds_up_nobody_who_needs_none(llama: Path, four: list[Path]) -> None:
    """However many there are, and whoever has the adapter on the device."""
    loaded = load(llama, *four, max_loras_per_batch=1, max_running_requests=8)
    long = request_of(loaded, "a0", max_tokens=60)
    loaded.engine.submit(long)
    loaded.engine.step()
    for index in range(60):
        loaded.engine.submit(request_of(loaded, f"a{1 + index % 3}", PROMPT[index % 7 :]))
    others = [request_of(loaded, name, PROMPT[3:], max_tokens=2) for name in (None, "a0")]
    for request in others:
        loaded.engine.submit(request)
    for _ in range(6):
        loaded.engine.step()
        loaded.engine.scheduler.check()
    assert all(request.is_finished for request in others) and not long.is_finished
    assert loaded.engine.scheduler.num_waiting == 60
    run(loaded)
    assert not loaded.engine.scheduler.num_waiting


def test_who_waits_for_a_slot_is_not_passed_by_forever(llama: Path, four: list[Path]) -> None:
    """A stream of requests for the adapter on the device, and one that wants the slot."""
    loaded = load(llama, *four, max_loras_per_batch=1, max_running_requests=2)
    loaded.engine.scheduler.waiting._max_overtakes = 4
    wanted, num_before = request_of(loaded, "a1"), 0
    loaded.engine.submit(request_of(loaded, "a0"))
    loaded.engine.step()
    loaded.engine.submit(wanted)
    while not wanted.is_finished:
        if loaded.engine.scheduler.num_waiting < 3:
            loaded.engine.submit(request_of(loaded, "a0"))
            num_before += 1
        loaded.engine.step()
        loaded.engine.scheduler.check()
        assert num_before < 60
    run(loaded)


def test_the_same_prompt_shares_no_kv_across_adapters(llama: Path, four: list[Path]) -> None:
    loaded = load(llama, *four)
    for name in (None, "a0", "a1"):
        cold, warm = request_of(loaded, name), request_of(loaded, name)
        run(loaded, cold)
        run(loaded, warm)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, len(PROMPT) - 1)
        assert cold.output_ids == warm.output_ids


def test_two_names_of_one_adapter_share_its_slot_and_its_kv(llama: Path, four: list[Path]) -> None:
    loaded = load(llama, four[0], max_loras_per_batch=1)
    assert loaded.adapters is not None
    loaded.adapters.load("alias", four[0])
    first, second = request_of(loaded, "a0"), request_of(loaded, "alias")
    run(loaded, first)
    run(loaded, second)
    assert second.num_cached_tokens == len(PROMPT) - 1
    assert loaded.engine.describe()["lora"]["num_loads"] == 1


def test_files_that_change_or_go_change_nothing_until_they_are_loaded_again(
    llama: Path, four: list[Path], tmp_path: Path
) -> None:
    """Of the same size and time, so that only their bytes tell."""
    own = tmp_path / "own"
    shutil.copytree(four[0], own)
    loaded = load(llama, own, max_loras_per_batch=1)
    registry = loaded.adapters
    assert registry is not None
    before = registry.find("own")
    said = outputs_of(loaded, ["own"])
    file = own / "adapter_model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    changed = bytearray(file.read_bytes())
    changed[-100:] = bytes(100)
    file.write_bytes(changed)
    os.utime(file, ns=times)
    registry.load("other", four[0])  # whose content is what `own` had
    assert registry.find("other").revision == before.revision
    registry.unload("own")
    loaded.engine.flush_cache()
    assert outputs_of(loaded, ["other"]) == said
    after = registry.load("own", own)
    assert (after.revision != before.revision) and file.stat().st_mtime_ns == times[1]
    fresh = request_of(loaded, "own")
    run(loaded, fresh)
    assert fresh.num_cached_tokens == 0
    assert loaded.engine.describe()["lora"]["num_loads"] == 2
    file.unlink()
    assert list(fresh.output_ids) == outputs_of(loaded, ["other", "own"])[1]


# --- beside the loop ------------------------------------------------------------------------------


@pytest.fixture
def served(llama: Path) -> Iterator[tuple[LoadedModel, Backend]]:
    loaded = load(llama, enable_lora=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = Gateway(loaded, ["inproc://lora"], context=context)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection("inproc://lora", context=context))
    yield loaded, backend
    backend.connection.close()
    gateway.stop()
    thread.join(PATIENCE_S)


@st.function
def short(s: st.ProgramState, lora: str | None = None) -> None:
    s += "a" + st.gen("text", max_tokens=2, ignore_eos=True, lora_path=lora)


def test_requests_are_computed_while_an_adapter_is_read(
    served: tuple[LoadedModel, Backend], four: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, backend = served[0].adapters, served[1]
    assert registry is not None
    is_reading, may_end, prepare = threading.Event(), threading.Event(), registry._prepare

    def slow(modules: Sequence[AdapterModule]) -> object:
        is_reading.set()
        assert may_end.wait(PATIENCE_S)
        return prepare(modules)

    monkeypatch.setattr(registry, "_prepare", slow)
    asked = (("one", four[0]), ("two", four[0]), ("one", four[1]), ("one", four[0]))
    with ThreadPoolExecutor() as pool:
        loads = [pool.submit(backend.load_lora_adapter, *each) for each in asked]
        assert is_reading.wait(PATIENCE_S)
        assert short.run(backend=backend)["text"]
        assert registry.adapters == () and not any(each.done() for each in loads)
        with pytest.raises(st.ProgramError, match="'one' does not exist"):
            short.run("one", backend=backend)["text"]
        may_end.set()
        errors = [each.exception() for each in loads]
    assert sorted(adapter.name for adapter in registry.adapters) == ["one", "two"]
    refused = [str(error).count("not taken") for error in errors if error is not None]
    assert set(refused) == {1} and 1 <= len(refused) <= 2  # whichever "one" is asked for first
    assert short.run("two", backend=backend)["text"]


def test_what_fails_beside_the_loop_is_told(
    served: tuple[LoadedModel, Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backend = served
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is missing"):
        backend.load_lora_adapter("bad", tmp_path)
    monkeypatch.setattr(loader, "MAX_WAITING", 0)
    with pytest.raises(st.EngineError, match="0 adapters wait to be loaded; try again later"):
        backend.load_lora_adapter("bad", tmp_path)
    with pytest.raises(InvalidRequest, match="lora_name"):
        backend.load_lora_adapter("two\nlines", tmp_path)


def test_who_asks_again_for_the_same_adapter_has_it(
    served: tuple[LoadedModel, Backend], four: list[Path]
) -> None:
    """As one does who has not heard the first answer; another adapter does not take the name."""
    registry, backend = served[0].adapters, served[1]
    assert registry is not None
    backend.load_lora_adapter("own", four[0])
    first = registry.find("own")
    backend.load_lora_adapter("own", four[0])
    assert registry.find("own") is first
    with pytest.raises(InvalidRequest, match="a name that is not taken"):
        backend.load_lora_adapter("own", four[1])
    assert registry.find("own") is first


def test_loading_an_adapter_is_waited_for_as_long_as_it_takes(
    served: tuple[LoadedModel, Backend], four: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, backend = served[0].adapters, served[1]
    assert registry is not None
    prepare = registry._prepare

    def slow(modules: Sequence[AdapterModule]) -> object:
        time.sleep(0.3)
        return prepare(modules)

    monkeypatch.setattr(registry, "_prepare", slow)
    monkeypatch.setattr(Connection.call, "__defaults__", (0.05,))
    backend.load_lora_adapter("own", four[0])
    assert registry.find("own").name == "own"


def test_an_adapter_that_is_forgotten_leaves_memory(
    llama: Path, four: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has read it does not hold it while it waits for the next."""
    registry = load(llama, enable_lora=True).adapters
    assert registry is not None
    monkeypatch.setattr(registry, "_prepare", lambda modules: set())  # may be weakly held
    adapters, told = loader.AdapterLoader(registry), threading.Event()
    adapters.load("own", str(four[0]), lambda outcome: told.set())
    wait_until(lambda: adapters.collect() or told.is_set())
    weights = weakref.ref(registry.find("own").weights)
    registry.unload("own")
    wait_until(lambda: weights() is None)
    adapters.close()


@pytest.mark.parametrize("has_thread", [False, True])
def test_a_loader_that_is_closed_leaves_no_descriptors(llama: Path, has_thread: bool) -> None:
    """Neither one that reads at the time: what it has read then is nobody's."""
    registry = load(llama, enable_lora=True).adapters
    assert registry is not None
    adapters = loader.AdapterLoader(registry)
    ends = [os.readlink(f"/proc/self/fd/{adapters.fileno()}")]
    if has_thread:
        adapters.load("own", "/nowhere", lambda outcome: None)
    adapters.close()
    if adapters._thread is not None:
        adapters._thread.join(PATIENCE_S)
    links = [link for each in os.listdir("/proc/self/fd") if (link := _target(each))]
    assert not set(ends) & set(links)


def _target(descriptor: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return None


# --- names ----------------------------------------------------------------------------------------


def test_an_adapter_is_found_by_its_name_alone_and_behind_the_models(
    llama: Path, four: list[Path]
) -> None:
    registry = load(llama, *four[:2]).adapters
    assert registry is not None
    assert registry.find("a1") is registry.find(f"{llama.name}:a1") is registry.adapters[1]
    with pytest.raises(ModelNotFound, match=r"'a7' does not exist.*its adapters are 'a0', 'a1'"):
        registry.find("a7")
    registry.unload(f"{llama.name}:a1")
    with pytest.raises(ModelNotFound, match="'a1' does not exist"):
        registry.find("a1")


def test_an_unloaded_adapter_serves_who_had_it_before(llama: Path, four: list[Path]) -> None:
    loaded = load(llama, *four[:2])
    assert loaded.adapters is not None
    (expected,) = outputs_of(loaded, ["a1"])
    request = request_of(loaded, "a1")
    loaded.adapters.unload("a1")
    run(loaded, request)
    assert list(request.output_ids) == expected


def test_names_that_are_taken_or_too_many_are_refused(four: list[Path]) -> None:
    modules: dict[str, ModuleShape] = {}
    registry = AdapterRegistry("base", modules, max_rank=8, prepare=list, max_adapters=0)
    ambiguous, unclear = ("base", "base:own", "default"), (" x", "x ", "a\nb", "a\0b", "\ud800")
    for name in (*ambiguous, *unclear, "", " ", "x" * 129, "a=b"):
        with pytest.raises(InvalidRequest, match=r"lora_name=.* 1 to 128 printable characters"):
            registry.load(name, four[0])
    with pytest.raises(InvalidRequest, match="max_loaded_loras"):
        registry.load("other", four[0])


def test_flags_reach_the_engine_that_a_command_starts() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    given = ["--lora-paths", "a=/x/y", "b=/z=1", "/plain", "--max-loras-per-batch", "3"]
    args = parser.parse_args([*given, "--lora-root", "/x"])
    again = parser.parse_args(_flags(engine_options(args)))
    config = engine_config(again)
    paths = [("a", Path("/x/y")), ("b", Path("/z=1")), ("/plain", Path("/plain"))]
    assert (list(config.lora_paths), config.max_loras_per_batch) == (paths, 3)
    assert config.has_lora and config.lora_root == Path("/x")
    for fields in ({"max_loaded_loras": 1}, {"lora_paths": [paths[0], paths[0]]}):
        with pytest.raises(InvalidRequest):
            EngineConfig(**{"lora_paths": paths, **fields})


def test_a_rank_that_no_table_should_have_is_refused_at_the_start(
    llama: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "own", llama)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 10**9}))
    with pytest.raises(ModelLoadError, match="rank 1000000000; at most 4096"):
        load(llama, adapter)
