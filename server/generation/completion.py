"""One prompt's completions asked for over HTTP, as a program on the engine's connection.

One sample is a branch that ends in a `Gen`; several are forks of that branch, so that the prompt is
tokenized once and its KV shared. The HTTP process is a client of the engine like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import EngineError, InvalidRequest
from ...frontend.client.client import Connection
from ...frontend.protocol import ir, wire
from ...frontend.protocol.call_ops import plain_prompt_ops, sample_ops
from ...frontend.protocol.chat_message import Message
from ..protocol.caller import Caller, digest_of
from ..protocol.task import Prompt, Task

Post = Callable[[int, str, Any], None]
"""(sample, kind, payload) of a delta, a value, a failure or the program's end; called on the
connection's thread."""

_TOLD = frozenset({wire.DELTA, wire.VALUE, wire.FAILED, wire.DONE})


class Completion:
    """The program of one prompt. Lifetime: until it has ended."""

    def __init__(
        self,
        connection: Connection,
        task: Task,
        caller: Caller,
        *,
        number: int,
        post: Post,
        seed: int,
        op_key: str | None,
        response_id: str | None,
    ) -> None:
        """`number`: of the task's prompt; `op_key`: that prompt's of the task's; `response_id`: by
        which KV hints may name the first sample.

        Raises EngineError and InvalidProgram.
        """
        self._connection = connection
        self._task = task
        self._number = number
        self._first = number * task.n  # of its samples
        self._post = post
        create: dict[str, object] = {"seed": seed, "instance": number, "stream": task.stream}
        given = {
            "token_ids": task.has_token_ids or None,
            "tools": task.tools,
            "template_kwargs": task.template_kwargs,
            "response_id": response_id,
            "tenant": caller.tenant,
            "namespace": caller.namespace or None,
            "lora_path": task.lora_path_of(number),
            "history": digest_of(task.history) if task.history else None,
            "op_key": op_key,
        }
        create.update((name, value) for name, value in given.items() if value is not None)
        self._program = connection.open_program(self, create)

    def send(self) -> None:
        """Send the whole program. Raises EngineError and InvalidProgram."""
        task, number = self._task, self._number
        ops = prompt_ops(task.prompts[number])
        ops = (*ops, *sample_ops(len(ops), task.params_of(number), task.n))
        self._connection.send_program(self._program, ops)

    def end_now(self) -> None:
        """Have the samples end with what they have; their values still come."""
        self._connection.end_gens(self._program)

    def cancel(self) -> None:
        """Nothing more is wanted but the report of its end; nothing happens if all has come."""
        self._connection.cancel_program(self._program)

    # --- on the connection's I/O thread -----------------------------------------------------------

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind == wire.VALUE and isinstance(payload["value"], list):
            self._post_each(payload)
        elif kind in _TOLD:
            self._post(self._first + max(0, branch - 1), kind, payload)

    def handle_disconnect(self, error: EngineError) -> None:
        failure = {"message": str(error), "kind": type(error).__name__}
        self._post(self._first, wire.FAILED, failure)

    def _post_each(self, payload: Any) -> None:
        """The values of one gen, one for each sample; a beam search may have found fewer."""
        found, wanted = len(payload["value"]), self._task.n
        for index, (text, meta) in enumerate(zip(payload["value"], payload["meta"])):
            self._post(self._first + index, wire.VALUE, {"value": text, "text": text, "meta": meta})
        if found < wanted:
            message = f"n: the search has found {found} outputs, and {wanted} were asked for"
            failure = {"message": message, "kind": InvalidRequest.__name__, "field": "n"}
            self._post(self._first + found, wire.FAILED, failure)


def prompt_ops(prompt: Prompt) -> Sequence[ir.Op]:
    """What makes a program's first branch begin with `prompt`."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return plain_prompt_ops(prompt)  # type: ignore[arg-type]
    return (ir.Chat(0, 0, None, tuple(m for m in prompt if isinstance(m, Message))),)
