"""Drafts by what reads the model's hidden states, a layer for multi-token prediction or an EAGLE
head: what transformers' layers compute in its place, and outputs that do not depend on it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import make_checkpoint, randomize
from exactness_jobs import JOBS, Job, Load, loading, outputs_of, said_alone, serve
from mixtures import make_mixture
from safetensors.torch import load_file, save_file
from scripted_drafters import verify_all
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from stemma.errors import InvalidRequest
from stemma.runtime.config import EngineConfig
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.speculate.guesses import ModelDrafter, ModelText

NUM_LAYERS = 2  # and the predictor's
NUM_GUESSES = 3


class Reference:
    """Guesses by transformers' layers, whole texts at once."""

    def __init__(self, model: Any, own: dict[str, Tensor], layer: Any) -> None:
        """own: the predictor's weights but for its layer."""
        self._model, self._own = model.double(), {name: own[name].double() for name in own}
        self._layer = layer.double()

    @torch.inference_mode()
    def guesses(self, token_ids: Sequence[int], num_guesses: int) -> list[int]:
        """The likeliest tokens behind these, one after the other."""
        model, ids = self._model.model, torch.tensor([token_ids])
        hidden = self._model(ids, output_hidden_states=True).hidden_states[NUM_LAYERS]
        if len(model.layers) > NUM_LAYERS:  # else they are normed
            hidden = model.norm(hidden)
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        found: list[int] = []
        for _ in range(num_guesses):
            out = self._predicted(ids, before)
            normed = self._norm("shared_head.norm", out)
            found.append(int(self._model.lm_head(normed[:, -1]).argmax()))
            ids = torch.cat([ids, torch.tensor([found[-1:]])], 1)
            before = torch.cat([before, out[:, -1:]], 1)
        return found

    def _predicted(self, ids: Tensor, before: Tensor) -> Tensor:
        model = self._model.model
        tokens = self._norm("enorm", model.embed_tokens(ids))
        merged = torch.cat([tokens, self._norm("hnorm", before)], -1)
        x = merged @ self._own["eh_proj.weight"].T + self._own.get("bias", 0.0)
        positions = torch.arange(ids.shape[1])[None]
        size = ids.shape[1]
        mask = torch.full((1, 1, size, size), -torch.inf, dtype=x.dtype).triu(1)
        turned = model.rotary_emb(x, positions)
        out = self._layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=turned
        )
        return out[0] if isinstance(out, tuple) else out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self._own:
            return x
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._own[f"{name}.weight"]


