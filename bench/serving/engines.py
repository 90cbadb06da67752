"""Engines beside each other: how each one's runner is started, asked and measured."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...errors import EngineError, InvalidRequest
from ..harness.descendants import kill_tree
from ..harness.process_meter import ProcessMeter, peak_rss_bytes

if TYPE_CHECKING:  # they validate JSON, which runners without schemas do not need
    from ..constrained.documents import DocumentJudge, Documents

PEER_FORMS = (
    "vllm=PYTHON (of vLLM's environment; vllm=PYTHON,float32 in place of bfloat16), "
    "llamacpp=LLAMA_SERVER,MODEL.gguf, either with a kind of "
    "drafts as in vllm=PYTHON,ngram or with a draft model, vllm=PYTHON,FOLDER or DRAFT.gguf, "
    "stemma=DRAFTS (as for --speculate: stemma=off), also with a draft model, stemma=auto,FOLDER, "
    "or openai=URL (of a server that runs on this model)"
)
VLLM_DRAFTS = ("ngram", "suffix")  # kinds that need no model
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 15
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to measure: its runner's module and start arguments."""

    name: str
    module: str
    python: str = sys.executable
    flags: tuple[str, ...] = ()
    has_process: bool = True  # False: a server elsewhere, whose CPU and memory are not seen


@dataclass(frozen=True, slots=True)
class Measurement:
    """One repeat of a workload on one engine."""

    engine: str
    work: str
    repeat: int
    wall_s: float
    cpu_s: float  # of the runner's process tree
    others_cores: float  # used by all else on the machine meanwhile
    prompt_tokens: int
    output_tokens: int
    output_sha: str
    peak_rss_bytes: int
    documents: Documents | None = None  # of a workload under a schema


def stemma_specs(model: Path, *, has_http: bool) -> list[EngineSpec]:
    """Stemma offline and, if requested, over HTTP."""
    flags = ("--model", str(model))
    specs = [EngineSpec("stemma", "stemma_offline", flags=flags)]
    if has_http:
        specs.append(EngineSpec("stemma-http", "stemma_http", flags=flags))
    return specs


def peer_spec(given: str, model: Path) -> EngineSpec:
    """A peer from its flag. Raises InvalidRequest."""
    kind, _, value = given.partition("=")
    parts = value.split(",")
    if kind == "stemma" and value and len(parts) <= 2:
        chosen: tuple[str, ...] = ("--model", str(model), "--speculate", parts[0])
        name = f"stemma, {parts[0]}"
        if parts[1:]:
            chosen += ("--draft-model", _require(given, parts[1], Path(parts[1]).is_dir()))
            name += " a draft model"
        return EngineSpec(name, "stemma_offline", flags=chosen)
    if kind == "vllm" and value and len(parts) <= 2:
        python = _require_file(given, parts[0])
        chosen = ("--model", str(model))
        if parts[1:] == ["float32"]:
            return EngineSpec(
                "vllm float32", "vllm_offline", python, (*chosen, "--dtype", parts[1])
            )
        if parts[1:] and parts[1] not in VLLM_DRAFTS:
            chosen += ("--draft-model", _require(given, parts[1], Path(parts[1]).is_dir()))
            return EngineSpec("vllm a draft model", "vllm_offline", python, chosen)
        chosen += tuple(_speculate(parts[1:]))
        return EngineSpec(" ".join(["vllm", *parts[1:]]), "vllm_offline", python, chosen)
    if kind == "llamacpp" and 2 <= len(parts) <= 3:
        program, gguf = (_require_file(given, path) for path in parts[:2])
        chosen = ("--program", program, "--model", gguf)
        if parts[2:] and parts[2].endswith(".gguf"):
            chosen += ("--draft-model", _require_file(given, parts[2]))
            return EngineSpec("llama.cpp a draft model", "llamacpp_server", flags=chosen)
        name = " ".join(["llama.cpp", *parts[2:]])
        return EngineSpec(name, "llamacpp_server", flags=(*chosen, *_speculate(parts[2:])))
    if kind == "openai" and value.startswith("http://"):
        return EngineSpec(value, "openai_http", flags=("--url", value), has_process=False)
    raise InvalidRequest.of("peer", given, PEER_FORMS)


def _speculate(drafts: Sequence[str]) -> list[str]:
    return ["--speculate", *drafts] if drafts else []


def _require_file(given: str, path: str) -> str:
    return _require(given, path, Path(path).is_file())


def _require(given: str, path: str, is_there: bool) -> str:
    if not is_there:
        raise InvalidRequest.of("peer", given, f"{path} must exist; {PEER_FORMS}")
    return os.path.abspath(path)  # not resolved: an environment's python is a link


class RunningEngine:
    """A runner's process; use as a context manager. Raises EngineError with its last output."""

    def __init__(self, spec: EngineSpec, *, threads: int | None, kv_tokens: int) -> None:
        self.spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="stemma-bench-"))
        self._log = self._folder / "log"
        command = [spec.python, "-m", f"stemma.bench.serving.runners.{spec.module}", *spec.flags]
        command += ["--kv-tokens", str(kv_tokens)]
        if threads is not None:
            command += ["--threads", str(threads)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": self._package_path()},
            )
        try:
            self.welcome = self._read()
        except BaseException:
            self.close()
            raise

    def _package_path(self) -> str:
        """A folder where every Python finds this package, and nothing else of our environment."""
        (self._folder / "stemma").symlink_to(_PACKAGE)
        return str(self._folder)

    @property
    def pid(self) -> int:
        """The runner's process id."""
        return self._process.pid

    def load(self, path: Path, repeat: int) -> None:
        """Make it read a workload, with the ids of this repeat."""
        self._ask({"op": "load", "path": str(path), "repeat": repeat})

    def run(self) -> dict[str, Any]:
        """Run the loaded workload; returns an `Outcome`'s fields."""
        return self._ask({"op": "run"})

    def log(self) -> list[dict[str, Any]]:
        """Run the loaded workload; returns its steps, none of an engine that does not tell."""
        if not self.welcome["has_log"]:
            return []
        steps: list[dict[str, Any]] = self._ask({"op": "log"})["steps"]
        return steps

    def measure(self, work: str, repeat: int, judge: DocumentJudge | None = None) -> Measurement:
        """Run the loaded workload and meter the processes meanwhile; `judge` checks the outputs."""
        with ProcessMeter(self.pid) as meter:
            outcome = self.run()
        outputs = outcome.pop("outputs")
        return Measurement(
            engine=self.spec.name,
            work=work,
            repeat=repeat,
            cpu_s=meter.cpu_s,
            others_cores=meter.others_cores,
            peak_rss_bytes=peak_rss_bytes(self.pid),
            documents=judge.judge(outputs) if judge and outputs is not None else None,
            **outcome,
        )

    def close(self) -> None:
        """End the runner, and so its engine; escalates the longer it takes."""
        assert self._process.stdin is not None
        for end in (self._process.stdin.close, self._process.terminate, self._kill):
            with contextlib.suppress(BrokenPipeError):
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
                break
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        """With its engine, which it cannot end any more."""
        kill_tree(self.pid)

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineError(f"{self.spec.name} has ended{self._last_words()}") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.spec.name} has ended{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self.spec.name}: {reply['error']}{self._last_words()}")
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)
