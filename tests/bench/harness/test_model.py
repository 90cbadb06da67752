"""The model recipe: the weights are transformers' own, the folder is a whole checkpoint."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stemma.bench.harness import model
from stemma.runtime.tokenizer.tokenizer import Tokenizer

SHAPE = model.Shape(32, 2, 4, 2, 8, 48, vocab=400, max_position_embeddings=64)


def test_weights_are_drawn_as_transformers_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(model, "_corpus", lambda: itertools.repeat("def f(x): return x", 20))
    model.make_model(tmp_path, SHAPE, seed=3)
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.LlamaForCausalLM(config)
    torch.nn.init.normal_(theirs.lm_head.weight, std=model.HEAD_STD)
    torch.nn.init.normal_(theirs.model.embed_tokens.weight, std=model.EMBEDDING_STD)
    expected = theirs.to(torch.bfloat16).state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(expected)
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    tokenizer = Tokenizer(tmp_path, SHAPE.vocab)
    assert tokenizer.num_tokens == SHAPE.vocab
    assert tokenizer.decode(tokenizer.encode("def é")) == "def é"


def test_the_first_layers_are_a_draft_of_a_model_whose_rest_adds_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(model, "_corpus", lambda: itertools.repeat("def f(x): return x", 20))
    shape = replace(SHAPE, layers=4)
    found = {}
    for rest in (1.0, 0.1):
        folder = tmp_path / str(rest)
        model.make_model(folder, shape, seed=3, draft_layers=1, rest=rest)
        ids = torch.arange(60)[None] % shape.vocab
        whole, draft = (
            transformers.AutoModelForCausalLM.from_pretrained(each)(ids).logits.argmax(-1)
            for each in (folder, folder / "draft")
        )
        found[rest] = (whole == draft).float().mean().item()
    assert found[0.1] > max(0.5, found[1.0])
