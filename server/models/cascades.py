"""Cascades of a server's models: "cascade:small,large", as `--cascade` names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

from ...errors import InvalidRequest
from ...frontend.cascade.acceptance import rule_named
from ...frontend.cascade.cascade import Cascade, Member, MemberCounts
from ...frontend.client.client import Connection
from ..api.openai.chat import ChatRequest
from ..api.openai.completions import CompletionRequest
from ..generation.cascade_completion import require_plain
from ..generation.service import Service
from ..protocol.task import UNBOUNDED
from ..settings import ServerSettings
from .model_slot import ModelSlot

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})

_COUNTERS = (
    ("answers", "Answers that the model was asked for."),
    ("taken", "Answers of the model to which no larger one added a token."),
    ("escalated", "Answers of the model that a larger one wrote at least a token of."),
    ("scored_tokens", "Tokens of a smaller model's answers that the model read in one step."),
    ("kept_tokens", "Those of them that it kept."),
    ("prompt_tokens", "Tokens of prompts that the model computed for the cascade."),
    ("generated_tokens", "Tokens that the model generated for the cascade."),
)


@dataclass(frozen=True, slots=True)
class ServedCascade:
    """A cascade as requests name it. `slots`: of its models, the smallest first."""

    cascade: Cascade
    slots: tuple[ModelSlot, ...]

    @property
    def name(self) -> str:
        """By which requests choose it."""
        return self.cascade.name

    @property
    def is_loaded(self) -> bool:
        """Whether all of its models are."""
        return all(slot.is_running for slot in self.slots)

    @property
    def is_open(self) -> bool:
        """Whether all of its models let requests in."""
        return all(slot.is_open for slot in self.slots)

    def service(self, largest: Service) -> Service:
        """What answers its requests; `largest`: the service of its last model."""
        slot = self.slots[-1]
        described = {"model": self.name, "has_lora": False, "reads_images": False}
        return largest.beside(slot, lambda: {**slot.describe(), **described}, self.cascade)

    def require(self, path: str) -> None:
        """Raises InvalidRequest for a path that cascades do not answer."""
        if path not in PATHS:
            allowed = f"a single model at {path}; cascades answer {' and '.join(sorted(PATHS))}"
            raise InvalidRequest.of("model", self.name, allowed)

    def require_body(self, body: ChatRequest | CompletionRequest) -> None:
        """Raises InvalidRequest for what is refused whatever its models are."""
        prompts = body.prompts() if isinstance(body, CompletionRequest) else ()
        require_plain(body.num_drawn, body.kv_hints, prompts)
        self.cascade.require(body.gen_params(UNBOUNDED))

    def entry(self, created_s: int) -> dict[str, Any]:
        """In the list of models."""
        lengths = [slot.describe()["max_model_len"] for slot in self.slots]
        known = [length for length in lengths if length is not None]
        return {
            "id": self.name,
            "object": "model",
            "created": created_s,
            "owned_by": "stemma",
            "root": self.name,
            "parent": None,
            "max_model_len": min(known, default=None),
            "status": {"value": "loaded" if self.is_loaded else "unloaded"},
            "models": [slot.name for slot in self.slots],
        }


def cascades_of(
    settings: ServerSettings, slots: Mapping[str, ModelSlot]
) -> dict[str, ServedCascade]:
    """By name. Raises InvalidRequest."""
    accept = rule_named(settings.cascade_accept, "cascade_accept")
    found = {}
    for text in settings.cascade:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in slots]
        if unknown or len(names) < 2 or len({*names}) < len(names):
            allowed = f"two or more of {list(slots)} with commas between them, the smallest first"
            raise InvalidRequest.of("cascade", text, allowed)
        if settings.models_max is not None and settings.models_max < len(names):
            allowed = f"at least {len(names)}: the models of a cascade are loaded together"
            raise InvalidRequest.of("models_max", settings.models_max, allowed)
        own = tuple(slots[name] for name in names)
        cascade = Cascade([Member(slot.name, _Connect(slot)) for slot in own], accept)
        found[cascade.name] = ServedCascade(cascade, own)
    return found


@dataclass(frozen=True, slots=True)
class _Connect:
    slot: ModelSlot

    async def __call__(self) -> Connection:
        return self.slot.connection


def cascade_families(cascades: Mapping[str, ServedCascade]) -> Iterator[Metric]:
    """What the models of each have done, labelled by the cascade and the model."""
    for name, text in _COUNTERS if cascades else ():
        metric = CounterMetricFamily(f"stemma_cascade_{name}", text, labels=["cascade", "model"])
        for served in cascades.values():
            for member, counts in zip(served.cascade.members, served.cascade.counts, strict=True):
                metric.add_metric([served.name, member.name], _count(counts, name))
        yield metric


def _count(counts: MemberCounts, name: str) -> float:
    return float(getattr(counts, f"num_{name}"))
