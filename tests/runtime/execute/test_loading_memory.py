"""What loading takes: little more than the weights as they are kept, also while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stemma.runtime.checkpoint.quantized.quantized_copy import write_quantized_copy
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.models.model_tensors import model_tensors

HIDDEN, SIZE, NUM_LAYERS, VOCAB = 512, 1536, 8, 2000  # 49 MB in bfloat16
ROOM = 8 * 2**20  # for what is no weight: the KV pool, a converted chunk, the allocator

CODE = """
import gc, json, sys, torch
from pathlib import Path
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.registry import select_kernels
from stemma.runtime.execute import model_runner
from stemma.runtime.checkpoint.config.model_config import ModelConfig
from stemma.runtime.models.model_config import read_model_config

def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    kept = dict(line.split(":") for line in lines)
    return {name: int(kept[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}

def load(folder, quantization, kernels):
    return model_runner.ModelRunner(
        folder, read_model_config(Path(folder)), dtype="bfloat16", kernels=kernels,
        quantization=quantization, max_total_tokens=16, max_model_len=8, max_running_requests=1,
    )

# These keep weights as they get them: what a backend makes of them is its own account.
kernels = select_kernels(torch.bfloat16, "cpu", "reference")
load(sys.argv[1], "int4", kernels)  # imports, pools of threads
results = {}
for folder, quantization in zip(sys.argv[2::2], sys.argv[3::2]):
    gc.collect()
    before = memory()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    runner = load(folder, quantization, kernels)
    after = memory()
    results[f"{Path(folder).name} {quantization}"] = (
        after["VmRSS"] - before, after["VmHWM"] - before
    )
    del runner
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    folder.mkdir()
    sizes = {"self_attn.q_proj": (512, HIDDEN), "self_attn.k_proj": (128, HIDDEN),
             "self_attn.v_proj": (128, HIDDEN), "self_attn.o_proj": (HIDDEN, 512),
             "mlp.gate_proj": (SIZE, HIDDEN), "mlp.up_proj": (SIZE, HIDDEN),
             "mlp.down_proj": (HIDDEN, SIZE)}  # fmt: skip
    tensors = {name: torch.randn(VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm"] = torch.ones(HIDDEN)
    for layer in (f"model.layers.{index}" for index in range(NUM_LAYERS)):
        tensors |= {f"{layer}.{name}": torch.randn(shape) for name, shape in sizes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}"] = torch.ones(HIDDEN)
    save_file(
        {f"{name}.weight": tensor.bfloat16() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": SIZE, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_loading_takes_what_is_kept_and_little_more(folder: Path) -> None:
    """At most 1.15 times the weights once they are loaded, 1.5 times while they are."""
    packed = folder.parent / "gptq"
    tensors = model_tensors(read_model_config(folder))
    write_quantized_copy(folder, packed, tensors, bits=4, version="0")
    plans = [(folder, "none"), (folder, "int8"), (folder, "int4"), (packed, "none")]
    argv = [word for model, quantization in plans for word in (str(model), quantization)]
    # What is freed goes back to the system at once, so that one load does not use another's.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), *argv],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_linear = NUM_LAYERS * (2 * HIDDEN * HIDDEN + 2 * 128 * HIDDEN + 3 * HIDDEN * SIZE)
    num_vocab = VOCAB * HIDDEN
    in_4_bits = num_linear * (0.5 + 8 / 128) + num_vocab * 3
    kept = {
        "plain none": 2 * num_linear + 4 * num_vocab,
        "plain int8": num_linear + 3 * num_vocab,
        "plain int4": in_4_bits,
        "gptq none": in_4_bits,
    }
    for name, (resident, peak) in json.loads(done.stdout).items():
        print(f"{name}: {kept[name] / 1e6:.1f} MB, resident {resident / 1e6:.1f}, "
              f"peak {peak / 1e6:.1f}")  # fmt: skip
        assert resident >= 0.7 * kept[name], "some of it was not counted"
        assert resident <= 1.15 * kept[name] + ROOM, name
        assert peak <= 1.5 * kept[name] + ROOM, name
