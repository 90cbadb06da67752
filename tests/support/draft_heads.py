"""Small random heads that guess from a model's hidden states, in the names of published ones, and
what they guess by plain torch and transformers' layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import make_checkpoint, randomize
from mixtures import change_config, make_mixture
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

NUM_LAYERS = 2  # and the predictor's


class PredictorReference:
    """Guesses by transformers' layers, whole texts at once."""

    def __init__(
        self, model: Any, own: dict[str, Tensor], layers: Sequence[Any], form: _Form | None = None
    ) -> None:
        """own: the predictor's weights but for its layers, by DeepSeek's names; form: None: a head
        of the first EAGLE."""
        self._model, self._own = model.double(), {name: own[name].double() for name in own}
        self._layers = [layer.double() for layer in layers]
        self._form = form or _Form("")

    @torch.inference_mode()
    def guesses(self, token_ids: Sequence[int], num_guesses: int) -> list[int]:
        """The likeliest tokens behind these, one after the other."""
        model, ids = self._model.model, torch.tensor([token_ids])
        num_layers = self._form.num_layers
        hidden = self._model(ids, output_hidden_states=True).hidden_states[num_layers]
        if len(model.layers) > num_layers:  # else they are normed
            hidden = model.norm(hidden)
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        found: list[int] = []
        for _ in range(num_guesses):
            out = self._predicted(ids, before)
            normed = self._norm("shared_head.norm", out)
            found.append(int(self._model.lm_head(normed[:, -1]).argmax()))
            ids = torch.cat([ids, torch.tensor([found[-1:]])], 1)
            handed_on = normed if self._form.hands_on_normed else out
            before = torch.cat([before, handed_on[:, -1:]], 1)
        return found

    def _predicted(self, ids: Tensor, before: Tensor) -> Tensor:
        model = self._model.model
        tokens = self._norm("enorm", model.embed_tokens(ids))
        both = [tokens, self._norm("hnorm", before)]
        merged = torch.cat(both[::-1] if self._form.is_hidden_first else both, -1)
        x = merged @ self._own["eh_proj.weight"].T + self._own.get("bias", 0.0)
        positions = torch.arange(ids.shape[1])[None]
        mask = _causal(ids.shape[1])
        turned = model.rotary_emb(x, positions)
        for layer in self._layers:
            out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            x = out[0] if isinstance(out, tuple) else out
        return x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self._own:
            return x
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._own[f"{name}.weight"]


@dataclass(frozen=True)
class _Form:
    """How a family names its layer for multi-token prediction, and what it does otherwise."""

    layer: str  # `{}`: the number of layers before it
    token_norm: str = "enorm"  # below the root, as the next three
    hidden_norm: str = "hnorm"
    merge: str = "eh_proj"
    norm: str = "shared_head.norm"
    root: str | None = None  # None: the layer's name
    num_layers: int = NUM_LAYERS
    copies: tuple[tuple[str, str], ...] = ()
    has_unit_offset_norms: bool = False
    is_hidden_first: bool = False
    hands_on_normed: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the written config
    made: Mapping[str, Any] = field(default_factory=dict)  # of the model's


_LISTED = ["linear_attention"] * 3 + ["full_attention"]
_COPIES = (
    ("embed_tokens.weight", "model.embed_tokens.weight"),
    ("shared_head.head.weight", "lm_head.weight"),
)
_QWEN = _Form(
    "mtp.layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp",
    num_layers=4, has_unit_offset_norms=True, hands_on_normed=True,
    fields={"layer_types": _LISTED}, made={"layer_types": [*_LISTED, "full_attention"]},
)  # fmt: skip
_FORMS = {
    "DeepseekV3": _Form("model.layers.{}", copies=_COPIES, fields={"num_nextn_predict_layers": 1}),
    "Glm4Moe": _Form("model.layers.{}", copies=_COPIES, fields={"num_nextn_predict_layers": 1}),
    "Qwen3Next": _QWEN,
    "Qwen3_5": _QWEN,
    "Ernie4_5_Moe": _Form(
        "model.mtp_block.0", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", "norm",
        "model", hands_on_normed=True, fields={"num_nextn_predict_layers": 1},
        made={"moe_layer_end_index": NUM_LAYERS - 1},
    ),
    "MiMo": _Form(
        "model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm", is_hidden_first=True, hands_on_normed=True,
        fields={"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
                "layer_types": None},
    ),
}  # fmt: skip


