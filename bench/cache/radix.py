"""The radix tree, one thread: match, lock, evict when short, insert and unlock in a full pool.

10,000 sequences of 1,024 tokens (128 common to all, 384 from one of 100 groups, 512 their own) go
through a pool of 2M tokens, for page sizes 1 and 16 and evictions of 16,384 and of 512 tokens. Each
is matched and locked, gets pages for the tokens that are missing (after an eviction if none are
free), is inserted from the root and unlocked.

A `*_us` is the mean over the calls of a run, `evict_us` with the return of the pages;
`tokens_per_s` counts all of the loop. Both are medians over the repeats; `spread` is (most - least)
/ median of the latter.

With --peer the same loop drives SGLang's trees too, each in its own process, one run of each in
turn; `ratio` and `cpu_ratio` are our tokens_per_s and tokens_per_cpu_s over theirs, again medians.
--growth shows instead how the cost of a call grows with the number of nodes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...errors import InvalidRequest, StemmaError
from ...flags import count
from ...radix.pages import PageAllocator
from ...radix.tree import Match, RadixTree
from ..harness.report import write_report
from .radix_growth import DEPTH, FAN_OUTS, growth

NUM_COMMON, NUM_GROUP, NUM_OWN = 128, 384, 512
NUM_GROUPS = 100
PEERS = ("rust", "python")


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the sequences; the times are microseconds per call."""

    tokens_per_s: float
    tokens_per_cpu_s: float  # the same by CPU time, which a busy neighbour disturbs less
    match_us: float
    insert_us: float
    evict_us: float
    hit_rate: float  # share of the tokens that were matched


class Subject(Protocol):
    """A tree and its pool for one run; counts are tokens."""

    def match(self, token_ids: array[int]) -> tuple[Any, int]:
        """A handle on the longest cached prefix, including its pages, and its length."""

    def lock(self, handle: Any) -> Any:
        """Lock the prefix; returns the argument for unlock()."""

    def num_free(self) -> int: ...

    def evict(self, num_tokens: int) -> None: ...

    def allocate(self, handle: Any, num_tokens: int) -> Any:
        """The pages of the whole sequence: those of its prefix and new ones."""

    def insert(self, token_ids: array[int], pages: Any) -> None: ...

    def unlock(self, lock: Any) -> None: ...


