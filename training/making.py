"""A trained draft as a folder, from programs to the checkpoint that `--draft-model` takes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidRequest
from ..frontend.client.backend import Backend
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.draft_checkpoint import why_no_draft
from ..runtime.checkpoint.new_folder import new_folder
from ..runtime.checkpoint.safetensors.safetensors_writer import SafetensorsWriter
from .drafts import Draft, Kind, new_draft
from .recording import recording
from .target import Target
from .texts import Text, recorded_texts, split
from .training import Progress, acceptance, learnt, train

if TYPE_CHECKING:
    from ..runtime.loaded_model import LoadedModel

_MIN_PROGRAMS = 2  # one to learn from, one to measure by
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is trained."""

    kind: Kind = "eagle"
    num_steps: int = 1500
    max_minutes: float | None = None
    held_out: float = 0.1  # share of the programs
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. `before` and `after`: by place of a draft the share of guesses that are
    right, of programs that it has not learnt from."""

    num_weights: int
    num_programs: int
    num_tokens: int  # that the draft has learnt to guess
    num_held_tokens: int
    num_steps: int
    seconds: float  # of training
    before: list[float | None]
    after: list[float | None]

    @property
    def tokens_a_step(self) -> float:
        """Where each step verifies as many guesses as there are places: what was right, and one."""
        chances: list[float] = list(accumulate((rate or 0.0 for rate in self.after), mul))
        return 1.0 + sum(chances)


def require_trainable(config: ModelConfig, recipe: Recipe) -> None:
    """Raises InvalidRequest for models of which no hidden states can be had here."""
    why = why_no_draft(config)
    if why is not None:
        allowed = f"a decoder whose layers are alike and have attention: {why}"
        raise InvalidRequest.of("model", config.architecture, allowed)
    if not 0.0 < recipe.held_out < 1.0:
        raise InvalidRequest.of("held_out", recipe.held_out, "a number between 0 and 1")


def record(
    loaded: LoadedModel, run: Callable[[Backend], None], name: str, field: str
) -> list[list[Text]]:
    """What programs of the file `name` and the model write while `run` runs them, by program.
    Raises InvalidRequest, of this field, where that is too little."""
    with recording(loaded) as (backend, recorder):
        run(backend)
    programs = recorded_texts(recorder)
    programs = [texts for texts in programs if any(text.num_guessed for text in texts)]
    if len(programs) < _MIN_PROGRAMS:
        allowed = (
            f"at least {_MIN_PROGRAMS} programs that run on the default backend and generate two "
            f"tokens or more; {len(programs)} did (a Python file runs as `python FILE` does: its "
            "main block starts them, and leaves the engine to this command)"
        )
        raise InvalidRequest.of(field, name, allowed)
    return programs


def make_draft(
    loaded: LoadedModel, programs: list[list[Text]], out: Path, recipe: Recipe, on_step: Progress
) -> Report:
    """Train and write it. The model's engine must have ended. Raises InvalidRequest or
    ModelLoadError where `out` cannot be written."""
    target = Target(loaded.runner)
    to_learn, held = split(programs, recipe.held_out, recipe.seed)
    torch.manual_seed(recipe.seed)
    draft = new_draft(recipe.kind, target)
    windows, of_held = learnt(target, to_learn), learnt(target, held)
    before = acceptance(draft, target, of_held)
    started = time.monotonic()
    num_steps = train(
        draft,
        target,
        windows,
        num_steps=recipe.num_steps,
        seconds=None if recipe.max_minutes is None else 60 * recipe.max_minutes,
        seed=recipe.seed,
        on_step=on_step,
    )
    seconds = time.monotonic() - started
    draft.to(torch.bfloat16).float()  # as it is written
    report = Report(
        num_weights=sum(tensor.numel() for tensor in draft.parameters()),
        num_programs=len(programs),
        num_tokens=sum(text.num_guessed for text in to_learn),
        num_held_tokens=sum(text.num_guessed for text in held),
        num_steps=num_steps,
        seconds=seconds,
        before=before,
        after=acceptance(draft, target, of_held),
    )
    _write(draft, target, loaded, out, recipe, report)
    return report


def _write(
    draft: Draft, target: Target, loaded: LoadedModel, out: Path, recipe: Recipe, report: Report
) -> None:
    tensors = {name: each.detach().to(torch.bfloat16) for name, each in draft.tensors().items()}
    with new_folder(out) as folder:
        writer = SafetensorsWriter(
            folder, {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        )
        writer.write(tensors)
        writer.close()
        _write_json(folder / "config.json", draft.config(target))
        if recipe.kind == "model":
            for pattern in _TOKENIZER_FILES:
                for file in loaded.folder.glob(pattern):
                    shutil.copy(file, folder / file.name)
        made = {"model": loaded.config.model_name, "revision": loaded.describe()["revisions"][0]}
        _write_json(folder / "training.json", {**made, **asdict(recipe), **asdict(report)})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
