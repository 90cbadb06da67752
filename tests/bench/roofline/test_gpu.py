"""The GPU benchmark where there is no GPU: every section gives its rows, tiny, and none fails.

Kernels run in Triton's interpreter, engines too; times are no measurements and get no verdict.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from stemma.__main__ import main
from stemma.bench import gpu
from stemma.bench.roofline import checks, risks, sections, serving
from stemma.bench.roofline.attention import error_row
from stemma.bench.roofline.ceilings import Ceilings, causal_flop
from stemma.bench.roofline.context import Context
from stemma.bench.roofline.model_engine import Clocked, ModelEngine
from stemma.bench.roofline.paged_batches import make_batch, quantize, relative_error, widened
from stemma.bench.roofline.rows import Row, at_least, at_most, attempt
from stemma.bench.roofline.section_process import SectionProcess, in_processes
from stemma.bench.roofline.sections import Setting
from stemma.bench.roofline.sizes import FULL, LLAMA_1B, LLAMA_8B, TINY, Heads
from stemma.bench.roofline.timing import Timer
from stemma.bench.serving.runners.transformers_batching import batching_options
from stemma.errors import EngineError

ROOT = Path(gpu.__file__).resolve().parents[1]
CEILINGS = Ceilings(copy_bytes_s=1e9, read_bytes_s=1e9, gemm_flop_s=1e12, sdpa_flop_s=1e12)
BLOCKED = ("zmq", "orjson", "llguidance", "jsonschema", "fastapi", "uvicorn", "httpx")


@pytest.fixture
def ctx() -> Context:
    return Context("cuda", TINY, CEILINGS)


def report(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    status = main(
        ["bench", "gpu", "--scale", "tiny", "--one-process", "--no-peer", "--out", str(folder)]
        + list(flags)
    )
    return status, json.loads((folder / "gpu.json").read_text())


ENGINES = ("step", "stall", "serving")
KERNELS = [name for name in sections.SECTIONS if name not in (sections.BASE, *ENGINES)]
CASES = [
    *[(name, "cuda") for name in KERNELS],
    *[(name, "cpu") for name in ENGINES],
    *[pytest.param(name, "cuda", marks=pytest.mark.slow) for name in ENGINES],  # minutes
]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_a_section_gives_its_rows_and_no_error(name: str, device: str, tmp_path: Path) -> None:
    status, found = report(tmp_path, "--only", name, "--device", device)
    rows = [row for row in found["rows"] if row["section"] == name]
    assert rows
    wrong = [row for row in rows if row["verdict"] in ("error", "missed")]
    assert not wrong, wrong
    assert status == 0
    assert {row["verdict"] for row in rows if row["target"]} <= {"met", "untimed"}
    assert [entry["section"] for entry in found["sections"]] == [sections.BASE, name]


def test_every_target_of_the_issue_has_a_row() -> None:
    """At full size: section, case and bound."""
    assert (FULL.decode_batch, FULL.decode_tokens, FULL.heads) == (64, 4096, Heads(32, 8, 128))
    assert FULL.tree_shared == (4096, 32_768) and FULL.tree_own == 256 and FULL.tree_batch == 64
    assert FULL.extend_tokens == 8192 and FULL.gemm_side == 8192
    assert FULL.step_batches == (1, 64) and [name for name, _ in FULL.models] == ["8B", "1B"]
    assert FULL.serving.unshared == (256, 1024, 256)


def test_an_error_is_a_row_and_the_next_section_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(ctx: Context) -> Any:
        yield Row("before", 1.0)
        raise ValueError("no such kernel")

    plan = sections.Plan(broken, 10)
    monkeypatch.setitem(sections.SECTIONS, "decode", plan)
    status, found = report(tmp_path, "--only", "decode", "tree")
    rows = {(row["section"], row["case"]): row for row in found["rows"]}
    assert status == 1
    assert rows["decode", "before"]["value"] == 1.0
    assert rows["decode", "decode"]["error"] == "ValueError: no such kernel"
    assert "broken" in rows["decode", "decode"]["details"]["trace"]
    assert any(section == "tree" and not row["error"] for (section, _), row in rows.items())


def test_a_run_that_is_ended_leaves_the_sections_that_were_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(ctx: Context) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(sections.SECTIONS, "extend", sections.Plan(killed, 10))
    status, found = report(tmp_path, "--only", "tree", "extend")
    assert status == 130
    assert found["is_partial"]
    assert {row["section"] for row in found["rows"]} == {"ceilings", "tree"}


def script(folder: Path, *flags: str) -> dict[str, Any]:
    """The file as a script, where the package is not installed and a server's needs are missing."""
    (folder / "sitecustomize.py").write_text(
        f"import sys\nfor name in {BLOCKED}:\n    sys.modules[name] = None\n"
    )
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--scale", "tiny", "--no-peer"]
    command += ["--out", str(folder), *flags]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(command, check=True, capture_output=True, env=env, cwd=folder)
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    assert not any(row["error"] for row in found["rows"]), found["rows"]
    return found


