"""Workloads end to end, the engine in this process, against a peer's continuous batching.

The peer runs after this engine's memory is free again, in a process of its own. One that is not
done within its limit is ended, and its ratio is then the least that it can be.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...errors import EngineError
from ...runtime.schedule.plan import RowResult
from ...runtime.schedule.request import FinishReason, Request
from ..harness.workloads import BOS, LOW, PromptBook, WorkItem, Workload
from ..serving.engines import EngineSpec, RunningEngine
from .context import Context
from .model_engine import ModelEngine, write_config
from .rows import Row, Target, at_least, attempt

_REPEATS = 2
_WARM_UP = 97  # the index of the discarded repeat
_LAST_CHARS = 1000
PEER = "transformers"


def serving(ctx: Context) -> Iterator[Row]:
    """The first model's workloads."""
    name, config = ctx.sizes.models[0]
    works = [(work, at_least(bound)) for work, bound in _workloads(ctx, config["vocab_size"])]
    taken: dict[str, float] = {}
    yield from attempt(name, _ours, ctx, name, config, works, taken)
    if ctx.peer_python is not None:
        yield from attempt(PEER, _theirs, ctx, config, works, taken)


def _ours(
    ctx: Context,
    name: str,
    config: dict[str, Any],
    works: list[tuple[Workload, Target]],
    taken: dict[str, float],
) -> Iterator[Row]:
    """Seconds per workload are stored in `taken`."""
    sizes = ctx.sizes.serving
    with ModelEngine(
        ctx, config,
        max_total_tokens=sizes.kv_tokens,
        max_running_requests=sizes.max_running_requests,
        max_model_len=max(work.num_tokens() for work, _ in works) + ctx.sizes.page_size,
        token_budget=8192,
    ) as model:  # fmt: skip
        for work, _ in works:
            runs = [_run(model, work.rotated(r)) for r in (_WARM_UP, *range(_REPEATS))]
            walls = [wall_s for wall_s, _ in runs[1:]]
            taken[work.name] = statistics.median(walls)
            outputs = sum(map(len, runs[-1][1].outputs.values()))
            prompts = sum(map(len, runs[-1][1].prompts.values()))
            yield Row(
                f"{name}, {work.description}", outputs / taken[work.name], "output tokens/s",
                details={"wall_s": walls, "prompt_tokens": prompts, "output_tokens": outputs,
                         "stats": model.engine.describe()["stats"]},
            )  # fmt: skip


class _Forest:
    """Submits each request of a workload once its parent is done, and listens to it."""

    def __init__(self, model: ModelEngine, work: Workload) -> None:
        self.book = PromptBook()
        self._model = model
        self._children = work.children()
        self._items: dict[int, WorkItem] = {}
        self._grow(None)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        return None

    def on_finish(self, request: Request) -> None:
        item = self._items[request.id]
        self.book.outputs[item.id] = list(request.output_ids)
        if request.finish_reason is FinishReason.LENGTH:
            self._grow(item.id)

    def _grow(self, parent: int | None) -> None:
        for item in self._children.get(parent, ()):
            request = self._model.submit(self.book.prompt(item), item.max_tokens, self)
            self._items[request.id] = item


def _run(model: ModelEngine, work: Workload) -> tuple[float, PromptBook]:
    """Seconds and outputs. Raises EngineError where a request ended early."""
    model.engine.flush_cache()
    started = time.perf_counter()
    book = _Forest(model, work).book
    model.run()
    wall_s = time.perf_counter() - started
    for item in work.requests:
        found = len(book.outputs.get(item.id, ()))
        if found != item.max_tokens:
            raise EngineError(f"{work.name}: request {item.id} gave {found} tokens")
    return wall_s, book


