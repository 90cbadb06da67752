"""Where a requested tensor is in a GGUF file, and how the converter changed it.

Models request tensors by Hugging Face names; GGUF has its own names (gguf-py's tensor_mapping.py),
and llama.cpp's converter changes some tensors, which is undone here and in `source`:

- llama's queries and keys: a head's rows (a0, a1, ..., b0, b1, ...) become (a0, b0, a1, b1, ...),
  as ggml's rotary embedding needs them;
- gemma's norms, Qwen3-Next's and Nemotron's: 1 is added to their weights;
- experts: a layer's experts are one tensor, with one more axis; so are StableLM's norms of heads;
- matrices with several parts (gates and ups, Qwen3-Next's heads) are several tensors;
- Qwen3.5's value heads, those of a key head side by side: in turn, as ggml repeats keys;
- decays of recurrent layers are stored as they are used, -exp(A_log).

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .delta_heads import DeltaHeads
from .hyperparameters import Hyperparameters

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.+)")
_EXPERT = re.compile(r"(?P<before>.+\.experts)\.(?P<expert>\d+)(?P<part>\.\w+)")
_NORM_OF_HEAD = re.compile(r"(?P<before>.+\.norms)\.(?P<expert>\d+)(?P<part>)")
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

_Modules = dict[str, str | tuple[str, ...]]
_DENSE: _Modules = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NORMS_AROUND = {**_NORMS_BEHIND, "pre_feedforward_layernorm": "ffn_norm"}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_MIXTRAL = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_DEEPSEEK = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_GATED_DELTA = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_FUSED_DELTA: _Modules = {
    "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
    "linear_attn.in_proj_ba": "ssm_ba",
}
_SPLIT_DELTA = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
}
_GPT_OSS: _Modules = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_LFM2_EXPERTS = {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
}
_MAMBA2 = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_GRANITE_DENSE: _Modules = {
    "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
    "shared_mlp.output_linear": "ffn_down",
}
_GRANITE_EXPERTS: _Modules = {
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_mlp.output_linear": "ffn_down_shexp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}
_GLM4 = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
_SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_PHI = {
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_HUNYUAN = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_HUNYUAN_EXPERTS = {
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}
_NORMS_OF_HEADS = {
    "self_attn.q_layernorm.norms": "attn_q_norm",
    "self_attn.k_layernorm.norms": "attn_k_norm",
}
_FINAL_BIAS = {"model.norm.bias": "output_norm.bias"}
_STACKS = ("experts.gate_up_proj", "experts.down_proj")
_NORM_BEHIND_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_SELECTION_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_DELTA_VECTORS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}

Places = Callable[[int], NDArray[np.int64]]
"""Where each of a tensor's rows (or columns) belongs, by how many it has."""


@dataclass(frozen=True, slots=True)
class Convention:
    """The tensor names of one GGUF architecture, and the changes made to the tensors."""

    # Within a layer, from Hugging Face's to GGUF's names; several are parts of one matrix.
    modules: Mapping[str, str | tuple[str, ...]]
    expert_modules: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # if it has
    tensors: Mapping[str, str] = field(default_factory=dict)  # of names without ".weight"
    outside: Mapping[str, str] = field(default_factory=dict)  # of all layers, beside `_OUTSIDE`
    has_paired_rows: bool = False  # of queries and keys
    has_value_heads_in_turn: bool = False  # of the gated delta rule
    norm_shift: float = 0.0  # added to the weights of norms, but for that behind the delta rule


