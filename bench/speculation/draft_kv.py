"""Whether a draft is as good behind a prefix from the cache as behind one that was just computed.

The same prompts, each with a greedy output: computed; with their KV in the pool; with it in host
memory; and in an engine that has just started, with it in files. A draft model whose KV stayed
behind anywhere would guess worse from there on. Each is an engine of its own, which has learnt from
other prompts how likely guesses are right. Step times are not noted, so that three tokens are
guessed each time whatever they cost: rates are compared, and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...flags import count
from ...frontend.client.backend import Backend
from ...frontend.dsl.expr import assistant, user
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...runtime.checkpoint.location import EMBEDDED_DRAFT, EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ..harness.report import write_report
from .conversations import conversations

_NUM_SHOTS = 12  # of a prompt: some 750 tokens, blocks of the store and most of a small pool
_CLOSE_S = 30.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench draft-kv`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--draft-model", default=str(EMBEDDED_DRAFT), metavar="FOLDER")
    add("--draft-quantization", default="none")
    add("--prompts", type=count, default=12, metavar="N")
    add("--tokens", type=count, default=48, metavar="N", help="of each output")
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    prompts = _prompts(args.prompts, 0)
    of_others = _prompts(args.prompts, args.prompts)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for where, options in _PREFIXES.items():
            store = {"kv_store": folder} if where in ("computed", "from files") else {}
            with _engine(args, **store, **options) as backend:
                _row(where, of_others, args.tokens, backend)  # to learn from
                if not store:
                    _row(where, prompts, 1, backend)
                rows.append(_row(where, prompts, args.tokens, backend))
    write_report("draft-kv", rows, args, model=args.model.resolve().name)
    return 0


# By where a prefix is: in an engine with so many tokens of KV in its pool and in host memory.
_PREFIXES = {
    "computed": {"max_total_tokens": 65_536},
    "in the pool": {"max_total_tokens": 65_536},
    "in host memory": {"max_total_tokens": 1024, "host_kv_tokens": 65_536},
    "from files": {"max_total_tokens": 65_536},
}


@contextmanager
def _engine(args: argparse.Namespace, **options: Any) -> Iterator[Backend]:
    from ...runtime.loaded_model import LoadedModel
    from ...training.recording import recording

    drafts = {name: getattr(args, name) for name in ("draft_model", "draft_quantization")}
    loaded = LoadedModel(
        EngineConfig(model=str(args.model), speculate="model", **drafts, **options)
    )
    assert loaded.engine.scheduler.speculation is not None, "there is a draft model"
    loaded.engine.scheduler.speculation.times.note = lambda *_: None  # type: ignore[method-assign]
    with recording(loaded) as (backend, _):
        yield backend
    if (store := loaded.engine.kv_store) is not None:
        store.flush(_CLOSE_S)
        store.close()


def _prompts(num: int, first: int) -> list[str]:
    """Questions with those of others before them."""
    shots = [case.user[0] for case in conversations()["extract"]]
    return [
        "\n\n".join(shots[(start + i) % len(shots)] for i in range(_NUM_SHOTS))
        for start in range(first, first + num)
    ]


@function
def _answer(s: ProgramState, prompt: str, num_tokens: int) -> None:
    s += user(prompt)
    s += assistant(gen("answer", max_tokens=num_tokens, temperature=0.0))


def _row(where: str, prompts: Sequence[str], num_tokens: int, backend: Backend) -> dict[str, Any]:
    metas = [
        _answer.run(prompt=prompt, num_tokens=num_tokens, backend=backend).get_meta_info("answer")
        for prompt in prompts
    ]
    total = {
        name: sum(meta[f"{name}_tokens"] for meta in metas)
        for name in ("prompt", "cached", "host", "disk", "drafted", "accepted")
    }
    return {
        "prefix": where,
        **{f"{name}_tokens": total[name] for name in ("prompt", "cached", "host", "disk")},
        "guessed": total["drafted"],
        "right_percent": round(100 * total["accepted"] / max(total["drafted"], 1), 1),
    }
