"""Keys and values in 8, 4, 3 and 2 bits: what each format costs the model's predictions, and memory.

The model's attention in float32, once over plain keys and values and once over what a format makes
of them, on what people ask of the embedded model (extraction, agents, chat, extraction behind a
thousand tokens of others' texts) and on what it then writes. KL of the distributions of next tokens,
in nats, to those of plain KV; over the replies, as these are what is sampled, and over all tokens.

    token      one scale a vector: the largest magnitude is the largest number
    q4_0       one scale a vector, with a sign: the largest number, which is negative, is reached
    groups     a scale and a lowest number for each 32 channels, in 16 bits
    codebook   one scale a vector, numbers where a normal distribution has them (Max 1960)
    h-         behind a Walsh-Hadamard rotation of the vector (QuaRot: Ashkboos et al. 2024)
    kivi       keys by channel in groups of 32 tokens, values by token in groups of 32 channels, the
               last 64 or 128 tokens plain (KIVI: Liu et al. 2024)
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.schedule.plan import PageUpdate, Row, StepPlan
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.report import write_report
from ..speculation.conversations import conversations

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.ops import Linear, MakeOutputLinear, Weight

GROUP = 32
_MAX_TOKENS = 2048
Rounding = Callable[["Tensor"], "Tensor"]
"""[num_kv_heads, S, head_dim] float32 -> what is read of it, the same shape."""


@dataclass(frozen=True)
class Format:
    """`bits`: of a number, its share of scales included, at 64 channels a head."""

    name: str
    bits: float
    keys: Rounding
    values: Rounding
    residual: int = 0  # the last tokens, plain
    keys_by: int = 1  # tokens that keys are rounded together with


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench kv-bits`."""
    add = parser.add_argument
    add("--cases", type=count, default=12, metavar="N", help="conversations of each skill")
    add("--reply-tokens", type=count, default=96, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    import torch

    with torch.inference_mode():
        rows = kl_rows(args.cases, args.reply_tokens)
    write_report("kv-bits", rows, args)
    return 0


def kl_rows(num_cases: int, reply_tokens: int) -> list[dict[str, Any]]:
    """A row a format."""
    import torch

    scorer = Scorer()
    texts = _texts(scorer, num_cases, reply_tokens)
    plain = {skill: [scorer.logits(ids) for ids, _ in own] for skill, own in texts.items()}
    rows = []
    for form in formats():
        scorer.form = form
        row: dict[str, Any] = {
            "format": form.name,
            "bits": round(form.bits, 2),
            "smaller": round(16 / form.bits, 2),
        }
        kl_all, kl_replies, same = [], [], []
        for skill, own in texts.items():
            of_skill = []
            for (ids, written), truth in zip(own, plain[skill], strict=True):
                found = scorer.logits(ids)
                kl = _kl(truth, found)
                kl_all.append(kl)
                of_skill.append(kl[written])
                same.append((truth.argmax(1) == found.argmax(1))[written].float())
            kl_replies += of_skill
            row[skill] = round(torch.cat(of_skill).mean().item(), 5)
        row["replies"] = round(torch.cat(kl_replies).mean().item(), 5)
        row["all tokens"] = round(torch.cat(kl_all).mean().item(), 5)
        row["same best"] = round(torch.cat(same).mean().item(), 4)
        rows.append(row)
        print(row, flush=True)
    return rows


def formats() -> Iterator[Format]:
    """All that are measured."""
    import torch

    def each(name: str, bits: float, rounding: Rounding, **more: Any) -> Format:
        return Format(name, bits, rounding, rounding, **more)

    yield each("int8 token", 8 + 32 / 64, partial(by_largest, limit=127))
    yield each("fp8 token", 8 + 32 / 64, float8)
    one = 16 / 64
    for bits in (4, 3, 2):
        limit = 2 ** (bits - 1)
        for name, rounding, extra in (
            ("token", partial(by_largest, limit=limit - 1), one),
            ("q4_0", partial(by_signed_largest, limit=limit), one),
            ("q4_0 fit", partial(by_signed_largest, limit=limit, fit=True), one),
            ("groups", partial(by_range, bits=bits), 1.0),
            ("asym", partial(by_range, bits=bits, group=64), 0.5),
            ("codebook", partial(by_codebook, bits=bits), one),
        ):
            yield each(f"int{bits} {name}", bits + extra, rounding)
            turned = partial(behind_hadamard, rounding)
            yield each(f"int{bits} h-{name}", bits + extra, turned)
            if name == "q4_0":
                yield Format(f"int{bits} h-{name} keys only", bits, turned, lambda x: x)
                yield Format(f"int{bits} h-{name} values only", bits, lambda x: x, turned)
        by_channel = partial(by_tokens, bits=bits)
        for residual in (0, 64, 128):
            yield Format(
                f"int{bits} kivi-{residual}",
                bits + 1.0,
                by_channel,
                partial(by_range, bits=bits),
                residual,
                GROUP,
            )
    del torch


def by_largest(x: Tensor, limit: int) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / limit).bfloat16().float().clamp_min(1e-30)
    return (x / scale).round().clamp(-limit, limit) * scale


