"""An adapter's files: what they may ask for of which modules, and what is wrong with bad ones."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.lora import module_patterns
from stemma.runtime.checkpoint.lora.adapter import Adapter, ModuleShape, read_adapter

MODULES = {
    f"model.layers.{i}.self_attn.{part}_proj": ModuleShape(32, out)
    for i in range(2)
    for part, out in (("q", 64), ("v", 32))
}


def read(folder: Path) -> Adapter:
    """Checked against MODULES; its weights are the modules as they were found."""
    return read_adapter("x", folder, MODULES, 16, list)


def names_of(adapter: Adapter) -> list[str]:
    assert isinstance(adapter.weights, list)
    return [module.name for module in adapter.weights]


def with_field(folder: Path, field: str, value: object) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha_pattern": {"(?i)q_proj": 3}}, "'alpha_pattern': expected regular expressions"),
        ({"layers_to_transform": [0], "layers_pattern": "(layers)"}, "'layers_pattern': expected"),
        ({"lora_alpha": 10**400}, "'lora_alpha': expected a positive number"),
        ({"lora_alpha": float("inf")}, "'lora_alpha': expected a positive number"),
        ({"peft_type": "IA3"}, "'peft_type': expected 'LORA', found 'IA3'"),
        ({"bias": "all"}, "'bias': expected 'none'"),
        ({"use_dora": True}, "'use_dora'"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out'"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights'"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication'"),
        ({"target_parameters": ["x"]}, "'target_parameters'"),
        ({"r": 0}, "'r': expected a positive integer"),
        ({"lora_alpha": "x"}, "'lora_alpha'"),
        ({"target_modules": None}, "'target_modules'"),
        ({"target_modules": "("}, "'target_modules'.*regular expression"),
        ({"target_modules": ["q_proj"]}, "v_proj has tensors, but target_modules"),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}, "layers.1.* says"),
        ({"r": 3}, "lora_A.weight': expected shape .3, 32., found .4, 32."),
        ({"target_modules": "a{99999999999}"}, "'target_modules': .* repetition number"),
        ({"target_modules": "(" * 3000}, "'target_modules': expected regular expressions"),
        ({"target_modules": "q" * 5000}, "'target_modules': .* 4096 characters, not 5000"),
        ({"rank_pattern": {str(i): 1 for i in range(5000)}}, "'rank_pattern': .*4096 entries"),
        ({"target_modules": ["q_proj"] * 5000}, "'target_modules': expected a list of up to 4096"),
        ({"revision": "x" * (1 << 20)}, "has more than 1048576 bytes"),
        ({"r": 512}, "rank 512; .* up to 16; start it with max_lora_rank=512"),
    ],
)
def test_what_an_adapter_asks_for_in_vain_is_named(
    fields: dict[str, Any], message: str, tmp_path: Path, qv: Path
) -> None:
    make_adapter(tmp_path, qv, ("q_proj", "v_proj"), **fields)
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


@pytest.fixture(scope="module")
def qv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qv"), hidden_size=32, head_dim=16)


def test_an_adapter_of_another_model_and_a_folder_that_is_not_there_are_said_to_be_so(
    tmp_path: Path, qv: Path
) -> None:
    wider = make_checkpoint(tmp_path / "wider", hidden_size=48, head_dim=16, num_layers=1)
    of_wider = make_adapter(tmp_path / "adapter", wider, ("q_proj", "v_proj"))
    with pytest.raises(ModelLoadError, match=r"expected shape .*32., found .*48."):
        read(of_wider)
    shallow = make_checkpoint(tmp_path / "a", hidden_size=32, head_dim=16, num_layers=1)
    of_shallow = make_adapter(tmp_path / "shallow", shallow, ("q_proj", "v_proj"))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.\S* has no tensors.* another model\?"):
        read(of_shallow)
    with pytest.raises(ModelLoadError, match=f"there is no folder {tmp_path}/none"):
        read(tmp_path / "none")


def test_targets_by_regex_layers_and_exclusion(tmp_path: Path, qv: Path) -> None:
    make_adapter(tmp_path, qv, ("q_proj", "v_proj"))
    both = read(tmp_path)
    config = (tmp_path / "adapter_config.json").read_text()
    for words in ('".*self_attn.(q|v)_proj"', '"all-linear"', '["self_attn.q_proj", "v_proj"]'):
        changed = config.replace('["q_proj", "v_proj"]', words)
        (tmp_path / "adapter_config.json").write_text(changed)
        again = read(tmp_path)
        assert names_of(again) == names_of(both)
        assert again.revision != both.revision, "a config may change what an adapter does"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "lm_head"), "takes no adapter at lm_head; it does at q_proj, v_proj"),
        (("q_proj", "embed_tokens"), "takes no adapter at model.embed_tokens"),
    ],
)
def test_modules_that_take_none_are_named(
    targets: tuple[str, ...], message: str, tmp_path: Path, qv: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(make_adapter(tmp_path, qv, targets))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'.*lm_head"),
        ({"modules_to_save": ["embed_tokens"]}, "'modules_to_save'.*embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "takes no adapter at lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "no adapter at model.embed_tokens"),
        ({"target_modules": ["lm_head"]}, "takes no adapter at lm_head"),
        ({"trainable_token_indices": [3, 5]}, "'trainable_token_indices'"),
    ],
)
def test_embeddings_and_heads_that_peft_has_trained_are_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path, qv: Path
) -> None:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(qv)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


def test_tensors_that_are_no_floats_are_named(tmp_path: Path, qv: Path) -> None:
    make_adapter(tmp_path, qv, ("q_proj", "v_proj"), dtype=torch.int8)
    with pytest.raises(ModelLoadError, match=r"lora_A.* expected BF16, .* found I8"):
        read(tmp_path)


def test_missing_broken_and_pickled_files_are_named(tmp_path: Path, qv: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is missing"):
        read(tmp_path)
    file = make_adapter(tmp_path, qv, ("q_proj", "v_proj")) / "adapter_model.safetensors"
    file.write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        read(tmp_path)
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(ModelLoadError, match="is a pickle"):
        read(tmp_path)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_regular_expression_that_takes_forever_ends_at_its_limit(
    field: str, tmp_path: Path, qv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter, which Python's own matcher would hold, goes on meanwhile."""
    monkeypatch.setattr(module_patterns, "LIMIT_S", 0)
    monkeypatch.setattr(module_patterns, "_GRACE_S", 1.0)
    bomb = r"([a-z0-9_.]+)+!"
    make_adapter(tmp_path, qv, ("q_proj", "v_proj"))
    with_field(tmp_path, field, {bomb: 4} if field == "rank_pattern" else bomb)
    num_naps = 0
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, tmp_path)
        while not reading.done():
            time.sleep(0.01)
            num_naps += 1
        with pytest.raises(ModelLoadError, match=f"{field}.*matching takes more than"):
            reading.result()
    assert num_naps > 5


