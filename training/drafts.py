"""What is trained: an EAGLE head (runtime/models/eagle.py), Medusa's heads (medusa.py), or a whole
small model of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layer import NORM_EPS, ROPE_THETA, Layer, LayerShape, Norm
from .target import Target

Kind = Literal["eagle", "medusa", "model"]
NUM_PLACES = 4  # of guesses: these are measured, and Medusa has a head for each
_MODEL_WIDTH = 96  # at most, of a small model: the embedding of each token costs as many weights


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts, or windows of them, padded on the right. B texts of at most T tokens."""

    token_ids: Tensor  # [B, T] int64
    is_guessed: Tensor  # [B, T] bool
    hidden: Tensor  # [B, T, hidden_size] float32, the model's, of each token
    before: Tensor  # the same of the tokens before them; zeros before a text's first


class EagleDraft(nn.Module):
    """Goes on with the model's hidden states, with the model's embedding and output projection."""

    num_trained = 2  # passes: these serve for all behind them

    def __init__(self, target: Target) -> None:
        super().__init__()
        size = target.config.hidden_size
        self._target = target
        self.shape = LayerShape.of_width(size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(self.shape, has_input_norm=False)])

    def passes(self, batch: Batch, num_passes: int) -> list[Tensor]:
        """[B, T, hidden_size] of each pass: of the n-th, what its n-th guesses come from."""
        embedded, before = self._target.embed(batch.token_ids), batch.before
        cache: list[tuple[Tensor, Tensor]] = []
        found: list[Tensor] = []
        for _ in range(num_passes):
            merged = self.fc(torch.cat([embedded, before], -1))
            found.append(self.layers[0](merged, cache))
            before = F.pad(found[-1], (0, 0, 1, 0))[:, :-1]
        return found

    def logits(self, hidden: Tensor, place: int) -> Tensor:
        """[N, hidden_size] of a pass -> [N, vocab_size]"""
        return self._target.logits(hidden)

    def tensors(self) -> dict[str, Tensor]:
        """By the names of its checkpoint."""
        return dict(self.state_dict())

    def config(self, target: Target) -> dict[str, Any]:
        """Its config.json."""
        return _config_of_llama(self.shape, target)


class MedusaDraft(nn.Module):
    """Heads of one residual block and an output projection each, which say what the model would
    say of its last state until they are trained (Cai et al. 2024, arXiv:2401.10774, 2.1)."""

    num_trained = NUM_PLACES

    def __init__(self, target: Target) -> None:
        super().__init__()
        size = target.config.hidden_size
        vocab_size = target.config.vocab_size
        blocks = [nn.Linear(size, size) for _ in range(NUM_PLACES)]
        outputs = [nn.Linear(size, vocab_size, bias=False) for _ in range(NUM_PLACES)]
        self.blocks, self.outputs = nn.ModuleList(blocks), nn.ModuleList(outputs)
        for block, output in zip(blocks, outputs, strict=True):
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
            output.weight.data.copy_(target.head)

    def passes(self, batch: Batch, num_passes: int) -> list[Tensor]:
        """As of an EAGLE head: the n-th head reads the state n tokens before what the first one
        reads."""
        states = [F.pad(batch.before, (0, 0, n, 0))[:, : batch.before.shape[1]]
                  for n in range(num_passes)]  # fmt: skip
        pairs = zip(self.blocks, states, strict=False)
        return [state + F.silu(block(state)) for block, state in pairs]

    def logits(self, hidden: Tensor, place: int) -> Tensor:
        """[N, hidden_size] of a pass -> [N, vocab_size]"""
        logits: Tensor = self.outputs[place](hidden)
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """By the names of its checkpoint."""
        own, tensors = self.state_dict(), dict[str, Tensor]()
        for place in range(NUM_PLACES):
            tensors[f"{place}.0.linear.weight"] = own[f"blocks.{place}.weight"]
            tensors[f"{place}.0.linear.bias"] = own[f"blocks.{place}.bias"]
            tensors[f"{place}.1.weight"] = own[f"outputs.{place}.weight"]
        return tensors

    def config(self, target: Target) -> dict[str, Any]:
        """Its config.json."""
        return {
            "medusa_num_heads": NUM_PLACES,
            "medusa_num_layers": 1,
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.config.vocab_size,
            "torch_dtype": "bfloat16",
        }


class SmallModel(nn.Module):
    """Llama with one layer and an embedding of its own, which is the model's along its principal
    components until it is trained."""

    num_trained = 1  # all passes are the first

    def __init__(self, target: Target) -> None:
        super().__init__()
        size = min(_MODEL_WIDTH, target.config.hidden_size)
        self.shape = LayerShape.of_width(size)
        self.embed_tokens = nn.Embedding(target.config.vocab_size, size)
        self.layers = nn.ModuleList([Layer(self.shape, has_input_norm=True)])
        self.norm = Norm(size)
        head = target.head - target.head.mean(0)
        _, components = torch.linalg.eigh(head.T @ head)  # by increasing variance
        projected = head @ components[:, -size:]
        self.embed_tokens.weight.data.copy_(0.02 * projected / projected.std())

    def passes(self, batch: Batch, num_passes: int) -> list[Tensor]:
        """As of an EAGLE head: it depends on tokens alone, so that all passes are the first."""
        hidden = self.norm(self.layers[0](self.embed_tokens(batch.token_ids), []))
        return [hidden] * num_passes

    def logits(self, hidden: Tensor, place: int) -> Tensor:
        """[N, hidden_size] of a pass -> [N, vocab_size]"""
        return hidden @ self.embed_tokens.weight.T

    def tensors(self) -> dict[str, Tensor]:
        """By the names of its checkpoint."""
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}

    def config(self, target: Target) -> dict[str, Any]:
        """Its config.json."""
        return _config_of_llama(self.shape, target)


Draft = EagleDraft | MedusaDraft | SmallModel
_KINDS: dict[Kind, type[Draft]] = {
    "eagle": EagleDraft,
    "medusa": MedusaDraft,
    "model": SmallModel,
}


def new_draft(kind: Kind, target: Target) -> Draft:
    """Not trained yet; torch's generator decides."""
    return _KINDS[kind](target)


def _config_of_llama(shape: LayerShape, target: Target) -> dict[str, Any]:
    config = target.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": list(config.eos_token_ids),
    }