def float8(x: Tensor) -> Tensor:
    import torch

    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def by_signed_largest(x: Tensor, limit: int, fit: bool = False) -> Tensor:
    at = x.abs().argmax(-1, keepdim=True)
    scale = (x.gather(-1, at) / -limit).bfloat16().float()
    scale = scale + (scale == 0) * 1e-30
    numbers = (x / scale).round().clamp(-limit, limit - 1)
    if fit:
        scale = (x * numbers).sum(-1, keepdim=True) / numbers.square().sum(-1, keepdim=True)
        scale = scale.bfloat16().float()
    return numbers * scale


def by_range(x: Tensor, bits: int, group: int = GROUP) -> Tensor:
    parts = x.unflatten(-1, (-1, group))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    most = 2**bits - 1
    low = low.half().float()
    scale = ((high - low) / most).half().float().clamp_min(1e-7)
    return (((parts - low) / scale).round().clamp(0, most) * scale + low).flatten(-2)


def by_tokens(x: Tensor, bits: int) -> Tensor:
    """Channel by channel; a last group that is not whole stays plain."""
    import torch

    whole = x.shape[1] // GROUP * GROUP
    rounded = by_range(x[:, :whole].transpose(1, 2), bits).transpose(1, 2)
    return torch.cat((rounded, x[:, whole:]), 1)


def by_codebook(x: Tensor, bits: int) -> Tensor:
    """Numbers of Lloyd and Max for a normal distribution, the scale the root mean square, then
    fitted once to the numbers chosen."""
    import torch

    book = normal_codebook(bits)
    bounds = (book[1:] + book[:-1]) / 2
    scale = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    numbers = book[torch.bucketize(x / scale, bounds)]
    scale = (x * numbers).sum(-1, keepdim=True) / numbers.square().sum(-1, keepdim=True)
    return numbers * scale.bfloat16().float()


@functools.cache
def normal_codebook(bits: int) -> Tensor:
    import torch

    grid = torch.linspace(-6, 6, 20001, dtype=torch.float64)
    weight = (-grid.square() / 2).exp()
    book = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(2000):
        cell = torch.bucketize(grid, (book[1:] + book[:-1]) / 2)
        book = torch.zeros_like(book).scatter_add_(0, cell, weight * grid) / torch.zeros_like(
            book
        ).scatter_add_(0, cell, weight)
    return book.float()


def behind_hadamard(rounding: Rounding, x: Tensor) -> Tensor:
    turn = hadamard(x.shape[-1])
    return rounding(x @ turn) @ turn


def hadamard(size: int) -> Tensor:
    """[size, size], symmetric and orthogonal."""
    import torch

    turn = torch.ones(1, 1)
    while len(turn) < size:
        turn = torch.cat((torch.cat((turn, turn), 1), torch.cat((turn, -turn), 1)))
    return turn * size**-0.5


