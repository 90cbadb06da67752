"""One call of `encode`: a program for each prompt, which makes its embedding."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequest
from ..client.client import Connection
from ..client.program import Pending, Program
from ..protocol import ir
from ..protocol.call_ops import embed_ops


class EmbeddingRun:
    """Lifetime: from the first op until all is told."""

    def __init__(
        self,
        connection: Connection,
        prompts: Sequence[str | Sequence[int]],
        *,
        is_batch: bool,
        lora_path: str | None,
    ) -> None:
        """Sends everything. Raises InvalidRequest where the model gives no embeddings."""
        told: Mapping[str, Any] = connection.info["embedding"]
        if told["refusal"] is not None:
            raise InvalidRequest(f"encode: this model gives no embeddings: {told['refusal']}")
        self._is_batch = is_batch
        self._sent: list[tuple[Program, Pending]] = []
        for number, prompt in enumerate(prompts):
            program = Program(
                connection, seed=0, instance=number, name="encode", lora_path=lora_path
            )
            ops = embed_ops(prompt, pooling=told["pooling"], normalize=True)
            for op in ops[:-1]:
                if isinstance(op, ir.Text):
                    program.send_silent(op)
                else:
                    program.send(op)
            self._sent.append((program, program.send(ops[-1])))
            program.end()

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Raises ProgramError and EngineError."""
        for program, pending in self._sent:
            program.wait(pending)
        return self._answers()

    async def whole_async(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The same for a coroutine."""
        for program, pending in self._sent:
            await program.wait_async(pending)
        return self._answers()

    def _answers(self) -> dict[str, Any] | list[dict[str, Any]]:
        answers = [_answer(pending) for _, pending in self._sent]
        return answers if self._is_batch else answers[0]


def _answer(pending: Pending) -> dict[str, Any]:
    meta = pending.meta
    told = {
        "id": f"embed-{secrets.token_hex(12)}",
        "finish_reason": {"type": meta["finish_reason"]},
        "prompt_tokens": meta["prompt_tokens"],
        "cached_tokens": meta["cached_tokens"],
        "e2e_latency": meta["latency_s"],
    }
    return {"embedding": pending.value, "meta_info": told}