_QWEN_NEXT = _DENSE | _GATED_DELTA | _EXPERTS | _SHARED_EXPERT
CONVENTIONS = {
    "llama": Convention(_DENSE | _MIXTRAL, has_paired_rows=True),
    "mistral3": Convention(_DENSE, has_paired_rows=True),
    "qwen2": Convention(_DENSE),
    "qwen2moe": Convention(_DENSE | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Convention(_DENSE),
    "qwen3moe": Convention(_DENSE | _EXPERTS),
    "qwen3next": Convention(_QWEN_NEXT | _FUSED_DELTA, tensors=_DELTA_VECTORS, norm_shift=1.0),
    **dict.fromkeys(
        ("qwen35", "qwen35moe"),
        Convention(
            _QWEN_NEXT | _SPLIT_DELTA,
            tensors=_DELTA_VECTORS,
            has_value_heads_in_turn=True,
            norm_shift=1.0,
        ),
    ),
    "gemma": Convention(_DENSE, norm_shift=1.0),
    "gemma2": Convention(_DENSE | _NORMS_AROUND, norm_shift=1.0),
    "gemma3": Convention(_DENSE | _NORMS_AROUND, norm_shift=1.0),
    "phi3": Convention(_DENSE | _FUSED),
    "olmo2": Convention(_DENSE | _NORMS_BEHIND),
    "olmoe": Convention(_DENSE | _EXPERTS),
    "smollm3": Convention(_DENSE, has_paired_rows=True),
    "granite": Convention(_DENSE, has_paired_rows=True),
    "granitehybrid": Convention(
        _DENSE | _MAMBA2 | _GRANITE_DENSE,
        _GRANITE_EXPERTS,
        {"mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias"},
        has_paired_rows=True,
    ),
    "deepseek2": Convention(_DENSE | _EXPERTS | _DEEPSEEK, tensors=_SELECTION_BIAS),
    "glm4": Convention(_DENSE | _GLM4),
    "glm4moe": Convention(
        _DENSE | _NORM_BEHIND_ATTENTION | _EXPERTS | _SHARED_EXPERTS, tensors=_SELECTION_BIAS
    ),
    "gpt-oss": Convention(
        _DENSE | _GPT_OSS,
        tensors={
            "self_attn.sinks": "attn_sinks.weight",
        },
    ),
    "lfm2": Convention(
        _DENSE | _LFM2, outside={"model.embedding_norm.weight": "token_embd_norm.weight"}
    ),
    "lfm2moe": Convention(
        _DENSE | _LFM2 | _LFM2_EXPERTS,
        tensors={"feed_forward.expert_bias": "exp_probs_b.bias"},
        outside={"model.embedding_norm.weight": "token_embd_norm.weight"},
    ),
    "minimax-m2": Convention(
        _DENSE | _MIXTRAL,
        tensors={"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "exaone4": Convention(_DENSE | _NORMS_BEHIND),
    "phi2": Convention(
        _DENSE | _PHI,
        outside={
            "model.final_layernorm.weight": "output_norm.weight",
            "model.final_layernorm.bias": "output_norm.bias",
            "lm_head.bias": "output.bias",
        },
    ),
    "stablelm": Convention(_DENSE | _NORMS_OF_HEADS, outside=_FINAL_BIAS),
    "nemotron": Convention(_DENSE, outside=_FINAL_BIAS, norm_shift=1.0),
    "seed_oss": Convention(_DENSE | _NORM_BEHIND_ATTENTION),
    "ernie4_5": Convention(_DENSE),
    "ernie4_5-moe": Convention(
        _DENSE | _EXPERTS | _SHARED_EXPERTS,
        tensors={"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "hunyuan-dense": Convention(_DENSE | _HUNYUAN),
    "hunyuan-moe": Convention(_DENSE | _HUNYUAN | _EXPERTS | _HUNYUAN_EXPERTS),
}
"""By `general.architecture`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A tensor of the file, or one expert's part of it, and the changes to undo."""

    name: str
    expert: int | None = None  # or one head's: its index on the first axis
    places: Places | None = None  # of its rows in what is asked for; None: in order
    columns: Places | None = None  # likewise
    shift: float = 0.0  # to subtract
    is_negated_exp: bool = False


class TensorNames:
    """The origins of one model's tensors."""

    def __init__(self, model: Hyperparameters, tensors: Collection[str]) -> None:
        """`tensors`: all names of the file. The architecture is one of `CONVENTIONS`."""
        self._convention = convention = CONVENTIONS[model.architecture]
        self._tensors = tensors
        has_experts = any(name.endswith("_exps.weight") for name in tensors)
        self._modules = {
            **convention.modules,
            **(convention.expert_modules if has_experts else {}),
        }
        num_heads = model.integer("attention.head_count")
        self._num_heads = {"attn_q": num_heads, "attn_k": model.kv_heads(num_heads)}
        self._heads = DeltaHeads.of(model) if "linear_attn.A_log" in convention.tensors else None

    def origins(self, name: str) -> tuple[Origin, ...]:
        """The origins of a tensor by its Hugging Face name, in the order of its rows; none for a
        name unknown to GGUF."""
        outside = {**_OUTSIDE, **self._convention.outside}
        if name in outside:
            return (Origin(outside[name], shift=self._shift(name.removesuffix(".weight"))),)
        match = _LAYER.fullmatch(name)
        if match is None:
            return ()
        layer, within = f"blk.{match['layer']}.", match["name"]
        if within in self._convention.tensors:
            own = self._convention.tensors[within]
            return (self._vector(layer + own, within),)
        module, kind = _module_and_kind(within)
        if kind not in ("weight", "bias"):
            return ()
        module, expert = _without_expert(module)
        owns = self._owns(layer, module)
        return tuple(
            Origin(
                f"{layer}{own}.{kind}",
                expert,
                self._places(own, module),
                self._in_turn(0) if module == "linear_attn.out_proj" else None,
                self._shift(module) if kind == "weight" else 0.0,
            )
            for own in owns
        )

    def _owns(self, layer: str, module: str) -> tuple[str, ...]:
        own = self._modules.get(module, ())
        if module == "linear_attn.in_proj_qkvz" and f"{layer}ssm_in.weight" in self._tensors:
            return ("ssm_in",)  # as it is, in files of 2025
        return (own,) if isinstance(own, str) else own

    def _vector(self, name: str, within: str) -> Origin:
        places = self._in_turn(0, 1) if within in _DELTA_VECTORS else None
        return Origin(name, places=places, is_negated_exp=within.endswith("A_log"))

    def _places(self, own: str, module: str) -> Places | None:
        if self._convention.has_paired_rows and own in self._num_heads:
            return partial(_unpaired, num_heads=self._num_heads[own])
        heads = self._heads
        if heads is None or not module.startswith("linear_attn."):
            return None
        if module.endswith("in_proj_qkvz") and own != "ssm_in":
            return heads.qkv_places if own == "attn_qkv" else heads.gate_places
        if module.endswith(("in_proj_qkv", "conv1d")):
            return self._in_turn(heads.num_before_values)
        if module.endswith("in_proj_z"):
            return self._in_turn(0)
        return self._in_turn(0, 1) if module.endswith(("in_proj_a", "in_proj_b")) else None

    def _in_turn(self, first: int, size: int | None = None) -> Places | None:
        """Of value heads that are in turn, behind the first rows; `size`: of a head's rows."""
        if self._heads is None or not self._convention.has_value_heads_in_turn:
            return None
        return partial(self._heads.value_places, first=first, size=size)

    def _shift(self, module: str) -> float:
        is_shifted = module.endswith("norm") and module != "linear_attn.norm"
        return self._convention.norm_shift if is_shifted else 0.0


def _unpaired(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """Rows of heads in pairs: (a0, b0, a1, b1, ...) to (a0, a1, ..., b0, b1, ...)."""
    rows = np.arange(num_rows)
    head_dim = num_rows // num_heads
    within = rows % head_dim
    places: NDArray[np.int64] = rows - within + within % 2 * (head_dim // 2) + within // 2
    return places


def _module_and_kind(name: str) -> tuple[str, str]:
    """Of all experts in one tensor the names of weights end with the module's, those of biases
    with `_bias`."""
    if name.endswith(_STACKS):
        return name, "weight"
    if name.endswith("_proj_bias"):
        return name.removesuffix("_bias"), "bias"
    module, _, kind = name.rpartition(".")
    return module, kind


def _without_expert(module: str) -> tuple[str, int | None]:
    match = _EXPERT.fullmatch(module) or _NORM_OF_HEAD.fullmatch(module)
    if match is None:
        return module, None
    return match["before"] + match["part"], int(match["expert"])
