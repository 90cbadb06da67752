"""How often a draft is right by coupled noise, beside rejection sampling.

At places of texts that the model has drawn itself, at a temperature, both distributions are taken
whole: the model's and a draft's of the token that follows, each behind the same tokens. Of a total
variation TV between them, speculative sampling by rejection (Leviathan et al. 2023,
arXiv:2211.17192) accepts 1 - TV; to draw both with one noise, as the runtime does, accepts at least
(1 - TV) / (1 + TV) (Daliri, Musco and Suresh 2025, arXiv:2408.07978). That acceptance is counted,
with the noise of the runtime's sampler, under several seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InvalidRequest
from ...flags import count
from ...kernels.gumbel import gumbel_of_all
from ...runtime.checkpoint.location import EMBEDDED_DRAFT, EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ..harness.report import write_report
from .conversations import Conversation, conversations

if TYPE_CHECKING:
    from ...runtime.loaded_model import LoadedModel
    from ...training.target import Target
    from ...training.texts import Text

_BATCH = 64  # places whose noise is there at once


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench acceptance`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--draft", action="append", metavar="DRAFT",
        help="repeatable: a quantization of the model, its number of first layers, or the folder of"
        " an EAGLE head (default: int4, 3, and the embedded model's head)")  # fmt: skip
    add("--temperature", type=float, nargs="+", default=[0.7, 1.0], metavar="T")
    add("--conversations", type=count, default=8, metavar="N", help="of each skill")
    add("--places", type=count, default=400, metavar="N", help="of each skill, at most")
    add("--seeds", type=count, default=16, metavar="N", help="draws of each place")
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    from ...runtime.loaded_model import LoadedModel
    from ...training.target import Target

    loaded = LoadedModel(EngineConfig(model=str(args.model), speculate="off"))
    drawn = {
        skill: chats
        for skill, chats in conversations(args.conversations).items()
        if not any("choices" in limits for case in chats for limits in case.limits)
    }
    cases = _recorded(loaded, drawn, args.temperature)
    target = Target(loaded.runner)  # from here on the KV is its own
    drafts = {name: _draft(name, args.model, target) for name in args.draft or _DRAFTS}
    rows = []
    for (temperature, skill), texts in cases.items():
        places = _sampled(texts, args.places)
        model = _probabilities(target.logits, [target.hidden(t.token_ids) for t in texts], places)
        for name, draft in drafts.items():
            guessed = _probabilities(draft.logits, [draft.hidden(t) for t in texts], places)
            found = _compared(model, guessed, temperature, args.seeds)
            rows.append(
                {"draft": Path(name).name, "temperature": temperature, "skill": skill, **found}
            )
    write_report("acceptance", rows, args, model=args.model.resolve().name)
    return 0


_DRAFTS = ("int4", "3", str(EMBEDDED_DRAFT))
_Logits = Callable[[Any], Any]  # of hidden states
_Place = tuple[int, int]  # a text, and the token in it behind which is drawn


@dataclass(frozen=True, slots=True)
class _Draft:
    """hidden: [T, hidden_size] float32, of each token of a text."""

    hidden: Callable[[Text], Any]
    logits: _Logits


def _recorded(
    loaded: LoadedModel, by_skill: dict[str, list[Conversation]], temperatures: Sequence[float]
) -> dict[tuple[float, str], list[Text]]:
    """What the model draws at each temperature."""
    from ...training.recording import recording
    from ...training.texts import recorded_texts

    found = {}
    with recording(loaded) as (backend, recorder):
        for temperature in temperatures:
            for skill, chats in by_skill.items():
                for case in chats:
                    case.program.run(case=case, temperature=temperature, backend=backend).text()
                texts = [text for each in recorded_texts(recorder) for text in each]
                found[temperature, skill] = texts
                recorder.requests.clear()
    return found


def _draft(name: str, model: Path, target: Target) -> _Draft:
    """Raises InvalidRequest."""
    from ...runtime.config import QUANTIZATIONS
    from ...runtime.loaded_model import LoadedModel
    from ...training.target import Target

    if name.isdecimal():
        first = target.of_first_layers(int(name))
        return _Draft(lambda text: first.hidden(text.token_ids).float(), first.logits)
    if name in QUANTIZATIONS:
        config = EngineConfig(model=str(model), quantization=name, speculate="off")
        other = Target(LoadedModel(config).runner)
        return _Draft(lambda text: other.hidden(text.token_ids).float(), other.logits)
    if not Path(name).is_dir():
        allowed = f"one of {', '.join(QUANTIZATIONS)}, a number of layers, or a head's folder"
        raise InvalidRequest.of("draft", name, allowed)
    return _head(Path(name), target)


def _head(folder: Path, target: Target) -> _Draft:
    import torch

    from ...runtime.checkpoint.safetensors.checkpoint import CheckpointWeights
    from ...training.drafts import Batch, EagleDraft

    head, weights = EagleDraft(target), CheckpointWeights(folder, torch.float32)
    head.load_state_dict({name: weights.read(name).float() for name in weights.names()})

    @torch.no_grad()
    def hidden(text: Text) -> Any:
        own = target.hidden(text.token_ids).float()[None]
        ids = torch.tensor(text.token_ids)[None]
        before = torch.nn.functional.pad(own, (0, 0, 1, 0))[:, :-1]
        return head.passes(Batch(ids, torch.tensor(text.is_guessed)[None], own, before), 1)[0][0]

    return _Draft(hidden, lambda states: head.logits(states, 0))


def _sampled(texts: Sequence[Text], most: int) -> list[_Place]:
    """Places behind which the model has drawn, at most so many, always the same ones."""
    places = [
        (index, place - 1)
        for index, text in enumerate(texts)
        for place, is_guessed in enumerate(text.is_guessed)
        if is_guessed
    ]
    return sorted(random.Random(0).sample(places, min(most, len(places))))


def _probabilities(logits: _Logits, hidden: Sequence[Any], places: Sequence[_Place]) -> Any:
    """Log probabilities at temperature 1 of what follows each place: [places, vocab] float64."""
    import torch

    rows = torch.stack([hidden[text][place].float() for text, place in places])
    with torch.no_grad():
        return logits(rows).double().log_softmax(-1).numpy()


def _compared(model: Any, draft: Any, temperature: float, num_seeds: int) -> dict[str, Any]:
    p, q = (_at(logprobs, temperature) for logprobs in (model, draft))
    apart = 0.5 * np.abs(np.exp(p) - np.exp(q)).sum(-1)
    num_alike = sum(
        _num_alike(p[first : first + _BATCH], q[first : first + _BATCH], first, seed)
        for seed in range(num_seeds)
        for first in range(0, len(p), _BATCH)
    )
    return {
        "places": len(p),
        "rejection_percent": _percent((1 - apart).mean()),
        "coupled_percent": _percent(num_alike / (num_seeds * len(p))),
        "bound_percent": _percent(((1 - apart) / (1 + apart)).mean()),
        "likeliest_alike_percent": _percent((p.argmax(-1) == q.argmax(-1)).mean()),
    }


def _at(logprobs: Any, temperature: float) -> Any:
    """The same distributions at a temperature: [places, vocab]."""
    scaled = logprobs / temperature
    highest = scaled.max(-1, keepdims=True)
    return scaled - highest - np.log(np.exp(scaled - highest).sum(-1, keepdims=True))


def _num_alike(p: Any, q: Any, first: int, seed: int) -> int:
    """Places at which both draw the same token with the sampler's noise of this seed."""
    seeds = np.full(len(p), seed, dtype=np.uint64)
    noise = gumbel_of_all(seeds, np.arange(first, first + len(p), dtype=np.uint64), p.shape[1])
    return int(((p + noise).argmax(-1) == (q + noise).argmax(-1)).sum())


def _percent(share: float) -> float:
    return round(100 * float(share), 1)
