"""The programs of single calls, as ops: what `/generate`, OpenAI's endpoints and `Engine.generate`
ask of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import ir
from .ir import GenParams, seed_of_sample


def plain_prompt_ops(prompt: str | Sequence[int]) -> Sequence[ir.Op]:
    """A program's first branch begins with a text, or with token ids."""
    if isinstance(prompt, str):
        return (ir.Text(0, 0, None, prompt),)
    return (ir.Tokens(0, 0, None, tuple(prompt)),)


def sample_ops(seq: int, params: GenParams, n: int) -> Sequence[ir.Op]:
    """Behind a prompt of `seq` ops. Sample i is generated on branch i + 1; a single one, and those
    of one beam search, on the prompt's own branch."""
    if n == 1 or params.beam is not None:
        return (ir.Gen(0, seq, None, "completion", params),)
    branches = tuple(range(1, n + 1))
    gens = [ir.Gen(b, 0, None, "completion", _of_sample(params, b - 1)) for b in branches]
    return (ir.Fork(0, seq, None, branches), *gens)


def embed_ops(
    prompt: str | Sequence[int], *, pooling: str, normalize: bool, cut_to: int | None = None
) -> list[ir.Op]:
    """An embedding of a text, or of ids as they are; `cut_to`: tokens of which no more count."""
    ops = plain_prompt_ops(prompt)
    is_text = isinstance(prompt, str)
    asked = ir.Embed(
        0, len(ops), None, "embedding", pooling, normalize, is_text=is_text, cut_to=cut_to
    )
    return [*ops, asked]


def score_ops(text: str, pair: str | None, *, cut_to: int | None = None) -> list[ir.Op]:
    """A classifier's logits of a text, or of a pair."""
    asked = ir.Embed(
        0, 1, None, "scores", is_text=True, normalize=False, pair=pair, cut_to=cut_to,
        has_scores=True,
    )  # fmt: skip
    return [ir.Text(0, 0, None, text), asked]


def _of_sample(params: GenParams, index: int) -> GenParams:
    """Under a seed that was asked for each sample draws by its own; else forks differ anyhow. The
    prompt is scored once."""
    if index:
        params = replace(params, logprob_start=None)
    if params.seed is None:
        return params
    return replace(params, seed=seed_of_sample(params.seed, index))