def _theirs(
    ctx: Context,
    config: dict[str, Any],
    works: list[tuple[Workload, Target]],
    taken: dict[str, float],
) -> Iterator[Row]:
    """Workloads with common prefixes first: the longest run meets the time limit last."""
    with tempfile.TemporaryDirectory(prefix="stemma-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        write_config(folder, config)
        peer = _Peer(ctx, folder, stack)
        for work, target in reversed(works):
            case = f"{PEER}, {work.description}"
            yield from attempt(case, peer.rows, work, case, target, taken.get(work.name))


class _Peer:
    """The peer's process, restarted after a timeout."""

    def __init__(self, ctx: Context, folder: Path, stack: ExitStack) -> None:
        self._ctx = ctx
        self._folder = folder
        self._stack = stack
        self._engine: RunningEngine | None = None
        self._kv_tokens = 0  # its own choice

    def rows(
        self, work: Workload, case: str, target: Target, ours_s: float | None
    ) -> Iterator[Row]:
        """One row. Where the library's default cache, sized by free memory, leaves too little for
        its steps, it runs again with a cache as large as ours."""
        try:
            wall_s, details = self._wall_s(work)
        except EngineError as error:
            if self._kv_tokens:
                raise
            self._kv_tokens = self._ctx.sizes.serving.kv_tokens
            wall_s, details = self._wall_s(work)
            details["failed_at_first"] = str(error)[-_LAST_CHARS:]
        if "ended" in details:
            case += ", not done in time: at least"
        tokens = sum(item.max_tokens for item in work.requests)
        yield Row(
            case, tokens / wall_s, "output tokens/s", None if ours_s is None else wall_s / ours_s,
            f"its time through ours ({PEER} {details['version']})", target,
            details={**details, "wall_s": wall_s, "ours_s": ours_s},
        )  # fmt: skip

    def _wall_s(self, work: Workload) -> tuple[float, dict[str, Any]]:
        """Seconds, and details. Raises EngineError except for a timeout."""
        limit_s = self._ctx.sizes.peer_limit_s
        engine = self._running(work)
        details: dict[str, Any] = {**engine.welcome, "kv_tokens": self._kv_tokens}
        limit = threading.Timer(limit_s, os.kill, (engine.pid, signal.SIGKILL))
        started = time.perf_counter()
        limit.start()
        try:
            return float(engine.run()["wall_s"]), details
        except EngineError as error:
            self._engine = None
            wall_s = time.perf_counter() - started
            if wall_s < limit_s:
                engine.close()
                raise
            return wall_s, {**details, "ended": str(error).splitlines()[0]}
        finally:
            limit.cancel()

    def _running(self, work: Workload) -> RunningEngine:
        """The peer, warmed up with a few requests like those of `work`."""
        if self._engine is None:
            assert self._ctx.peer_python is not None
            flags = ("--model", str(self._folder))
            spec = EngineSpec(PEER, "transformers_batching", self._ctx.peer_python, flags)
            started = RunningEngine(spec, threads=None, kv_tokens=self._kv_tokens)
            self._engine = self._stack.enter_context(started)
        engine = self._engine
        try:
            engine.load(self._write(_warm_up_of(work)), _WARM_UP)
            engine.run()
        except EngineError:
            self._engine = None
            engine.close()
            raise
        engine.load(self._write(work), 0)
        return engine

    def _write(self, work: Workload) -> Path:
        path = self._folder / f"{work.name}.json"
        path.write_text(work.to_json())
        return path


def _warm_up_of(work: Workload) -> Workload:
    """A few requests of the same lengths."""
    roots = [item for item in work.requests if item.parent is None][:4]
    return Workload(
        "warm-up", work.description, work.vocab, work.ignore_eos, None, tuple(roots), work.low
    )


def _workloads(ctx: Context, vocab: int) -> Iterator[tuple[Workload, float]]:
    """Each with the least ratio of the peer's time to ours that is required. Shapes of
    bench/workloads' W3, W1 and W4, larger."""
    sizes, numbers = ctx.sizes.serving, random.Random(7)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(LOW, vocab) for _ in range(count))

    def made(name: str, description: str, items: list[WorkItem]) -> Workload:
        return Workload(name, description, vocab, True, None, tuple(items))

    num, length, out = sizes.unshared
    items = [WorkItem(i, (BOS, *draw(length - 1)), out) for i in range(num)]
    yield made("unshared", f"{num} x {length} own, {out} out", items), 5.0

    num, common, own, out = sizes.fanout
    prefix = (BOS, *draw(common - 1))
    items = [WorkItem(i, prefix + draw(own), out) for i in range(num)]
    yield made("fanout", f"{num} x ({common} common + {own} own), {out} out", items), 10.0

    root, levels, branches, own, out = sizes.tree
    text = f"a root of {root}, {levels} levels of {branches}, {own} in and {out} out a node"
    yield made("tree", text, list(_tree(draw(root - 1), levels, branches, own, out, draw))), 10.0


def _tree(
    root: tuple[int, ...], levels: int, branches: int, own: int, out: int, draw: Any
) -> Iterator[WorkItem]:
    yield WorkItem(0, (BOS, *root), out)
    level, next_id = [0], 1
    for depth in range(1, levels + 1):
        parents, level = level, []
        for parent in parents:
            for _ in range(branches):
                yield WorkItem(next_id, draw(own), out, parent, depth)
                level.append(next_id)
                next_id += 1
