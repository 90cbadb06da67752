"""Log-probabilities of a checkpoint's tokens, by a ModelRunner in any chunking and by Hugging Face
transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step_plans import Feed, PlanDriver

from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.model_config import read_model_config


def make_runner(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> ModelRunner:
    """changes: of the ModelConfig; options: of the runner."""
    config = replace(read_model_config(folder), **(changes or {}))
    settings = {"num_pages": 40, "max_running_requests": 8, "page_size": 16, "max_model_len": 100}
    return ModelRunner(folder, config, **{"dtype": "float32", **settings, **options})


def scores(driver: PlanDriver, tokens: Sequence[int], chunks: Sequence[int]) -> list[torch.Tensor]:
    """[len(tokens) - 1] log-probabilities of all tokens but the first, once for each chunk size,
    all in the same steps. Gives the pages back."""
    sequences = [driver.sequence() for _ in chunks]
    found: list[list[float]] = [[] for _ in chunks]
    targets = [*tokens[1:], 0]
    while active := [i for i, s in enumerate(sequences) if s.length < len(tokens)]:
        feeds = []
        for i in active:
            part = slice(sequences[i].length, sequences[i].length + chunks[i])
            feeds.append(Feed(sequences[i], tokens[part], targets=targets[part]))
        for i, result in zip(active, driver.step(feeds), strict=True):
            found[i].extend(result.target_logprobs)
    for sequence in sequences:
        driver.release(sequence)
    return [torch.tensor(each[:-1], dtype=torch.float64) for each in found]


def hf_scores(
    folder: Path,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.float64,
    *,
    sees: bool = False,
) -> torch.Tensor:
    """[len(tokens) - 1], as `scores`, by transformers; `sees`: a model of images and text."""
    import transformers

    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = model.language_model  # of transformers 5.24 the whole needs an image
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].double()
    return logits.log_softmax(-1)[range(len(tokens) - 1), list(tokens[1:])]
