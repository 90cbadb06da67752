"""What config.json says of the scores that a sequence classifier gives. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .fields import Fields

ScoreActivation = Literal["sigmoid", "softmax", "none"]

MAX_LABELS = 65_536
_DEFAULT_NUM_LABELS = 2  # as in transformers
_SCORES: dict[str, ScoreActivation] = {
    "Sigmoid": "sigmoid",
    "Identity": "none",
    "Softmax": "softmax",
}


@dataclass(frozen=True, slots=True)
class ScoreLabels:
    """A classifier's labels, in order, and what makes scores of its logits."""

    names: tuple[str, ...]
    activation: ScoreActivation

    @classmethod
    def of(cls, config: Fields) -> ScoreLabels:
        """Raises ModelLoadError."""
        names = _names(config)
        return cls(names, _activation(config, len(names)))


def _names(config: Fields) -> tuple[str, ...]:
    named = config.get("id2label")
    if named is None:
        count = config.integer("num_labels", _DEFAULT_NUM_LABELS, most=MAX_LABELS)
        return tuple([f"LABEL_{number}" for number in range(count)])
    is_named = isinstance(named, Mapping) and all(str(key).isdecimal() for key in named)
    if not is_named or not 1 <= len(named) <= MAX_LABELS:
        raise config.fail("id2label", f"1 to {MAX_LABELS} labels by their numbers")
    return tuple([str(named[key]) for key in sorted(named, key=int)])


def _activation(config: Fields, num_labels: int) -> ScoreActivation:
    """As sentence-transformers has it: what the config says, else a sigmoid of a single logit and
    nothing of several."""
    nested = config.nested("sentence_transformers")
    name = None if nested is None else nested.get("activation_fn")
    if name is None:
        name = config.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid" if num_labels == 1 else "none"
    short = str(name).rpartition(".")[2]
    if short not in _SCORES:
        raise config.fail(
            "sbert_ce_default_activation_function", f"one of torch's {', '.join(_SCORES)}"
        )
    return _SCORES[short]