def with_predictor(folder: Path, family: str) -> PredictorReference:
    """Make a model whose last layer predicts, in the names that checkpoints have."""
    form = _FORMS[family]
    num_layers = form.num_layers
    if family == "MiMo":
        make_checkpoint(folder, "qwen2", init_std=0.3, seed=5, num_layers=num_layers + 1)
        model = transformers.Qwen2ForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager"
        ).eval()
    else:
        model = make_mixture(
            folder, family, has_tokenizer=True, seed=5, init_std=0.4,
            num_hidden_layers=num_layers + 1, **form.made,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(9)
    size = 64
    own = {f"{n}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for n in
           ("enorm", "hnorm", "shared_head.norm")}  # fmt: skip
    own["eh_proj.weight"] = 0.2 * torch.randn(size, 2 * size, generator=generator)
    layer = form.layer.format(num_layers)
    root = form.root or layer
    tensors = load_file(folder / "model.safetensors")
    copies = {f"{root}.{name}": tensors[of].clone() for name, of in form.copies}
    trained = f"model.layers.{num_layers}."
    if f"{root}.{form.norm}.weight" in tensors:  # the model's
        own["shared_head.norm.weight"] = tensors[f"{root}.{form.norm}.weight"].clone()
    tensors = {
        f"{layer}.{name.removeprefix(trained)}" if name.startswith(trained) else name: each
        for name, each in tensors.items()
    }
    names = {"enorm": form.token_norm, "hnorm": form.hidden_norm, "shared_head.norm": form.norm}
    for name, of_family in names.items():
        stored = own[f"{name}.weight"] - float(form.has_unit_offset_norms)
        tensors[f"{root}.{of_family}.weight"] = stored
    tensors |= {f"{root}.{form.merge}.weight": own["eh_proj.weight"], **copies}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_hidden_layers=num_layers, **form.fields)
    return PredictorReference(model, own, [model.model.layers[num_layers]], form)