def test_usual_regular_expressions_target_as_peft_does(tmp_path: Path, qv: Path) -> None:
    make_adapter(tmp_path, qv, ("q_proj", "v_proj"))
    both = names_of(read(tmp_path))
    for pattern in (
        r"^(?!.*(?:visual|merger)).*(?:q_proj|v_proj).*",
        r"(?:.*?(?:language|self_attn).*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.x)",
        r"(?i)MODEL\..*\.[QV]_PROJ",
    ):
        assert names_of(read(with_field(tmp_path, "target_modules", pattern))) == both


@pytest.mark.parametrize("cut", [1, 1000, -1])
def test_a_file_that_is_cut_or_longer_is_refused(tmp_path: Path, qv: Path, cut: int) -> None:
    file = make_adapter(tmp_path, qv, ("q_proj", "v_proj")) / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-cut] if cut > 0 else data + b"x")
    with pytest.raises(ModelLoadError, match=r"not a readable safetensors file: .*(fit|has)"):
        read(tmp_path)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(
    tmp_path: Path, qv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_adapter(tmp_path, qv, ("q_proj", "v_proj")) / "adapter_model.safetensors"
    real, size = os.preadv, file.stat().st_size

    def cut(descriptor: int, buffers: Any, offset: int) -> int:
        os.truncate(file, size - 100)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(ModelLoadError, match="has become shorter while it was read"):
        read(tmp_path)
