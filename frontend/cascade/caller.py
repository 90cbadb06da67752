"""Programs on a cascade: each gen is a cascade's answer, each select its largest model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from ...errors import InvalidProgram
from ..openai.calls import Filling, OnDelta, Outcome
from ..openai.client_branch import ClientBranch
from ..openai.client_session import ClientSession
from ..openai.client_transcript import Prompt
from ..openai.speculation import Draft, Slot
from ..protocol import ir
from ..protocol.chat_message import Message
from .cascade import Cascade, CascadeCall
from .engine_calls import Ask, CallFailed, EngineCall


class CascadeCaller:
    """What a session asks (`client_session.Asks`); the programs' texts are sent with each call."""

    def __init__(self, cascade: Cascade) -> None:
        self._cascade = cascade

    def can_continue(self, prompt: Prompt) -> bool:
        """Engines go on from any text."""
        return True

    async def gen(
        self, prompt: Prompt, params: ir.GenParams, seed: int, on_delta: OnDelta | None = None
    ) -> Outcome:
        """Raises InvalidProgram, CallFailed and EngineError."""
        ask = _ask_of(prompt, replace(params, seed=seed), seed)
        value = await CascadeCall(self._cascade, ask).answer(on_delta)
        return Outcome(value["value"], value["text"], value["meta"])

    async def select(self, prompt: Prompt, op: ir.Select) -> Outcome:
        """Raises CallFailed and EngineError."""
        ask = _ask_of(prompt, ir.GenParams(), 0)
        largest = await self._cascade.members[-1].connect()
        value = await EngineCall(largest).select(ask, op)
        return Outcome(value["value"], value["text"], value["meta"])

    async def hint(self, target: dict[str, str] | None, op: ir.Hint) -> dict[str, Any]:
        """Several engines have the KV of a cascade's program: none is acted on."""
        reason = "a cascade's programs have KV in several engines; each engine keeps its own"
        action = f"{op.branch}.{op.seq}"
        return {"action_id": action, "outcome": "rejected", "reason": reason, "num_tokens": 0}

    async def draft(
        self, prompt: Prompt, params: ir.GenParams, seed: int, num_tokens: int
    ) -> tuple[Draft, dict[str, Any]]:
        """Of sessions with `num_spec_tokens`, which a cascade has none of."""
        _refuse_spec_tokens()

    async def fill(
        self,
        prompt: Prompt,
        terms: list[str | Slot],
        params: ir.GenParams,
        seed: int,
        num_tokens: int,
    ) -> Filling:
        """Of sessions with `num_spec_tokens`, which a cascade has none of."""
        _refuse_spec_tokens()


class CascadeSession(ClientSession):
    """One program. `calls_alike`: whether all models write tool calls in one format."""

    calls_alike = True

    def _carry_out(self, branch: ClientBranch, op: ir.Op) -> bool:
        if isinstance(op, ir.Tokens):
            raise InvalidProgram(
                "ids are of one model's tokenizer, and a cascade has several; append text",
                "tokens",
            )
        if isinstance(op, ir.Tools) and not self.calls_alike:
            message = "the models of this cascade write calls in different formats"
            raise InvalidProgram(message, "tools")
        if isinstance(op, ir.Select) and op.lora_path:
            raise InvalidProgram.of("lora_path", op.lora_path, "left out: models of a cascade")
        return super()._carry_out(branch, op)

    def _fail_with(self, branch: ClientBranch, op: ir.Op, error: Exception) -> None:
        if isinstance(error, CallFailed):
            self._fail(branch, op, str(error), error.kind, field=error.field)
        else:
            super()._fail_with(branch, op, error)


def _refuse_spec_tokens() -> NoReturn:
    raise InvalidProgram("num_api_spec_tokens: a cascade goes on from any text", "num_tokens")


def _ask_of(prompt: Prompt, params: ir.GenParams, seed: int) -> Ask:
    create: dict[str, object] = {"seed": seed, "instance": 0}
    if not prompt.is_chat:
        return Ask((ir.Text(0, 0, None, prompt.text),), params, create, prompt.text)
    if prompt.tools is not None:
        create["tools"] = prompt.tools
    messages = [Message(m.role, m.text, m.fields) for m in prompt.messages]
    if prompt.answer:
        messages.append(Message("assistant", prompt.answer))
    shown = [message.body() for message in prompt.messages]
    return Ask((ir.Chat(0, 0, None, tuple(messages)),), params, create, shown)
