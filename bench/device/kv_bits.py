"""Keys and values in 8, 4 and 2 bits: what each format costs in predictions, memory and time.

Predictions: the embedded model's attention in float32 over what a format makes of keys and values,
on what people ask of that model and what it then writes by itself. KL of the distributions of the
next token, in nats, to those of plain KV: of the tokens of replies by skill, and of all tokens.

    int8, fp8, int4    as `--kv-cache-dtype` keeps them
    range              a scale and a lowest number a vector, in 16 bits each
    groups             the same for each 32 numbers of a vector
    h-                 behind a Hadamard transform (QuaRot: Ashkboos et al. 2024)
    kivi               keys by channel in groups of 32 tokens, values by token in groups of 32
                       numbers, the last 0, 64 or 128 tokens plain (KIVI: Liu et al. 2024)

Time: a decode step of many rows over long contexts, of KV of random bits. The formats take turns
in one process, a step each a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...flags import count
from ...kernels.kv_cache_dtype import KV_CACHE_DTYPES
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.execute.threads import configure_threads
from ...runtime.schedule.plan import PageUpdate, Row, StepPlan
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.model import PRESETS, checkpoint_config
from ..harness.report import write_report
from .scorer import Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from ...runtime.execute.model_runner import ModelRunner

SKILLS = ("extract", "extract_many", "react", "chat")
GROUP = 32  # numbers or tokens
_CONVERSATIONS = "../speculation/data/conversations.json"
_MAX_TOKENS = 2048
_MAX_TURNS = 6
_GREEDY = SamplingParams(temperature=0.0)
Rounding = Callable[["Tensor"], "Tensor"]
"""[num_kv_heads, S, head_dim] float32 -> what is read of it, in the same shape."""


@dataclass(frozen=True)
class Format:
    """`bits`: of a number with its share of scales, at 64 numbers a vector."""

    name: str
    bits: float
    keys: Rounding
    values: Rounding
    residual: int = 0  # so many last tokens are plain
    keys_by: int = 1  # so many keys are rounded together


@dataclass(frozen=True)
class Text:
    """`drawn`: places of the tokens after which the model drew one."""

    ids: list[int]
    drawn: list[int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench kv-bits`."""
    add = parser.add_argument
    add("--part", choices=("predictions", "time"), action="append", help="default: both")
    add("--cases", type=count, default=20, metavar="N", help="conversations of each skill")
    add("--reply-tokens", type=count, default=96, metavar="N")
    add("--rows", type=count, default=64, metavar="N", help="of a decode step")
    add("--context-tokens", type=count, default=4096, metavar="N", help="of each row")
    add("--layers", type=count, metavar="N", help="of llama-160m (default: all)")
    add("--repeats", type=count, default=9, metavar="N", help="rounds")
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.num_threads:
        configure_threads(args.num_threads, None)
    import torch

    parts = args.part or ("predictions", "time")
    rows = []
    with torch.inference_mode():
        if "predictions" in parts:
            rows += prediction_rows(args.cases, args.reply_tokens)
        if "time" in parts:
            rows += time_rows(args)
    write_report("kv-bits", rows, args)
    return 0


# --- predictions ----------------------------------------------------------------------------------


def prediction_rows(
    num_cases: int, reply_tokens: int, measured: Sequence[Format] | None = None
) -> list[dict[str, Any]]:
    """A row a format."""
    scorer = _Scorer()
    texts = _texts(scorer, num_cases, reply_tokens)
    plain = {skill: [scorer.logits(text.ids) for text in own] for skill, own in texts.items()}
    rows = []
    for scorer.form in formats() if measured is None else measured:
        of_all: list[Tensor] = []
        of_replies: dict[str, list[Tensor]] = {skill: [] for skill in texts}
        same: list[Tensor] = []
        for skill, own in texts.items():
            for text, truth in zip(own, plain[skill], strict=True):
                found = scorer.logits(text.ids)
                kl = _kl(truth, found)
                of_all.append(kl)
                of_replies[skill].append(kl[text.drawn])
                same.append((truth.argmax(1) == found.argmax(1))[text.drawn].float())
        assert scorer.form is not None
        rows.append(
            {"format": scorer.form.name, "bits": scorer.form.bits, "smaller": 16 / scorer.form.bits}
            | {skill: _mean(kls) for skill, kls in of_replies.items()}
            | {
                "replies": _mean([kl for kls in of_replies.values() for kl in kls]),
                "all tokens": _mean(of_all),
                "same best, %": 100 * _mean(same),
            }
        )
    return rows


