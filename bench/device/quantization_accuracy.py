"""What rounding costs the embedded model: its logits against float32, and its evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequest
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import QUANTIZATIONS
from ...runtime.schedule.sampling_params import SamplingParams
from .scorer import Scorer

if TYPE_CHECKING:
    from torch import Tensor

QUESTIONS = (
    "What is 17 + 26?",
    "Where does the sun rise?",
    "Name three fruits.",
    "Write a sentence about the sea.",
    "My name is Ada and I live in Bern. What is my name?",
    "How many legs has a spider?",
)
_NUM_TOKENS = 96  # generated for each prompt
_EVALUATION = Path(__file__).parents[2] / "examples" / "tiny_model" / "evaluate.py"


def accuracy_rows(
    model: Path = EMBEDDED_MODEL, copies: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """Error of the logits over text that the model wrote, sampled at temperature 1, in float32:
    relative to the logits' spread, and KL divergence in nats per token. copies: of it, made by
    `stemma quantize`."""
    import torch

    exact = _scorer(model, "float32", "none")
    texts = [
        exact.write(prompt, _NUM_TOKENS, SamplingParams(temperature=1.0, seed=seed))
        for seed, prompt in enumerate(_prompts(model))
    ]
    truth = torch.cat([exact.logits(text) for text in texts])
    rows, in_bf16 = [], truth
    formats: list[tuple[str, Path, str]] = [
        ("bf16" if name == "none" else name, model, name) for name in QUANTIZATIONS
    ]
    formats += [(copy.name, copy, "none") for copy in copies]
    for name, folder, quantization in formats:
        scorer = _scorer(folder, "bfloat16", quantization)
        found = torch.cat([scorer.logits(text) for text in texts])
        if name == "bf16":
            in_bf16 = found
        rows.append(
            {"format": name, "tokens": len(truth)}
            | {f"{k}, to float32": v for k, v in _differences(found, truth).items()}
            | {f"{k}, to bf16": v for k, v in _differences(found, in_bf16).items()}
        )
    return rows


def evaluation_rows(num_cases: int) -> list[dict[str, Any]]:
    """The embedded model's own evaluation, one process per format."""
    if not _EVALUATION.exists():
        raise InvalidRequest(f"the evaluation is only in a checkout: {_EVALUATION} is missing")
    rows = []
    for name in QUANTIZATIONS:
        command = [sys.executable, str(_EVALUATION), "--samples", str(num_cases), "--json"]
        done = subprocess.run(
            [*command, "--quantization", name], capture_output=True, text=True, check=True
        )
        for row in json.loads(done.stdout)["rows"]:
            rows.append({"format": "bf16" if name == "none" else name, **row})
    return rows


def _prompts(model: Path) -> list[list[int]]:
    from ...runtime.models.model_config import read_model_config
    from ...runtime.tokenizer.chat_template import ChatTemplate
    from ...runtime.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer(model, read_model_config(model).vocab_size)
    template = ChatTemplate(model, tokenizer)
    before, after = (
        template.encode(text, goes_on=bool(index))
        for index, text in enumerate(template.delimiters(["user"], open_turn=True))
    )
    return [[*before, *tokenizer.encode(text), *after] for text in QUESTIONS]


def _scorer(model: Path, dtype: str, quantization: str) -> Scorer:
    from ...kernels.registry import select_kernels
    from ...runtime.execute.model_runner import resolve_dtype

    kernels = select_kernels(resolve_dtype(dtype))
    return Scorer(model, kernels, dtype=dtype, max_total_tokens=512, quantization=quantization)


def _differences(found: Tensor, truth: Tensor) -> dict[str, float]:
    centered = truth - truth.mean(1, keepdim=True)
    log_p, log_q = truth.log_softmax(1), found.log_softmax(1)
    return {
        "logit error": ((found - truth).square().mean() / centered.square().mean()).sqrt().item(),
        "KL": (log_p.exp() * (log_p - log_q)).sum(1).mean().item(),
        "same best": (found.argmax(1) == truth.argmax(1)).float().mean().item(),
    }
