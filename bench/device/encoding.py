"""Texts a second of an encoder: texts packed end to end, against transformers with padding.

Texts have lengths as documents and queries have them (log-normal). transformers gets them in
batches padded to their longest: in the order in which they came, and sorted by length, which only
who has all of them at once can do. Rounds alternate; the median counts, of CPU time on one thread,
which other processes of the machine change least.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..harness.report import write_report

Texts = Sequence[tuple[int, ...]]

# As bge-small-en-v1.5 has them; weights are random.
_CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536,
    "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
    "pad_token_id": 0, "hidden_act": "gelu",
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The benchmark's flags."""
    add = parser.add_argument
    add("--texts", type=int, default=96, metavar="N", help="default: %(default)s")
    add("--median-tokens", type=int, default=40, metavar="N", help="default: %(default)s")
    add("--batch", type=int, default=32, metavar="N", help="of transformers (default: %(default)s)")
    add("--token-budget", type=int, default=2048, metavar="N", help="default: %(default)s")
    add("--layers", type=int, default=12, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    import torch
    from transformers import AutoConfig, AutoModel

    from ...runtime.execute.encoder_runner import EncoderRunner
    from ...runtime.models.encoders.registry import read_encoder

    torch.set_num_threads(1)
    texts = _texts(args.texts, args.median_tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(
            json.dumps({**_CONFIG, "num_hidden_layers": args.layers})
        )
        peer: Any = AutoModel
        peer = peer.from_config(AutoConfig.from_pretrained(folder)).eval()
        peer.save_pretrained(folder)
        peer = peer.to(getattr(torch, args.dtype))
        config = read_encoder(folder)
        assert config is not None
        runner = EncoderRunner(folder, config, dtype=args.dtype)
        ways: dict[str, Callable[[], object]] = {
            "packed": lambda: _packed(runner, texts, args.token_budget),
            "padded, as they came": lambda: _padded(peer, texts, args.batch),
            "padded, sorted": lambda: _padded(peer, sorted(texts, key=len), args.batch),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            for way, encode in ways.items():
                started = time.process_time()
                encode()
                if number:  # the first round warms up
                    seconds[way].append(time.process_time() - started)
    packed_s = statistics.median(seconds["packed"])
    rows = [_row(way, times, packed_s, texts) for way, times in seconds.items()]
    write_report("encoding", rows, args, num_tokens=sum(map(len, texts)))
    return 0


def _row(way: str, times: Sequence[float], packed_s: float, texts: Texts) -> dict[str, Any]:
    median_s = statistics.median(times)
    return {
        "way": way,
        "CPU time, s": median_s,
        "texts/s": len(texts) / median_s,
        "tokens/s": sum(map(len, texts)) / median_s,
        "times the time of packed": median_s / packed_s,
    }


def _texts(num_texts: int, median_tokens: int) -> Texts:
    rng = random.Random(0)
    most = int(_CONFIG["max_position_embeddings"])  # type: ignore[call-overload]
    lengths = [
        max(4, min(most, round(rng.lognormvariate(0.0, 1.0) * median_tokens)))
        for _ in range(num_texts)
    ]
    return [tuple(rng.randrange(1000, 30_000) for _ in range(length)) for length in lengths]


def _packed(runner: Any, texts: Texts, token_budget: int) -> None:
    """As an engine's steps take them."""
    from ...runtime.schedule.plan import Encoding, Row, StepPlan

    rows: list[Row] = []
    for number, text in enumerate(texts):
        if rows and sum(len(row.input_ids) for row in rows) + len(text) > token_budget:
            runner.submit(StepPlan(0, tuple(rows)))
            rows = []
        rows.append(Row(number, 0, 0, text, encoding=Encoding("cls")))
    runner.submit(StepPlan(0, tuple(rows)))


def _padded(model: Any, texts: Texts, batch: int) -> None:
    import torch

    for first in range(0, len(texts), batch):
        part = texts[first : first + batch]
        longest = max(map(len, part))
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(part):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
