"""One branch of a program that runs in the engine."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import InvalidRequest
from ...frontend.protocol import ir
from ...frontend.protocol.branch import Branch
from ..images.image import Image
from ..tokenizer.transcript import TextChange, Transcript
from .branch_kv import BranchKV
from .calls import Call
from .client_leases import MAX_ASKED, AskedHint
from .embedded_text import EmbeddedText


@dataclass(slots=True, eq=False)
class Value:
    """What an op appended, for `Var`."""

    ids: array[int]
    text: str


class Prepared(NamedTuple):
    """What an op needs, tokenized: the branch's transcript up to it; how the text before it reads
    now, if that is to be told; a select's choices, each with its ids; a gen's prediction, as ids;
    why the op fails behind its text; what an embed op embeds; the images of the op."""

    transcript: Transcript
    text_change: TextChange | None = None
    choices: Sequence[tuple[str, list[int]]] = ()
    prediction: array[int] = array("i")  # not to change
    failure: InvalidRequest | None = None
    embedded: EmbeddedText | None = None
    images: tuple[Image, ...] = ()


@dataclass(slots=True, eq=False)
class EngineBranch(Branch[Transcript, Call]):
    """A branch whose transcript has token ids; `fork_length` counts these."""

    pending_text: list[ir.Text] = field(default_factory=list)
    asked: deque[AskedHint] = field(default_factory=lambda: deque(maxlen=MAX_ASKED))
    text_change: TextChange | None = None  # how the text before the call turned out to read
    prepared: Prepared | Exception | None = None  # of the current op, by another thread
    namespace: Hashable | None = None  # of the last call's KV; None: no call was made yet
    num_calls: int = 0  # Gens, Selects and Embeds in the log
    kv: BranchKV = field(default_factory=BranchKV)

    def num_calls_ahead(self) -> int:
        """The longest chain of calls that are known to follow each other from its current op on:
        its own, then those of a branch it will fork, or of the one that joins it."""
        forked = max((child.num_calls for child in self.unforked), default=0)
        chain = self.num_calls + forked
        step, seen = self.joined_by, {self.number}
        while step is not None and step.number not in seen:
            chain += step.num_calls
            seen.add(step.number)
            step = step.joined_by
        return chain
