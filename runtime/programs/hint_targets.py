"""KV hints that name their own prefix, as sent from outside any program.

A target is token ids, a prompt's text, or the id of a response of this runtime; an unknown or
invalid one is rejected in the outcome of its own action, never as an error.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidRequest
from ...frontend.protocol import ir
from ..schedule.cache.hint_actions import Outcome
from ..tokenizer.tokenizer import Tokenizer
from .client_leases import Action, StatedLeases

ACTION_VERSION = 1
MAX_ACTIONS = 64  # of one envelope
MAX_RESPONSES = 8192
MAX_RESPONSE_TOKENS = 1 << 24  # of all together, 4 bytes each
MAX_TARGET_TOKENS = 1 << 22


class Rejected(Exception):
    """An action that cannot be carried out, with the reason."""


@dataclass(slots=True, eq=False)
class Responses:
    """The token ids of past responses with their prompts, by namespace and response id; the oldest
    are dropped."""

    _ids: OrderedDict[tuple[str, str], array[int]] = field(default_factory=OrderedDict)
    _num_tokens: int = 0

    def remember(self, response_id: tuple[str, str], token_ids: array[int]) -> None:
        """Store a finished response: its prompt and output."""
        self._num_tokens += len(token_ids) - len(self._ids.pop(response_id, ()))
        self._ids[response_id] = token_ids
        while len(self._ids) > MAX_RESPONSES or self._num_tokens > MAX_RESPONSE_TOKENS:
            self._num_tokens -= len(self._ids.popitem(last=False)[1])

    def find(self, response_id: tuple[str, str]) -> array[int] | None:
        """Its ids, while they are stored."""
        return self._ids.get(response_id)


@dataclass(frozen=True, slots=True)
class HintTargets:
    """Carries out a client's actions one after the other, within one namespace and account."""

    tokenizer: Tokenizer
    responses: Responses
    vocab_size: int
    max_text_chars: int
    namespace: str = ""
    account: str = ""

    def tokenized(self, actions: Sequence[Mapping[str, Any]]) -> Mapping[str, array[int]]:
        """The ids of the actions' prompts, without those that cannot be tokenized."""
        payloads = [action.get("payload") for action in actions[:MAX_ACTIONS]]
        targets = [payload.get("target") for payload in payloads if isinstance(payload, Mapping)]
        prompts = [target.get("prompt") for target in targets if isinstance(target, Mapping)]
        found: dict[str, array[int]] = {}
        for text in prompts:
            if isinstance(text, str) and len(text) <= self.max_text_chars:
                with contextlib.suppress(InvalidRequest):  # its action is rejected
                    found[text] = self.tokenizer.encode_array(text)
        return found

    def carry_out(
        self,
        actions: Sequence[Mapping[str, Any]],
        stated: StatedLeases,
        tokenized: Mapping[str, array[int]],
    ) -> list[dict[str, Any]]:
        """An outcome for each action, in order."""
        outcomes = []
        for index, given in enumerate(actions):
            action_id = given.get("action_id")
            try:
                outcome = self._outcome(index, given, stated, tokenized)
            except Rejected as reason:
                outcome = Outcome("rejected", str(reason))
            outcomes.append(outcome.payload(str(action_id)))
        return outcomes

    def _outcome(
        self,
        index: int,
        given: Mapping[str, Any],
        stated: StatedLeases,
        tokenized: Mapping[str, array[int]],
    ) -> Outcome:
        if index >= MAX_ACTIONS:
            raise Rejected(f"an envelope has at most {MAX_ACTIONS} actions")
        version = given.get("action_version", ACTION_VERSION)
        if version != ACTION_VERSION:
            raise Rejected(f"action_version {version!r} is unknown, this is {ACTION_VERSION}")
        kind = given.get("action_type")
        if kind not in ir.HINT_ACTIONS:
            raise Rejected(f"action_type {kind!r} is unknown: one of {ir.HINT_ACTIONS}")
        payload = given.get("payload")
        if not isinstance(payload, Mapping):
            raise Rejected("payload is no object")
        action = Action(
            kind,
            _integer(payload, "ttl_ms", 1, 2**31 - 1),
            _integer(payload, "priority", 0, 100),
            _tier(payload),
        )
        token_ids = self._target(payload.get("target"), tokenized)
        if token_ids is None:
            return Outcome("missing", "this response is not known any more")
        return stated.carry_out(action, token_ids, namespace=self.namespace, account=self.account)

    def _target(self, target: object, tokenized: Mapping[str, array[int]]) -> Sequence[int] | None:
        """The target's token ids; None if a response is not stored."""
        if not isinstance(target, Mapping) or len(target) != 1:
            raise Rejected("target is no object with one of token_ids, prompt, response_id")
        ((kind, value),) = target.items()
        if kind == "response_id" and isinstance(value, str):
            return self.responses.find((self.namespace, value))
        if kind == "prompt" and isinstance(value, str):
            if len(value) > self.max_text_chars:
                raise Rejected(f"a prompt of {len(value)} characters fits no context")
            if value not in tokenized:
                raise Rejected("the model's tokenizer cannot take this prompt")
            return array("i", self.tokenizer.bos_ids) + tokenized[value]
        if kind == "token_ids" and isinstance(value, list) and self._are_ids(value):
            return value
        allowed = f"token ids in [0, {self.vocab_size - 1}], or a text"
        raise Rejected(
            f"target {kind!r} is not one of token_ids, prompt, response_id with {allowed}"
        )

    def _are_ids(self, value: list[Any]) -> bool:
        return len(value) <= MAX_TARGET_TOKENS and all(
            type(token_id) is int and 0 <= token_id < self.vocab_size for token_id in value
        )


def _integer(payload: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = payload.get(name)
    is_fine = value is None or (type(value) is int and low <= value <= high)
    if not is_fine:
        raise Rejected(f"{name}={value!r} is not an integer in [{low}, {high}]")
    return value


def _tier(payload: Mapping[str, Any]) -> str | None:
    value = payload.get("tier")
    if value is not None and value not in ir.TIERS:
        raise Rejected(f"tier={value!r} is not one of {ir.TIERS}")
    return value