def test_it_runs_from_a_checkout_without_what_a_server_needs(tmp_path: Path) -> None:
    found = script(tmp_path, "--device=cpu", "--only=step", "--commit=abc", "--one-process")
    assert found["commit"] == "abc"
    assert any("batch 2, context" in row["case"] for row in found["rows"])


@pytest.mark.slow  # a dozen processes, which import torch each
def test_it_runs_from_a_checkout_in_processes(tmp_path: Path) -> None:
    found = script(tmp_path, "--skip", *ENGINES)
    names = [sections.BASE, *KERNELS]
    assert [entry["section"] for entry in found["sections"]] == names
    assert {row["section"] for row in found["rows"]} == set(names)


def test_a_section_in_a_process_of_its_own_says_what_it_measured() -> None:
    rows: list[dict[str, Any]] = []
    setting = Setting("cpu", "tiny", None)
    with contextlib.closing(in_processes(["ceilings"], setting, rows, 60.0)) as found:
        ((name, messages),) = ((name, list(messages)) for name, messages in found)
    assert name == "ceilings"
    assert list(messages[-1]) == ["device"]
    rates = sections.ceilings_of([message["row"] for message in messages[:-1]])
    assert all(rate > 0.0 for rate in rates.values())


def test_a_section_has_no_time_left() -> None:
    with contextlib.closing(in_processes(["tree"], Setting("cpu", "tiny", None), [], 0.0)) as found:
        ((_, messages),) = ((name, list(messages)) for name, messages in found)
    assert [message["error"] for message in messages] == ["no time was left"]


def test_a_section_that_hangs_is_ended_in_time() -> None:
    process = SectionProcess("decode", Setting("cuda", "tiny", None))
    try:
        process.begin(sections.unknown_ceilings(), limit_s=0.01)
        (message,) = process.messages()
    finally:
        process.close()
    assert message["error"].startswith("ended with status -9")
    assert message["error"].endswith("behind: the start")


def test_a_whole_run_is_three_calls_of_under_ten_minutes() -> None:
    names = [name for phase in sections.PHASES.values() for name in phase]
    assert sorted([sections.BASE, *names]) == sorted(sections.SECTIONS)
    for phase in sections.PHASES.values():
        assert sum(sections.SECTIONS[name].limit_s for name in (sections.BASE, *phase)) <= 600
    order = list(sections.SECTIONS)
    assert order.index("step") == order.index("decode") + 1 and order[1] == "risks"


def test_a_phase_is_its_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def noted(names: list[str], *_: Any) -> Any:
        asked.extend(names)
        yield from ()

    monkeypatch.setattr(gpu, "_sections", noted)
    report(tmp_path, "--phase", "first", "--skip", "checks", "--only", "extend")
    assert asked == ["ceilings", "risks", "prefill", "dependent", "decode", "step", "extend"]