def with_eagle(folder: Path, num_layers: int = 1) -> PredictorReference:
    """Make a Llama and, in `head`, an EAGLE head for it, in the names that published ones have."""
    make_checkpoint(folder, init_std=0.4, seed=11, num_layers=NUM_LAYERS)
    config = transformers.LlamaConfig.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    config._attn_implementation = "eager"
    layers = [LlamaDecoderLayer(config, 0).eval() for _ in range(num_layers)]
    layers[0].input_layernorm = torch.nn.Identity()
    for index, layer in enumerate(layers):
        randomize(layer, 7 + index, 0.3)
    generator = torch.Generator().manual_seed(9)
    size = config.hidden_size
    own = {
        "eh_proj.weight": 0.2 * torch.randn(size, 2 * size, generator=generator),
        "bias": 0.2 * torch.randn(size, generator=generator),
    }
    tensors = {
        f"layers.{index}.{name}": each.clone()
        for index, layer in enumerate(layers)
        for name, each in layer.state_dict().items()
    }
    tensors |= {"fc.weight": own["eh_proj.weight"], "fc.bias": own["bias"]}
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    (folder / "head").mkdir()
    save_file(tensors, folder / "head" / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (folder / "head" / "config.json").write_text(json.dumps(written))
    return PredictorReference(model, own, layers)


class Eagle3Reference:
    """Guesses of an EAGLE-3 head by plain torch, whole texts at once."""

    def __init__(
        self, model: Any, config: Any, own: dict[str, Tensor], layers: Sequence[int]
    ) -> None:
        """own: the head's tensors; layers: of the model, behind so many each state is."""
        self._model, self._config, self._layers = model.double(), config, layers
        self._own = {n: t.double() if t.is_floating_point() else t for n, t in own.items()}
        table = model.model.embed_tokens.weight
        self._table = self._own.get("embed_tokens.weight", table)
        self._head = self._own.get("lm_head.weight", model.lm_head.weight)
        offsets = self._own.get("d2t", torch.zeros(len(self._head), dtype=torch.int64))
        self.token_ids = torch.arange(len(self._head)) + offsets

    @torch.inference_mode()
    def guesses(self, token_ids: Sequence[int], num_guesses: int) -> list[int]:
        """The likeliest tokens behind these, one after the other."""
        ids = torch.tensor([token_ids])
        states = self._model(ids, output_hidden_states=True).hidden_states
        joined = torch.cat([states[layer] for layer in self._layers], -1)
        if "input_norm.weight" in self._own:
            joined = self._norm("input_norm", joined)
        merged = joined @ self._own["fc.weight"].T
        before = torch.cat([torch.zeros_like(merged[:, :1]), merged[:, :-1]], 1)
        found: list[int] = []
        for _ in range(num_guesses):
            out = self._layer(ids, before)
            logits = self._norm("norm", out)[:, -1] @ self._head.T
            found.append(int(self.token_ids[logits.argmax()]))
            ids = torch.cat([ids, torch.tensor([found[-1:]])], 1)
            before = torch.cat([before, out[:, -1:]], 1)
        return found

    def _layer(self, ids: Tensor, before: Tensor) -> Tensor:
        normed = self._norm("midlayer.hidden_norm", before)
        tokens = self._norm("midlayer.input_layernorm", self._table[ids])
        x = (before if "input_norm.weight" not in self._own else normed) + self._attended(
            torch.cat([tokens, normed], -1)
        )
        gate, up, down = (
            self._own[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        y = self._norm("midlayer.post_attention_layernorm", x)
        return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def _attended(self, x: Tensor) -> Tensor:
        size, dim = x.shape[1], self._config.head_dim
        q, k, v = (
            (x @ self._own[f"midlayer.self_attn.{n}_proj.weight"].T)
            .view(1, size, -1, dim)
            .transpose(1, 2)
            for n in "qkv"
        )
        cos, sin = self._model.model.rotary_emb(x, torch.arange(size)[None])
        q, k = (each * cos[:, None] + _turned(each) * sin[:, None] for each in (q, k))
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        scores = q @ k.transpose(2, 3) / dim**0.5 + _causal(size)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return out @ self._own["midlayer.self_attn.o_proj.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self._config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._own[f"{name}.weight"]


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _causal(size: int) -> Tensor:
    return torch.full((1, 1, size, size), -torch.inf, dtype=torch.float64).triu(1)


def with_eagle3(folder: Path, *, is_speculator: bool = False) -> Eagle3Reference:
    """Make a Llama of 7 layers and, in `head`, an EAGLE-3 head for it, as SpecForge writes them, or
    as speculators does: with norms elsewhere, an embedding of its own, and its own words."""
    num_layers, draft_size, heads, kv_heads = 7, 200, 4, 2
    make_checkpoint(folder, init_std=0.3, seed=11, num_layers=num_layers)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    config = model.config
    size, inner = config.hidden_size, config.intermediate_size
    dim = config.head_dim = size // heads
    generator = torch.Generator().manual_seed(9)

    def made(*shape: int, std: float = 0.2) -> Tensor:
        return std * torch.randn(shape, generator=generator)

    shapes = {
        "self_attn.q_proj": (heads * dim, 2 * size), "self_attn.k_proj": (kv_heads * dim, 2 * size),
        "self_attn.v_proj": (kv_heads * dim, 2 * size), "self_attn.o_proj": (size, heads * dim),
        "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }  # fmt: skip
    own = {f"midlayer.{name}.weight": made(*shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    own |= {f"midlayer.{name}.weight": 1 + made(size) for name in norms}
    own |= {"norm.weight": 1 + made(size), "fc.weight": made(size, 3 * size)}
    own["lm_head.weight"] = made(draft_size, size)
    ids = torch.randperm(config.vocab_size, generator=generator)[:draft_size].sort().values
    own["d2t"] = ids - torch.arange(draft_size)
    own["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    layers = (2, 3, 4)  # by default of 7
    written = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    written["architectures"] = ["LlamaForCausalLMEagle3"]
    stored = own
    if is_speculator:
        layers = (1, 4, 6)
        own["input_norm.weight"] = 1 + made(3 * size)
        own["embed_tokens.weight"] = made(config.vocab_size, size, std=1.0)
        stored = {name.replace("midlayer.", "layers.0."): each for name, each in own.items()}
        written = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
            "transformer_layer_config": written, "eagle_aux_hidden_state_layer_ids": layers,
            "norm_before_residual": True, "norm_before_fc": True,
        }  # fmt: skip
    written["draft_vocab_size"] = draft_size
    (folder / "head").mkdir()
    save_file(stored, folder / "head" / "model.safetensors", {"format": "pt"})
    (folder / "head" / "config.json").write_text(json.dumps(written))
    return Eagle3Reference(model, config, own, layers)


class MedusaReference:
    """Guesses of Medusa's heads by plain torch."""

    def __init__(self, model: Any, own: dict[str, Tensor], num_layers: int) -> None:
        self._model, self._num_layers = model.double(), num_layers
        self._own = {name: each.double() for name, each in own.items()}

    @torch.inference_mode()
    def guesses(self, token_ids: Sequence[int], num_guesses: int) -> list[int]:
        """The likeliest tokens behind these, of which the model has drawn the last."""
        hidden = self._model.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0, -1]
        return [self._guess(head, hidden) for head in range(num_guesses)]

    def _guess(self, head: int, x: Tensor) -> int:
        for layer in range(self._num_layers):
            name = f"{head}.{layer}.linear"
            x = x + torch.nn.functional.silu(
                self._own[f"{name}.weight"] @ x + self._own[f"{name}.bias"]
            )
        return int((self._own[f"{head}.{self._num_layers}.weight"] @ x).argmax())


def with_medusa(folder: Path) -> MedusaReference:
    """Make a Llama and, in `head`, three of Medusa's heads for it, as they are published."""
    make_checkpoint(folder, init_std=0.4, seed=11, num_layers=NUM_LAYERS)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    num_heads, num_layers, size = 3, 2, model.config.hidden_size
    generator = torch.Generator().manual_seed(9)
    own: dict[str, Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            own[f"{name}.weight"] = 0.2 * torch.randn(size, size, generator=generator)
            own[f"{name}.bias"] = 0.2 * torch.randn(size, generator=generator)
        shape = (model.config.vocab_size, size)
        own[f"{head}.{num_layers}.weight"] = torch.randn(shape, generator=generator)
    (folder / "head").mkdir()
    save_file(own, folder / "head" / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    (folder / "head" / "config.json").write_text(json.dumps(config))
    return MedusaReference(model, own, num_layers)
