"""`kv_hints`: actions on the KV cache, within a request or alone in POST /kv_hints.

In a request to a completion endpoint an action without a target means the request's own prompt and
output, and all run when it has ended. docs/how-it-works/leases.md describes the envelope.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ...errors import InvalidRequest, StemmaError
from ...frontend.client.client import Connection
from ...frontend.protocol.hint_outcome import outcome_payload
from .caller import Caller
from .known_fields import Items

PROTOCOL_VERSION = 1
MAX_REASON_CHARS = 500


class HintAction(BaseModel):
    """One action; what it says is checked by the runtime and answered in its outcome."""

    model_config = ConfigDict(extra="ignore")

    action_id: str = Field(max_length=256)
    action_type: str = Field(max_length=64)
    action_version: Any = 1
    payload: dict[str, Any] = Field(default_factory=dict)


class HintEnvelope(BaseModel):
    """`kv_hints` of a request, or the body of /kv_hints."""

    model_config = ConfigDict(extra="ignore")

    protocol_version: int = PROTOCOL_VERSION
    message_id: str = Field(default="", max_length=256)
    actions: Items[HintAction] = Field(min_length=1, max_length=64)

    def check(self, *, needs_targets: bool) -> None:
        """Raises InvalidRequest naming the field at fault."""
        if self.protocol_version != PROTOCOL_VERSION:
            allowed = f"{PROTOCOL_VERSION}"
            raise InvalidRequest.of("kv_hints.protocol_version", self.protocol_version, allowed)
        ids = [action.action_id for action in self.actions]
        if len(set(ids)) < len(ids):
            raise InvalidRequest.of("kv_hints.actions", ids, "actions with different action_ids")
        for index, action in enumerate(self.actions):
            if needs_targets and "target" not in action.payload:
                field = f"actions.{index}.payload.target"
                raise InvalidRequest(f"{field}: token_ids, prompt or response_id is needed", field)

    async def carry_out(
        self,
        connection: Connection,
        caller: Caller,
        response_id: str | None = None,
        lora_path: str | None = None,
    ) -> dict[str, Any]:
        """Returns an outcome for each action. All stay within the caller's namespace, and there
        within the KV computed by the adapter `lora_path`, or by the base model; actions without a
        target mean `response_id`."""
        actions = [action.model_dump() for action in self.actions]
        for action in actions:
            action["payload"].setdefault("target", {"response_id": response_id})
        try:
            outcomes = await connection.acall(
                "kv_hints",
                actions=actions,
                namespace=caller.namespace,
                account=caller.tenant or "",
                lora_path=lora_path,
            )
        except StemmaError as error:  # a finished response is not lost to a failed hint
            reason = str(error)[:MAX_REASON_CHARS]
            outcomes = [
                outcome_payload(action.action_id, "rejected", reason) for action in self.actions
            ]
        return {
            "protocol_version": PROTOCOL_VERSION,
            "message_id": self.message_id,
            "outcomes": outcomes,
        }