def _mean(parts: Sequence[Tensor]) -> float:
    import torch

    return round(torch.cat(list(parts)).mean().item(), 5)


def _kl(truth: Tensor, found: Tensor) -> Tensor:
    log_p, log_q = truth.log_softmax(1), found.log_softmax(1)
    kl: Tensor = (log_p.exp() * (log_p - log_q)).sum(1)
    return kl


def formats() -> Iterator[Format]:
    """All that are measured."""
    import torch

    def each(name: str, bits: float, rounding: Rounding) -> Format:
        return Format(name, bits, rounding, rounding)

    fp8 = torch.float8_e4m3fn
    kept = {"int8": (8.5, torch.int8), "fp8": (8.5, fp8), "int4": (4.5, torch.uint8)}
    for name, (bits, dtype) in kept.items():
        yield each(name, bits, partial(_as_kept, dtype=dtype))
    for num_bits in (4, 2):
        for group, name, extra in ((None, "range", 0.5), (GROUP, "groups", 1.0)):
            rounding = partial(by_range, bits=num_bits, group=group)
            yield each(f"{num_bits} bits, {name}", num_bits + extra, rounding)
            turned = partial(_transformed, rounding)
            yield each(f"{num_bits} bits, h-{name}", num_bits + extra, turned)
        values = partial(by_range, bits=num_bits, group=GROUP)
        for residual in (0, 64, 128):
            yield Format(
                f"{num_bits} bits, kivi-{residual}", num_bits + 1.0,
                partial(by_channel, bits=num_bits), values, residual, GROUP,
            )  # fmt: skip


def _as_kept(x: Tensor, dtype: Any) -> Tensor:
    from ...kernels.reference.kv_store import dequantized, quantized

    return dequantized(*quantized(x, dtype))


def by_range(x: Tensor, bits: int, group: int | None) -> Tensor:
    """group: so many numbers of a vector have a range of their own; None: all have one."""
    parts = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    low, high = parts.aminmax(dim=-1, keepdim=True)
    most = 2**bits - 1
    low = low.bfloat16().float()
    scale = ((high - low) / most).bfloat16().float().clamp_min(1e-30)
    rounded: Tensor = ((parts - low) / scale).round().clamp(0, most) * scale + low
    return rounded.flatten(-2)


def by_channel(x: Tensor, bits: int) -> Tensor:
    """Whole groups of tokens, channel by channel; the last one stays plain if it is not whole."""
    import torch

    whole = x.shape[1] // GROUP * GROUP
    rounded = by_range(x[:, :whole].transpose(1, 2), bits, GROUP).transpose(1, 2)
    return torch.cat((rounded, x[:, whole:]), 1)


def _transformed(rounding: Rounding, x: Tensor) -> Tensor:
    from ...kernels.reference.kv_store import hadamard

    return hadamard(rounding(hadamard(x)))


def attend(q: Tensor, keys: Tensor, values: Tensor, form: Format) -> Tensor:
    """q [S, H, D], keys and values [KV, S, D] -> [S, H, D]; of the tokens up to its own each query
    sees as plain those that a cache of these would hold so."""
    import torch

    size, num_heads, dims = q.shape
    group = num_heads // len(keys)
    at = torch.arange(size)
    before = (at[:, None] + 1 - form.residual).clamp_min(0)
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
    by_token: Tensor = out.transpose(0, 1)
    return by_token


class _Scorer(Scorer):
    """The embedded model in float32, with KV in a format."""

    def __init__(self) -> None:
        import torch

        from ...kernels.registry import select_kernels

        self.form: Format | None = None
        kernels = select_kernels(torch.float32, mode="reference")
        self._plain = kernels.paged_attention
        super().__init__(
            EMBEDDED_MODEL,
            replace(kernels, paged_attention=self._attention),
            dtype="float32",
            max_total_tokens=_MAX_TOKENS,
        )

    def _attention(
        self, q: Tensor, kv_layer: Any, plan: object, sink_logits: Tensor | None = None
    ) -> Tensor:
        if self.form is None:
            return self._plain(q, kv_layer, plan, sink_logits)
        keys, values = kv_layer[:, :, : len(q)]
        return attend(q, keys, values, self.form)