class StemmaTree:
    """RadixTree and PageAllocator."""

    def __init__(self, page_size: int, pool_tokens: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(pool_tokens // page_size)

    def match(self, token_ids: array[int]) -> tuple[Match, int]:
        match = self.tree.match("", token_ids)
        return match, match.num_tokens

    def lock(self, handle: Match) -> Match:
        self.tree.lock(handle.node)
        return handle

    def num_free(self) -> int:
        return self.allocator.num_free * self.page_size

    def evict(self, num_tokens: int) -> None:
        self.allocator.free(self.tree.evict(num_tokens // self.page_size))

    def allocate(self, handle: Match, num_tokens: int) -> array[int]:
        return handle.pages + self.allocator.allocate(num_tokens // self.page_size)

    def insert(self, token_ids: array[int], pages: array[int]) -> None:
        self.tree.insert("", token_ids, pages)

    def unlock(self, lock: Match) -> None:
        self.tree.unlock(lock.node)


def sequences(count: int, typecode: str, seed: int = 0) -> list[array[int]]:
    """The workload, with ids below 65,536; the same for every `typecode` of its arrays."""
    rng = random.Random(seed)

    def run(num_tokens: int) -> array[int]:
        return array(typecode, array("H", rng.randbytes(2 * num_tokens)))

    common = run(NUM_COMMON)
    groups = [common + run(NUM_GROUP) for _ in range(NUM_GROUPS)]
    return [rng.choice(groups) + run(NUM_OWN) for _ in range(count)]


def drive(subject: Subject, workload: Sequence[array[int]], evict_chunk: int) -> Run:
    """One pass; an eviction frees `evict_chunk` tokens, or more where a sequence needs more."""
    clock = time.perf_counter
    match_s = insert_s = evict_s = 0.0
    num_evictions = num_hits = 0
    gc.collect()
    started, cpu_started = clock(), time.process_time()
    for token_ids in workload:
        at = clock()
        handle, num_matched = subject.match(token_ids)
        match_s += clock() - at
        lock = subject.lock(handle)
        num_missing = len(token_ids) - num_matched
        if subject.num_free() < num_missing:
            at = clock()
            subject.evict(max(evict_chunk, num_missing))
            evict_s += clock() - at
            num_evictions += 1
        pages = subject.allocate(handle, num_missing)
        at = clock()
        subject.insert(token_ids, pages)
        insert_s += clock() - at
        subject.unlock(lock)
        num_hits += num_matched
    total_s, cpu_s = clock() - started, time.process_time() - cpu_started
    num_tokens = sum(map(len, workload))
    return Run(
        tokens_per_s=num_tokens / total_s,
        tokens_per_cpu_s=num_tokens / cpu_s,
        match_us=match_s / len(workload) * 1e6,
        insert_us=insert_s / len(workload) * 1e6,
        evict_us=evict_s / max(num_evictions, 1) * 1e6,
        hit_rate=num_hits / num_tokens,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench radix`."""
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--sequences", type=count, default=10_000)
    parser.add_argument("--pool-tokens", type=count, default=2_000_000)
    parser.add_argument("--page-size", type=count, nargs="+", default=[1, 16])
    parser.add_argument("--evict-chunk", type=count, nargs="+", default=[16_384, 512])
    parser.add_argument(
        "--peer", type=Path, metavar="FOLDER",
        help="an unpacked wheel of SGLang 0.5.23 (needs torch)",
    )  # fmt: skip
    parser.add_argument(
        "--peer-tree", nargs="+", choices=PEERS, default=PEERS,
        help="its compiled core, its Python class (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--growth", type=count, nargs="*", metavar="FAN_OUT",
        help=f"cost by number of nodes instead, in {DEPTH} levels (default: {FAN_OUTS})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.growth is not None:
        write_report("radix_growth", growth(args.growth or FAN_OUTS, args.repeats), args)
        return 0
    if args.peer and not (args.peer / "sglang" / "srt" / "mem_cache").is_dir():
        raise InvalidRequest.of("--peer", str(args.peer), "an unpacked wheel of SGLang")
    workload = sequences(args.sequences, "i")

    def stemma(page_size: int, evict_chunk: int) -> Run:
        return drive(StemmaTree(page_size, args.pool_tokens), workload, evict_chunk)

    with ExitStack() as stack:
        trees: dict[str, Callable[[int, int], Run]] = {"stemma": stemma}
        for name in args.peer_tree if args.peer else ():
            trees[f"sglang {name}"] = stack.enter_context(_peer(name, args))
        rows = []
        for evict_chunk in args.evict_chunk:
            for page_size in args.page_size:
                rows += _compare(trees, page_size, evict_chunk, args.repeats)
    write_report("radix", rows, args)
    return 0


@contextmanager
def _peer(name: str, args: argparse.Namespace) -> Iterator[Callable[[int, int], Run]]:
    """A process that runs one of SGLang's trees on request."""
    command = [sys.executable, "-m", f"{__package__}.radix_sglang", str(args.peer), name]
    command += [str(args.sequences), str(args.pool_tokens)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        ask, answers = process.stdin, process.stdout
        assert ask is not None and answers is not None, "both are pipes"

        def run_once(page_size: int, evict_chunk: int) -> Run:
            print(page_size, evict_chunk, file=ask, flush=True)
            answer = answers.readline()
            if not answer:
                raise StemmaError(f"SGLang's {name} tree failed; its messages are above")
            return Run(**json.loads(answer))

        yield run_once


def _compare(
    trees: dict[str, Callable[[int, int], Run]], page_size: int, evict_chunk: int, repeats: int
) -> list[dict[str, object]]:
    """A row per tree."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(repeats):
        for name, run_once in trees.items():
            runs[name].append(asdict(run_once(page_size, evict_chunk)))
    setting = {"page_size": page_size, "evict_chunk": evict_chunk}
    return [
        {"tree": name, **setting, **_summary(found, runs["stemma"])} for name, found in runs.items()
    ]


def _summary(found: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the runs, and how many times faster ours were."""
    medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
    speeds = [one["tokens_per_s"] for one in found]

    def ratio(key: str) -> float:
        pairs = zip(ours, found, strict=True)
        return statistics.median(mine[key] / theirs[key] for mine, theirs in pairs)

    return {
        **medians,
        "spread": (max(speeds) - min(speeds)) / medians["tokens_per_s"],
        "ratio": ratio("tokens_per_s"),
        "cpu_ratio": ratio("tokens_per_cpu_s"),
    }