class Scorer:
    """The embedded model in float32, with access to all logits and KV in a format."""

    def __init__(self) -> None:
        import torch

        from ...kernels.registry import select_kernels
        from ...runtime.execute.model_runner import ModelRunner
        from ...runtime.models.model_config import read_model_config

        self.form: Format | None = None
        self._seen: list[Tensor] = []
        kernels = select_kernels(torch.float32, mode="reference")
        self._plain = kernels.paged_attention
        self._runner = ModelRunner(
            EMBEDDED_MODEL,
            read_model_config(EMBEDDED_MODEL),
            dtype="float32",
            kernels=replace(
                kernels,
                paged_attention=self._attention,
                make_output_linear=self._watching(kernels.make_output_linear),
            ),
            max_total_tokens=_MAX_TOKENS,
            max_running_requests=1,
        )

    def write(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The prompt and the model's reply, to its end."""
        text, start = list(prompt), 0
        for _ in range(num_tokens):
            row = self._row(text[start:], start, sampling=SamplingParams(temperature=0.0))
            token = self._runner.execute(StepPlan(0, (row,))).rows[0].token_id
            assert token is not None
            start = len(text)
            text.append(token)
            if token == 2:
                break
        return text

    def logits(self, text: list[int]) -> Tensor:
        """[tokens, vocab_size] float32."""
        import torch

        self._seen.clear()
        self._runner.execute(StepPlan(0, (self._row(text, 0, target_ids=(*text[1:], 0)),)))
        return torch.cat(self._seen).float()

    def _row(self, ids: list[int], start: int, **wanted: Any) -> Row:
        update = PageUpdate(0, tuple(range(start + len(ids))))
        return Row(0, 0, start, tuple(ids), update, **wanted)

    def _watching(self, make: MakeOutputLinear) -> MakeOutputLinear:
        def make_watched(weight: Weight) -> Linear:
            linear = make(weight)

            def watched(x: Tensor) -> Tensor:
                logits = linear(x)
                self._seen.append(logits.clone())
                return logits

            return watched

        return make_watched

    def _attention(
        self, q: Tensor, kv_layer: Any, plan: Any, sink_logits: Tensor | None = None
    ) -> Tensor:
        if self.form is None:
            return self._plain(q, kv_layer, plan, sink_logits)
        keys, values = kv_layer[:, :, : len(q)]
        return attend(q, keys, values, self.form)


def attend(q: Tensor, keys: Tensor, values: Tensor, form: Format) -> Tensor:
    """q [S, H, D], keys and values [KV, S, D] -> [S, H, D]; each query sees as plain what a cache
    of the tokens up to it holds so."""
    import torch

    size, num_heads, dims = q.shape
    group = num_heads // len(keys)
    at = torch.arange(size)
    num_tokens = at[:, None] + 1
    # Whole groups of keys before the residual; values up to it.
    before = (num_tokens - form.residual).clamp_min(0)
    is_rounded_key = at < before // form.keys_by * form.keys_by
    is_rounded_value = at < before

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 0)

    heads = q.transpose(0, 1)
    rounded = heads @ spread(form.keys(keys)).mT
    scores = torch.where(is_rounded_key, rounded, heads @ spread(keys).mT) * dims**-0.5
    probs = scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1)
    out = (probs * is_rounded_value) @ spread(form.values(values))
    out += (probs * ~is_rounded_value) @ spread(values)
    return out.transpose(0, 1)


def _kl(truth: Tensor, found: Tensor) -> Tensor:
    log_p, log_q = truth.log_softmax(1), found.log_softmax(1)
    kl: Tensor = (log_p.exp() * (log_p - log_q)).sum(1)
    return kl


def _texts(
    scorer: Scorer, num_cases: int, reply_tokens: int
) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By skill: conversations whose replies the model has written, and the places of the tokens
    after which one of them was drawn."""
    from ...runtime.models.model_config import read_model_config
    from ...runtime.tokenizer.chat_template import ChatTemplate
    from ...runtime.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer(EMBEDDED_MODEL, read_model_config(EMBEDDED_MODEL).vocab_size)
    template = ChatTemplate(EMBEDDED_MODEL, tokenizer)

    def written(system: list[str], turns: list[str]) -> tuple[list[int], list[int]]:
        first = ["system"] if system else []
        ids: list[int] = []
        places: list[int] = []
        for turn, text in enumerate(turns[:6]):
            roles = [*first, *["user", "assistant"] * turn, "user"]
            between = template.delimiters(roles, open_turn=True)
            if turn == 0:
                ids += template.encode(between[0], goes_on=False)
                for own, after in zip(system, between[1:], strict=False):
                    ids += [*tokenizer.encode(own), *template.encode(after)]
            else:
                ids += template.encode(between[-3])
            ids += [*tokenizer.encode(text), *template.encode(between[-1])]
            start = len(ids)
            ids = scorer.write(ids, reply_tokens)
            places += range(start - 1, len(ids) - 1)
            if ids[-1] == 2:
                ids.pop()
        return ids, places

    told = conversations()
    return {
        skill: [written(case.system, case.user) for case in told[skill][:num_cases]]
        for skill in ("extract", "extract_many", "react", "chat")
    }
