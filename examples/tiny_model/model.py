"""The Llama architecture as plain torch, small and fast to train, and its export to Hugging Face.

Query, key and value share one matrix, and so do gate and up; `hugging_face_state` splits them
and gives every tensor the name that any Llama implementation expects. It knows nothing of data.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The shape of the model; 4.6 million parameters, embeddings tied with the output."""

    vocab_size: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_position: int = 2048


class Block(nn.Module):
    """One layer: attention, then a gated MLP, each with a norm before it and a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        wide = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.attention_norm = nn.Parameter(torch.ones(config.hidden))
        self.qkv = nn.Linear(config.hidden, wide, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden))
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, tokens, hidden] -> the same shape."""
        config = self.config
        size, length = x.shape[:2]
        qkv = self.qkv(rms_norm(x, self.attention_norm, config.norm_eps))
        q, k, v = split_heads(qkv, cos, sin, config.heads, config.kv_heads)
        y = attend(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(size, length, -1))
        return x + self.down(gated(self.gate_up(rms_norm(x, self.mlp_norm, config.norm_eps))))


class Llama(nn.Module):
    """Token ids to hidden states; `logits` turns chosen hidden states into logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden))
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.arange(config.max_position).float()[:, None] / config.rope_theta**half
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)
        self._init_weights()

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [batch, tokens], padded on the right -> [batch, tokens, hidden]."""
        x = self.embed(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        length = ids.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return rms_norm(x, self.final_norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        return F.linear(hidden, self.embed.weight.to(hidden.dtype)).float()

    def _init_weights(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.02)
        for block in self.blocks:
            for linear in (block.qkv, block.gate_up):
                nn.init.normal_(linear.weight, std=0.04)
            for linear in (block.out, block.down):
                nn.init.zeros_(linear.weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight).to(x.dtype)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [batch, tokens, wide] -> rotated q, rotated k and v, each [batch, heads, tokens, dim]."""
    size, length, _ = qkv.shape
    q, k, v = qkv.view(size, length, -1, cos.shape[-1]).split([heads, kv_heads, kv_heads], 2)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    shape = (size, length, kv_heads, heads // kv_heads, cos.shape[-1])
    k, v = (x.unsqueeze(3).expand(shape).reshape(q.shape) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [batch, heads, tokens, dim].

    On a CPU, plain batched products take a fifth of the time of the flash kernel at the 50 to 400
    tokens of these samples (measured, forward and backward, AMD EPYC).
    """
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    shape = q.shape
    q, k, v = (x.reshape(-1, *shape[2:]) for x in (q, k, v))
    weights = causal_weights(torch.bmm(q, k.transpose(1, 2)), shape[-1] ** -0.5)
    return torch.bmm(weights.to(v.dtype), v).view(shape)


def causal_weights(scores: Tensor, scale: float) -> Tensor:
    """Scores [rows, tokens, tokens] to attention weights that look only back."""
    order = torch.arange(scores.shape[-1], device=scores.device)
    seen = order[:, None] >= order[None, :]
    weights = torch.softmax(torch.where(seen, scores.float() * scale, -1e9), -1)
    return weights.to(scores.dtype)


def compile_pointwise() -> None:
    """Fuse the pointwise work between the matrix products (worth it on a CPU)."""
    for name in ("rms_norm", "gated", "split_heads", "causal_weights"):
        globals()[name] = torch.compile(globals()[name], dynamic=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x: [batch, tokens, heads, dim], halves as in Hugging Face."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def hugging_face_state(model: Llama) -> dict[str, Tensor]:
    """The weights as bfloat16 under the names of LlamaForCausalLM (tied embeddings)."""
    config = model.config
    sizes = [config.heads * config.head_dim] + 2 * [config.kv_heads * config.head_dim]
    state = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.final_norm}
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        name = f"model.layers.{index}."
        q, k, v = block.qkv.weight.split(sizes)
        gate, up = block.gate_up.weight.chunk(2)
        state |= {
            name + "input_layernorm.weight": block.attention_norm,
            name + "post_attention_layernorm.weight": block.mlp_norm,
            name + "self_attn.q_proj.weight": q,
            name + "self_attn.k_proj.weight": k,
            name + "self_attn.v_proj.weight": v,
            name + "self_attn.o_proj.weight": block.out.weight,
            name + "mlp.gate_proj.weight": gate,
            name + "mlp.up_proj.weight": up,
            name + "mlp.down_proj.weight": block.down.weight,
        }
    return {key: value.detach().to(torch.bfloat16).contiguous() for key, value in state.items()}


def load_hugging_face_state(model: Llama, state: dict[str, Tensor]) -> None:
    """The reverse of `hugging_face_state`; the weights stay rounded to bfloat16."""
    layers = "model.layers.{}."
    own = {"embed.weight": state["model.embed_tokens.weight"],
           "final_norm": state["model.norm.weight"]}  # fmt: skip
    for index in range(model.config.layers):
        name, block = layers.format(index), f"blocks.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."
        own |= {
            block + "attention_norm": state[name + "input_layernorm.weight"],
            block + "mlp_norm": state[name + "post_attention_layernorm.weight"],
            block + "qkv.weight": torch.cat([state[f"{attention}{x}_proj.weight"] for x in "qkv"]),
            block + "out.weight": state[attention + "o_proj.weight"],
            block + "gate_up.weight": torch.cat(
                [state[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]
            ),
            block + "down.weight": state[mlp + "down_proj.weight"],
        }
    model.load_state_dict({key: value.float() for key, value in own.items()})
