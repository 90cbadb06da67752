"""Where a requested tensor is in a GGUF file, and how the converter changed it.

Models request tensors by Hugging Face names; GGUF has its own names (gguf-py's tensor_mapping.py),
and llama.cpp's converter changes three things, undone here and in `source`:

- llama's queries and keys: a head's rows (a0, a1, ..., b0, b1, ...) become (a0, b0, a1, b1, ...),
  as ggml's rotary embedding needs them;
- gemma's norms: 1 is added to their weights;
- experts: a layer's experts are one tensor, with one more axis.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"(?P<before>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)")
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

_DENSE = {
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
_SELECTION_BIAS = ".mlp.gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Convention:
    """The tensor names of one GGUF architecture, and the changes made to the tensors."""

    modules: Mapping[str, str]  # within a layer, from Hugging Face's to GGUF's names
    has_paired_rows: bool = False  # of queries and keys
    norm_shift: float = 0.0  # added to the weights of norms


CONVENTIONS = {
    "llama": Convention(_DENSE | _MIXTRAL, has_paired_rows=True),
    "qwen2": Convention(_DENSE),
    "qwen2moe": Convention(_DENSE | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Convention(_DENSE),
    "qwen3moe": Convention(_DENSE | _EXPERTS),
    "gemma": Convention(_DENSE, norm_shift=1.0),
    "gemma2": Convention(_DENSE | _NORMS_AROUND, norm_shift=1.0),
    "gemma3": Convention(_DENSE | _NORMS_AROUND, norm_shift=1.0),
    "phi3": Convention(_DENSE | _FUSED),
    "olmo2": Convention(_DENSE | _NORMS_BEHIND),
    "smollm3": Convention(_DENSE, has_paired_rows=True),
    "granite": Convention(_DENSE, has_paired_rows=True),
    "deepseek2": Convention(_DENSE | _EXPERTS | _DEEPSEEK),
}
"""By `general.architecture`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A tensor of the file, or one expert's part of it, and the changes to undo."""

    name: str
    expert: int | None = None  # its index on the first axis
    num_paired_heads: int | None = None  # number of heads whose rows are paired; None: no pairs
    shift: float = 0.0  # to subtract


class TensorNames:
    """The origins of one model's tensors."""

    def __init__(self, architecture: str, num_heads: int, num_kv_heads: int) -> None:
        """architecture: of `CONVENTIONS`."""
        self._convention = CONVENTIONS[architecture]
        self._num_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}

    def origin(self, name: str) -> Origin | None:
        """The origin of a tensor by its Hugging Face name; None for a name unknown to GGUF."""
        if name.endswith(_SELECTION_BIAS):
            layer = name.removesuffix(_SELECTION_BIAS).rpartition(".")[2]
            return Origin(f"blk.{layer}.exp_probs_b.bias")
        if name in _OUTSIDE:
            return Origin(_OUTSIDE[name], shift=self._shift(name.removesuffix(".weight")))
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        module, expert = _without_expert(match["module"])
        own = self._convention.modules.get(module)
        if own is None:
            return None
        has_pairs = self._convention.has_paired_rows
        return Origin(
            f"blk.{match['layer']}.{own}.{match['kind']}",
            expert,
            self._num_heads.get(own) if has_pairs else None,
            self._shift(module),
        )

    def _shift(self, module: str) -> float:
        return self._convention.norm_shift if module.endswith("norm") else 0.0


def _without_expert(module: str) -> tuple[str, int | None]:
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module, None
    return f"{match['before']}.{match['part']}", int(match["expert"])