def with_predictor(folder: Path, family: str) -> Reference:
    """Make a model whose last layer predicts, in the names that checkpoints have."""
    model = make_mixture(
        folder, family, has_tokenizer=True, seed=5, init_std=0.4, num_hidden_layers=NUM_LAYERS + 1
    )
    generator = torch.Generator().manual_seed(9)
    size = 64
    own = {f"{n}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for n in
           ("enorm", "hnorm", "shared_head.norm")}  # fmt: skip
    own["eh_proj.weight"] = 0.2 * torch.randn(size, 2 * size, generator=generator)
    tensors = load_file(folder / "model.safetensors")
    behind = f"model.layers.{NUM_LAYERS}"
    copies = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    tensors |= {f"{behind}.{name}": each for name, each in {**own, **copies}.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return Reference(model, own, model.model.layers[NUM_LAYERS])


def with_eagle(folder: Path) -> Reference:
    """Make a Llama and, in `head`, an EAGLE head for it, in the names that published ones have."""
    make_checkpoint(folder, init_std=0.4, seed=11, num_layers=NUM_LAYERS)
    config = transformers.LlamaConfig.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    randomize(layer, 7, 0.3)
    generator = torch.Generator().manual_seed(9)
    size = config.hidden_size
    own = {
        "eh_proj.weight": 0.2 * torch.randn(size, 2 * size, generator=generator),
        "bias": 0.2 * torch.randn(size, generator=generator),
    }
    tensors = {f"layers.0.{name}": each.clone() for name, each in layer.state_dict().items()}
    tensors |= {"fc.weight": own["eh_proj.weight"], "fc.bias": own["bias"]}
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    (folder / "head").mkdir()
    save_file(tensors, folder / "head" / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "head" / "config.json").write_text(json.dumps(written))
    return Reference(model, own, layer)


@pytest.fixture(scope="module", params=["DeepseekV3", "Glm4Moe", "eagle"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        return folder, with_eagle(folder)
    return folder, with_predictor(folder, request.param)


@pytest.fixture(scope="module")
def load(made: tuple[Path, Reference]) -> Iterator[Load]:
    yield from loading(made[0])


def drafting(load: Load, folder: Path, **options: Any) -> LoadedModel:
    head = folder / "head"
    draft_model = str(head) if head.exists() else "mtp"
    loaded = load(draft_model=draft_model, speculate="model,grammar", **options)
    assert loaded.engine.scheduler.speculation is not None
    verify_all(loaded.engine.scheduler.speculation)
    return loaded


@pytest.mark.parametrize("chunk", [2048, 7])
def test_guesses_are_those_of_the_published_form(
    load: Load, made: tuple[Path, Reference], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each token of an output, also where prompts come in chunks."""
    job = next(job for job in JOBS["greedy"] if len(job.prompt) == 90)
    offered: list[list[int]] = []
    monkeypatch.setattr(
        ModelDrafter, "num_ahead", lambda _, texts, curve, room: [min(NUM_GUESSES, room)]
    )
    offer = ModelText.offer

    def noted(text: ModelText, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        offered.append(list(tokens))
        offer(text, tokens, logprobs)

    monkeypatch.setattr(ModelText, "offer", noted)
    loaded = drafting(load, made[0], chunked_prefill_size=chunk)
    (output,) = outputs_of(serve(loaded, [job]))
    assert offered
    at = 1  # how much of the output was there at each offer: one step, one token more
    for tokens in offered:
        wanted = made[1].guesses([*job.prompt, *output[:at]], len(tokens))
        assert tokens == wanted
        at += 1 + _num_right(tokens, output[at:])
    assert at <= len(output)


def _num_right(tokens: Sequence[int], output: Sequence[int]) -> int:
    num = 0
    while num < min(len(tokens), len(output)) and tokens[num] == output[num]:
        num += 1
    return num


@pytest.mark.parametrize("kind", ["greedy", "sampled", "constrained"])
@pytest.mark.parametrize(
    ("page_size", "chunk", "options"),
    [
        (1, 2048, {}),
        (16, 23, {"host_kv_tokens": 512}),
        (1, 32, {"max_total_tokens": 160, "kernels": "cpu"}),
    ],
)
def test_tokens_are_identical_with_a_predictor(
    load: Load,
    made: tuple[Path, Reference],
    kind: str,
    page_size: int,
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(4)
    monkeypatch.setattr(
        ModelDrafter,
        "num_ahead",
        lambda _, texts, curve, room: [rng.choice((0, rng.randrange(room + 1))) for _ in texts],
    )
    jobs: list[Job] = JOBS[kind]
    alone = said_alone(load, jobs)
    loaded = drafting(load, made[0], page_size=page_size, chunked_prefill_size=chunk, **options)
    if "max_total_tokens" in options:
        admission = loaded.engine.scheduler.admission
        monkeypatch.setattr(admission, "_require_room", lambda *_: None)
    for _ in range(2):
        assert outputs_of(serve(loaded, jobs)) == alone
    assert loaded.engine.scheduler.stats.num_draft_tokens > 0


def test_a_model_without_a_predictor_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="LlamaForCausalLM has no layer for multi-token"):
        LoadedModel(EngineConfig(model=checkpoint, draft_model="mtp"))


def test_a_head_for_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("eagle")
    with_eagle(folder)
    config = json.loads((folder / "head" / "config.json").read_text())
    (folder / "head" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(InvalidRequest, match="its vocab_size is 300, that of Llama"):
        LoadedModel(EngineConfig(model=checkpoint, draft_model=str(folder / "head")))
    save_file({"midlayer.x": torch.zeros(1)}, folder / "head" / "model.safetensors")
    with pytest.raises(InvalidRequest, match="EAGLE-3 is not read"):
        LoadedModel(EngineConfig(model=checkpoint, draft_model=str(folder / "head")))