def test_the_first_row_says_which_kernel_is_wrong(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = replace(ctx.kernels, make_rms_norm=lambda weight, eps: lambda x, residual: 2 * x)
    monkeypatch.setattr(Context, "kernels_of", lambda self, dtype: kernels)
    first, *wrong = list(risks._kernels(ctx))
    assert first.verdict(True) == "missed" and first.case.startswith("9 of 10")
    assert [row.case for row in wrong] == ["norm"]


def test_shards_have_every_check_once() -> None:
    def names(index: int, count: int) -> list[str]:
        ctx = Context("cpu", TINY, CEILINGS, shard=(index, count))
        return [row.case for row in checks.checks(ctx)]

    parts = [names(index, 3) for index in range(3)]
    assert all(parts)
    assert sorted(chain(*parts)) == sorted(names(0, 1))


@pytest.mark.parametrize(
    ("row", "is_interpreted", "verdict"),
    [
        (Row("a", ratio=0.9, target=at_least(0.85)), False, "met"),
        (Row("a", ratio=0.8, target=at_least(0.85)), False, "missed"),
        (Row("a", ratio=0.9, target=at_least(0.85)), True, "untimed"),
        (Row("a", ratio=1.2, target=at_most(1.25)), False, "met"),
        (Row("a", ratio=math.nan, target=at_most(1.25)), False, "missed"),
        (Row("a", ratio=0.5, target=at_most(0.1), is_timed=False), True, "missed"),
        (Row("a", ratio=0.5), False, ""),
        (Row("a", error="no"), False, "error"),
    ],
)
def test_verdicts(row: Row, is_interpreted: bool, verdict: str) -> None:
    assert row.verdict(is_interpreted) == verdict


def test_a_nan_in_a_result_is_a_miss() -> None:
    expected = torch.ones(4)
    found = torch.tensor([1.0, math.nan, 1.0, 1.0])
    row = error_row("a", found, expected, torch.float32)
    assert row.verdict(True) == "missed" and row.to_json("s", True)["value"] is None
    assert error_row("a", expected * 1.1, expected, torch.float32).verdict(True) == "missed"
    assert relative_error(expected, expected) == (0.0, 0.0)


def test_attempt_keeps_what_came_before_the_error() -> None:
    def measure() -> Any:
        yield Row("first")
        raise RuntimeError("a\nb")

    rows = list(attempt("case", measure))
    assert [row.case for row in rows] == ["first", "case"]
    assert rows[1].error == "RuntimeError: a"


def test_shared_segments_are_the_same_pages_and_own_ones_are_not(ctx: Context) -> None:
    batch = make_batch(ctx, [(1, 40)] * 4, page_size=8, heads=Heads(2, 1, 16), shared=(16, 24))
    rows = batch.rows
    assert rows.segments.tolist() == [[0, 16, 0, 4], [16, 24, 0, 2]]
    slots = [rows.slots(row, 0, 40).tolist() for row in range(4)]
    assert slots[0][:24] == slots[1][:24] and slots[2][:16] == slots[0][:16]
    assert not set(slots[2][16:]) & set(slots[0])
    assert not set(slots[0][24:]) & set(slots[1][24:])
    assert batch.kv_bytes == 4 * 40 * 2 * 16 * 4
    assert len(batch.without_segments().rows.segments) == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantizing_keeps_numbers_within_their_precision(dtype: torch.dtype, ctx: Context) -> None:
    kv = ctx.random(2, 2, 8, 16)
    kv[0, 0, 0] = 0.0
    quantized = quantize(kv, dtype)
    assert quantized.values.dtype is dtype and quantized.scales.shape == (2, 2, 8)
    assert quantized.scales[0, 0, 0] == 0.0
    assert relative_error(widened(quantized), kv)[0] < 0.05


def test_a_timer_divides_by_the_calls() -> None:
    timing = Timer(torch.device("cpu"), 3).time({"sleep": [lambda: time.sleep(0.004)] * 2})["sleep"]
    assert 0.004 <= timing.least_s <= timing.median_s <= timing.most_s
    assert (timing.repeats, timing.how) == (3, "host clock")


class FakeCuda:
    """A device that takes 1 ms for a call, recorded or not; time stands still otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, can_record: bool) -> None:
        self.now_ms = 0.0
        self.recorded: list[float] | None = None
        fake, self.can_record = self, can_record

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_ms = fake.now_ms

            def elapsed_time(self, later: Any) -> float:
                return float(later.at_ms - self.at_ms)

        class Graph:
            def replay(self) -> None:
                fake.now_ms += sum(self.calls_ms)

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        @contextlib.contextmanager
        def graph(into: Any) -> Any:
            fake.recorded = into.calls_ms = []
            yield
            fake.recorded = None
            if not fake.can_record:
                raise RuntimeError("operation not permitted when stream is capturing")

        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "graph": graph,
            "stream": contextlib.nullcontext,
            "current_stream": Stream,
            "synchronize": lambda: None,
            "_sleep": self.sleep,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=True)

    def sleep(self, cycles: int) -> None:
        self.now_ms += cycles / 1e6

    def call(self) -> None:
        if self.recorded is None:
            self.now_ms += 1.0
        else:
            self.recorded.append(1.0)


@pytest.mark.parametrize("can_record", [True, False])
def test_a_timer_on_a_gpu_times_a_graphs_calls(
    can_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda(monkeypatch, can_record)
    timer = Timer(torch.device("cpu"), 3)
    monkeypatch.setattr(timer, "_is_cuda", True)
    monkeypatch.setattr(timer, "_flush", torch.empty(4, dtype=torch.int8))
    found = timer.time({"one": [fake.call], "three": [fake.call] * 3})
    for timing in found.values():
        assert timing.median_s == pytest.approx(1e-3)
        assert timing.how == "graph" or (not can_record and "not permitted" in timing.how)
    assert found["one"].how.startswith("graph" if can_record else "eager")


def test_a_peer_that_is_not_done_in_time_gives_a_least_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is ended, and started anew for the next workload."""
    started = []

    class Hangs:
        def __init__(self, *_: object, **__: object) -> None:
            started.append(self)
            self.process = subprocess.Popen(["sleep", "60"])
            self.pid, self.welcome, self.runs = self.process.pid, {"version": "5"}, 0

        def __enter__(self) -> Hangs:
            return self

        def __exit__(self, *_: object) -> None:
            self.process.kill()
            self.process.wait()

        def load(self, path: Path, repeat: int) -> None:
            assert json.loads(path.read_text())["requests"]

        def run(self) -> dict[str, Any]:
            self.runs += 1
            if self.runs == 1:
                return {"wall_s": 0.01}
            self.process.wait()
            raise EngineError("transformers has ended")

    monkeypatch.setattr(serving, "RunningEngine", Hangs)
    sizes = replace(TINY, peer_limit_s=0.05)
    peer = Context("cpu", sizes, CEILINGS, peer_python=sys.executable)
    monkeypatch.setattr(
        serving,
        "_ours",
        lambda ctx, name, config, works, taken: (
            taken.update({work.name: 0.01 for work, _ in works}) or iter(())
        ),
    )
    rows = list(serving.serving(peer))
    assert [row.error for row in rows] == [""] * 3
    assert all(row.case.endswith("at least") and (row.ratio or 0.0) >= 5.0 for row in rows)
    assert len(started) == 3


def test_a_peer_that_fails_is_run_again_with_a_cache_of_our_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes_given = []

    class RunsOutOfMemory:
        def __init__(self, spec: object, threads: None, kv_tokens: int) -> None:
            sizes_given.append(kv_tokens)
            self.kv_tokens, self.pid, self.welcome = kv_tokens, os.getpid(), {"version": "5"}

        def __enter__(self) -> RunsOutOfMemory:
            return self

        def __exit__(self, *_: object) -> None: ...
        def close(self) -> None: ...
        def load(self, path: Path, repeat: int) -> None: ...

        def run(self) -> dict[str, Any]:
            if not self.kv_tokens:
                raise EngineError("transformers: OutOfMemoryError")
            return {"wall_s": 2.0}

    monkeypatch.setattr(serving, "RunningEngine", RunsOutOfMemory)
    ctx = Context("cpu", TINY, CEILINGS, peer_python=sys.executable)
    with contextlib.ExitStack() as stack:
        peer = serving._Peer(ctx, tmp_path, stack)
        work = next(serving._workloads(ctx, 512))[0]
        (row,) = peer.rows(work, "case", at_least(5.0), 1.0)
        (again,) = peer.rows(work, "case", at_least(5.0), 1.0)
    assert (row.ratio, again.ratio) == (2.0, 2.0)
    assert "OutOfMemoryError" in row.details["failed_at_first"]
    assert sizes_given == [0, TINY.serving.kv_tokens]


def test_counted_work() -> None:
    """Llama-3.1-8B: 8.03e9 parameters, 0.525e9 of them the embedding; half of the square."""
    assert causal_flop(8192, Heads(32, 8, 128)) == 2 * 2 * 8192**2 // 2 * 32 * 128
    assert parameters(LLAMA_8B) == pytest.approx(8.03e9 - 0.5253e9, rel=1e-3)
    assert parameters(LLAMA_1B) == pytest.approx(1.2358e9, rel=1e-3)


def parameters(config: dict[str, Any]) -> float:
    """What `weight_bytes` counts, without loading."""
    from types import SimpleNamespace

    shape = SimpleNamespace(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
    )
    model = SimpleNamespace(config=shape, runner=SimpleNamespace(dtype=torch.bfloat16))
    return ModelEngine.weight_bytes(model) / 2  # type: ignore[arg-type]


def test_a_steps_device_time_is_taken_in_the_interpreter(ctx: Context) -> None:
    with ModelEngine(
        ctx, TINY.models[0][1], max_total_tokens=64, max_running_requests=1, max_model_len=32
    ) as model:
        (request,) = model.decoding(1, 3, 8)
        model.executor.is_holding = True
        model.advance(request, 2)
        assert len(model.executor.device_s) >= 2
        assert all(seconds > 0.0 for seconds in model.executor.device_s)
        model.end([request])
        assert not model.engine.has_work and request.num_output_tokens < 8


def test_a_request_that_fails_ends_the_measurement() -> None:
    ctx = Context("cpu", TINY, CEILINGS, peer_python=None)
    name, config = TINY.models[0]
    with ModelEngine(
        ctx, config, max_total_tokens=64, max_running_requests=2, max_model_len=64
    ) as model:
        model.executor.submit = lambda plan: 1 / 0  # type: ignore[assignment,return-value]
        model.submit([400, 401], 2, Clocked())
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            model.run()
    assert name == "tiny"


def test_the_peer_chooses_for_itself_on_a_gpu() -> None:
    assert batching_options(True, 0) == {"allow_block_sharing": True}
    assert batching_options(True, 4096)["num_blocks"] == 16
    assert batching_options(False, 4096)["num_blocks"] == 128


def test_a_wrong_section_and_a_missing_gpu_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpu", "--only", "nothing", "--out", str(tmp_path)]) == 1
    assert "one of ceilings, risks, prefill" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "gpu", "--only", "tree", "--out", str(tmp_path)]) == 1
        assert "needs a GPU" in capsys.readouterr().err
