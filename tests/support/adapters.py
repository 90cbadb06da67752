"""Small random LoRA adapters in Hugging Face PEFT's format, and models with them merged in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    checkpoint: Path,
    targets: Sequence[str] = ALL_LINEAR,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    std: float = 0.3,
    infix: str = "",
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Write an adapter of the model in `checkpoint`; `infix`: ".default" in the tensors' names;
    `fields` go into adapter_config.json. Returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not any(module.endswith(f".{target}") or module == target for target in targets):
            continue
        own = fields.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        for kind, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
            values = torch.randn(shape, generator=generator) * std
            tensors[f"base_model.model.{module}.lora_{kind}{infix}.weight"] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """A checkpoint whose weights are W + scale * B A, by PEFT's formula, computed in float64."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name, b in load_file(adapter / "adapter_model.safetensors").items():
        if ".lora_B" not in name:
            continue
        a = load_file(adapter / "adapter_model.safetensors")[name.replace(".lora_B", ".lora_A")]
        module = name.removeprefix("base_model.model.").partition(".lora_B")[0]
        rank = len(a)
        end = module.rpartition(".")[2]
        alpha = config.get("alpha_pattern", {}).get(end, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        weight = weights[f"{module}.weight"].double() + scale * (b.double() @ a.double())
        weights[f"{module}.weight"] = weight.to(weights[f"{module}.weight"].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