def _texts(scorer: _Scorer, num_cases: int, reply_tokens: int) -> dict[str, list[Text]]:
    """Conversations whose replies the model has written, by skill."""
    from ...runtime.models.model_config import read_model_config
    from ...runtime.tokenizer.chat_template import ChatTemplate
    from ...runtime.tokenizer.tokenizer import Tokenizer

    config = read_model_config(EMBEDDED_MODEL)
    tokenizer = Tokenizer(EMBEDDED_MODEL, config.vocab_size)
    template = ChatTemplate(EMBEDDED_MODEL, tokenizer)
    (end,) = config.eos_token_ids

    def written(system: list[str], turns: list[str]) -> Text:
        roles = [*["system"] * len(system), *["user", "assistant"] * len(turns)]
        ids: list[int] = []
        drawn: list[int] = []
        between = template.delimiters(roles[:-1], open_turn=True)
        texts: list[str | None] = [*system]
        for turn in turns:
            texts += [turn, None]
        for place, text in enumerate(texts):
            ids += template.encode(between[place], goes_on=place > 0)
            if text is not None:
                ids += tokenizer.encode(text)
                continue
            start = len(ids)
            ids = scorer.write(ids, reply_tokens, _GREEDY, end)
            drawn += range(start - 1, len(ids) - 1)
            if ids[-1] == end:  # which the template has, too
                ids.pop()
        return Text(ids, [at for at in drawn if at < len(ids)])

    told = json.loads(files(__package__).joinpath(_CONVERSATIONS).read_text())
    return {
        skill: [
            written(case["system"], case["user"][:_MAX_TURNS])
            for case in [each for each in told if each["skill"] == skill][:num_cases]
        ]
        for skill in SKILLS
    }


# --- time -----------------------------------------------------------------------------------------


def time_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a format, of llama-160m in bfloat16."""
    shape = PRESETS["llama-160m"]
    shape = replace(shape, layers=args.layers or shape.layers)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint_config(shape)))
        runners: dict[str, ModelRunner] = {
            name: _runner(Path(folder), name, args) for name in KV_CACHE_DTYPES
        }
    plan = _decode_plan(args.rows, args.context_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(1 + args.repeats):
        for name, runner in runners.items():
            started = time.perf_counter()
            runner.execute(plan)
            seconds[name].append(time.perf_counter() - started)
    plain = seconds["auto"][1:]
    return [
        {
            "format": "bf16" if name == "auto" else name,
            "bytes a token": runners[name].kv_layout.bytes_per_token,
            "step, ms": round(1e3 * statistics.median(each[1:]), 1),
            "fastest, ms": round(1e3 * min(each[1:]), 1),
            "bf16 / it": round(
                statistics.median(a / b for a, b in zip(plain, each[1:], strict=True)), 2
            ),
        }
        for name, each in seconds.items()
    ]


def _runner(folder: Path, kv_cache_dtype: Any, args: argparse.Namespace) -> ModelRunner:
    from ...runtime.execute.model_runner import ModelRunner
    from ...runtime.models.model_config import read_model_config

    runner = ModelRunner(
        folder, read_model_config(folder), dtype="bfloat16", load_format="dummy",
        max_total_tokens=args.rows * args.context_tokens,
        max_running_requests=args.rows, max_model_len=args.context_tokens,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    for part in runner.pool.parts:
        for tensor in part:
            tensor.random_(0x20, 0x3C)  # bytes of which every format makes small numbers
    return runner


def _decode_plan(num_rows: int, num_tokens: int) -> StepPlan:
    """The last of so many tokens of each row; rows share nothing."""
    rows = []
    for index in range(num_rows):
        pages = tuple(range(index * num_tokens, (index + 1) * num_tokens))
        update = PageUpdate(0, pages)
        rows.append(Row(index, index, num_tokens - 1, (5,), update, sampling=_GREEDY))
    return StepPlan(0, tuple(rows))
