"""A model on two processes: what their sums cost, and the engine against one with as many threads.

Sums over shared memory, beside a copy of as many bytes into shared memory and out of it (what no
exchange can do without) and beside gloo. Engines: two ranks, or two stages, with a thread each, and
one process with two threads; rounds take turns. Medians. Of two stages also how long one waits for
the other while a prompt goes through them, beside what it must be: of m chunks 1 / (m + 1) where
both take as long, and more where one has more layers, because the other has the output projection.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ..harness.report import write_report

if TYPE_CHECKING:
    from torch import Tensor

    from ...frontend.backend import Engine
    from ...kernels.ops import Communicator

SIZES = (8 << 10, 64 << 10, 1 << 20)  # bytes
_NUM_SUMS = 200  # of a size, in a round


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench ranks`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--batches", type=count, nargs="+", default=[1, 8, 32], metavar="N")
    add("--prompt-tokens", type=count, default=256, metavar="N")
    add("--max-tokens", type=count, default=64, metavar="N", help="tokens an answer (%(default)s)")
    add("--rounds", type=count, default=5, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    rows = [*_sums(args.rounds), *_engines(args), *_bubbles(args)]
    write_report("ranks", rows, args)
    return 0


# --- sums -----------------------------------------------------------------------------------------


def _sums(rounds: int) -> Iterator[dict[str, Any]]:
    """Of bfloat16 vectors on two ranks."""
    import torch

    torch.set_num_threads(1)
    with _met("shared memory", rounds) as ours, _met("gloo", rounds) as gloo:
        for size in SIZES:
            x = torch.ones(size // 2, dtype=torch.bfloat16)
            times: dict[str, list[float]] = {"ours": [], "gloo": [], "copy": []}
            for _ in range(rounds):
                times["ours"].append(_timed(partial(ours.all_reduce, x)))
                times["gloo"].append(_timed(partial(gloo.all_reduce, x)))
                times["copy"].append(_timed(_copier(x)))
            medians = {name: statistics.median(each) * 1e6 for name, each in times.items()}
            yield {
                "what": f"sum of {size >> 10} KiB on two ranks, us",
                "here": medians["ours"],
                "beside": medians["copy"],
                "beside is": "a copy in and out",
                "here / beside": medians["ours"] / medians["copy"],
                "gloo / here": medians["gloo"] / medians["ours"],
            }


def _timed(call: Callable[[], object]) -> float:
    """Seconds of one of many calls."""
    started = time.perf_counter()
    for _ in range(_NUM_SUMS):
        call()
    return (time.perf_counter() - started) / _NUM_SUMS


def _copier(x: Tensor) -> Callable[[], object]:
    import torch

    shared = torch.empty_like(x).share_memory_()  # type: ignore[no-untyped-call]

    def copy() -> None:
        shared.copy_(x)
        x.copy_(shared)

    return copy


@contextmanager
def _met(kind: str, rounds: int) -> Iterator[Communicator]:
    """This process as rank 0, and another one that sums whenever it does."""
    if kind == "gloo":
        from ...kernels.torch_communicator import TorchWorld, new_store

        store = new_store(2)
        with _peer(kind, store.port, rounds) as peer:
            communicator: Communicator = TorchWorld(store, 0, 2).communicator([[0, 1]])
            _meet(communicator)
            yield communicator
            peer.kill()
        return
    from ...kernels.native.communicator import SharedMemory, SharedMemoryCommunicator

    memory = SharedMemory(2)
    with _peer(kind, memory.descriptor, rounds, (memory.descriptor,)) as peer:
        communicator = SharedMemoryCommunicator(memory, 0, 2)
        _meet(communicator)
        yield communicator
        peer.kill()


def _meet(communicator: Communicator) -> None:
    """Wait until both are there."""
    import torch

    communicator.all_reduce(torch.zeros(1))


def _peer(
    kind: str, place: int, rounds: int, descriptors: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __spec__.name, kind, str(place), str(rounds * _NUM_SUMS)]
    return subprocess.Popen(command, pass_fds=descriptors)


def _sum_as_rank_1(kind: str, place: int, num_sums: int) -> None:
    """As many sums of each size as rank 0 makes, then wait to be killed."""
    import torch

    torch.set_num_threads(1)
    if kind == "gloo":
        from ...kernels.torch_communicator import TorchWorld, new_store

        communicator: Communicator = TorchWorld(new_store(2, place), 1, 2).communicator([[0, 1]])
    else:
        from ...kernels.native.communicator import SharedMemory, SharedMemoryCommunicator

        communicator = SharedMemoryCommunicator(SharedMemory(2, place), 1, 2)
    _meet(communicator)
    for size in SIZES:
        x = torch.ones(size // 2, dtype=torch.bfloat16)
        for _ in range(num_sums):
            communicator.all_reduce(x)
    time.sleep(600)


# --- engines --------------------------------------------------------------------------------------


def _engines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from ...frontend.backend import Engine

    most = max(args.batches)
    options: dict[str, Any] = {
        "max_total_tokens": most * (args.prompt_tokens + args.max_tokens + 8),
        "speculate": "off",
        "decode_slowdown": 0.0,  # prompts may take as long as they do
        "chunked_prefill_size": most * args.prompt_tokens,
    }
    with (
        Engine(args.model, tp_size=2, num_threads=1, **options) as ranks,
        Engine(args.model, pp_size=2, num_threads=1, **options) as stages,
        Engine(args.model, cp_size=2, num_threads=1, **options) as halves,
        Engine(args.model, num_threads=2, **options) as one,
    ):
        engines = {"two ranks": ranks, "two stages": stages, "tokens divided": halves, "one": one}
        for batch in args.batches:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for _ in range(args.rounds):
                for name, engine in engines.items():
                    times[name].append(_seconds(engine, batch, args))
            for index, what in enumerate(("prompts", "tokens one by one")):
                medians = {
                    name: statistics.median(each[index] for each in found)
                    for name, found in times.items()
                }
                of_one = medians.pop("one")
                for name, seconds in medians.items():
                    yield {
                        "what": f"{what}, batch {batch}, {name}, ms a step",
                        "here": seconds * 1e3,
                        "beside": of_one * 1e3,
                        "beside is": "one process, two threads",
                        "here / beside": seconds / of_one,
                        "gloo / here": None,
                    }


def _bubbles(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of a prompt as long as the model takes."""
    from ...frontend.backend import Engine
    from ...runtime.models.model_config import read_model_config
    from ...runtime.parallel.stages import stages_of
    from ...runtime.schedule.queue.prompt_limits import share_of_stage

    with (
        Engine(args.model, pp_size=2, num_threads=1, speculate="off") as two,
        Engine(args.model, num_threads=1, speculate="off") as one,
    ):
        length = min(two.get_server_info()["max_model_len"] - 16, 2048) // 8 * 8
        times: dict[str, list[float]] = {"two": [], "one": []}
        for _ in range(args.rounds):
            times["two"].append(_run(two, 1, length, 1))
            times["one"].append(_run(one, 1, length, 1))
        medians = {name: statistics.median(each) for name, each in times.items()}
        config = EngineConfig()
        share = share_of_stage(config.chunked_prefill_size, 2, config.max_running_requests)
        num_chunks = length / share
        lost = 1 - medians["one"] / (2 * medians["two"])
        layers = [end - first for first, end in stages_of(read_model_config(args.model), 2)]
        through = num_chunks * max(layers) + min(layers)  # in times of a layer's chunk
        for least, of in (
            (1 / (num_chunks + 1), "as many layers each"),
            (1 - num_chunks * sum(layers) / (2 * through), "{} and {} layers".format(*layers)),
        ):
            yield {
                "what": f"two stages wait, of a prompt of {length} tokens, %",
                "here": lost * 100,
                "beside": least * 100,
                "beside is": f"the least, of {num_chunks:.1f} chunks through {of}",
                "here / beside": lost / least,
                "gloo / here": None,
            }


def _seconds(engine: Engine, batch: int, args: argparse.Namespace) -> tuple[float, float]:
    """Of the step with all prompts, and of each one after it: differences of two runs."""
    lengths = (1, 1 + args.max_tokens)
    first, whole = (_run(engine, batch, args.prompt_tokens, length) for length in lengths)
    return first, (whole - first) / args.max_tokens


def _run(engine: Engine, batch: int, prompt_tokens: int, max_tokens: int) -> float:
    from ...frontend.dsl.function import function
    from ...frontend.dsl.generation import gen
    from ...frontend.dsl.state import ProgramState

    engine.flush_cache()

    @function
    def answer(s: ProgramState, number: int) -> None:
        s += f"{number} " + "a b c d e f g h " * (prompt_tokens // 8)
        s += gen("answer", max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    started = time.perf_counter()
    answer.run_batch([{"number": n} for n in range(batch)], backend=engine)
    return time.perf_counter() - started


if __name__ == "__main__":
    _sum_as_rank_1(sys.argv[1], *map(int, sys.argv[2:]))
