"""One branch of a program that is carried out in the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..protocol import ir
from ..protocol.branch import Branch
from .client_transcript import ClientTranscript, Prompt
from .speculation import Draft, Slot


@dataclass(slots=True, eq=False)
class Pattern:
    """Text and gens of an assistant message whose gens have no values yet."""

    prompt: Prompt  # up to where the message begins
    terms: list[str | Slot] = field(default_factory=list)
    gens: list[ir.Gen] = field(default_factory=list)  # of the slots, in order
    draft: Draft | None = None  # the answer that served the message's earlier gens


@dataclass(slots=True, eq=False)
class ClientBranch(Branch[ClientTranscript, asyncio.Task[None]]):
    """A branch whose transcript has pieces of text; `fork_length` counts these."""

    last_reply_id: str = ""  # of the last answer that it has
    draft: Draft | None = None
    pattern: Pattern | None = None
    is_flushed: bool = False  # whether the program waits for what it has sent

    @property
    def has_open_gens(self) -> bool:
        """Whether gens are put off."""
        return self.pattern is not None and bool(self.pattern.gens)


def hint_target(branch: ClientBranch) -> dict[str, str] | None:
    """What the branch has, as a server knows it: its text; of a chat, up to its last answer."""
    transcript = branch.begun
    if transcript.is_chat:
        return {"response_id": branch.last_reply_id} if branch.last_reply_id else None
    text = "".join(piece.text for piece in transcript.pieces)
    return {"prompt": text} if text else None


def is_whole_message(branch: ClientBranch, pattern: Pattern) -> bool:
    """Whether the message is one gen and nothing else."""
    is_only = len(pattern.gens) == len(pattern.terms) == 1
    return is_only and bool(branch.log) and isinstance(branch.log[0], ir.RoleEnd)
