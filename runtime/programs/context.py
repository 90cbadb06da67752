"""What all programs of an engine share: its tokenizer, template, defaults and queue."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...constrained.serving.grammar_state import PendingGrammar
from ...constrained.spec import GrammarSpec
from ...errors import MAX_MODEL_NAME_CHARS, InvalidRequest
from ...frontend.protocol import ir
from ...frontend.protocol.kv_policy import KVPolicy
from ..checkpoint.lora.adapter import Adapter
from ..checkpoint.lora.registry import AdapterRegistry
from ..images.registry import ImageRegistry
from ..schedule.compression import CompressedPrefixes
from ..schedule.sampling_params import SamplingParams
from ..tokenizer.chat_template import ChatTemplate
from ..tokenizer.tokenizer import Tokenizer
from .branch_kv import BranchKV, Shown
from .calls import RequestQueue
from .embedded_text import Encoder
from .foretelling import Foreteller
from .hint_targets import Responses
from .likely_texts import LikelyTexts, Prefills
from .prefix_leases import KVLeases, ThinkTimes
from .text_threads import TextThreads

MAX_TURNS = 8192
MAX_TURN_TOKENS = 1 << 24  # 64 MiB of ids
MAX_ANSWERS = 128  # to one prompt


@dataclass(frozen=True, slots=True)
class Defaults:
    """The model's own choices, for what a gen leaves open."""

    options: ir.Sampling = field(default_factory=ir.Sampling)
    eos_token_ids: tuple[int, ...] = ()

    def sampling(self, given: ir.Sampling, seed: int) -> SamplingParams:
        """Of the first sample. Raises InvalidRequest naming the field at fault."""
        return SamplingParams(**{"seed": seed, **self.options.sampling(), **given.sampling()})

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end an output."""
        eos = () if sampling.ignore_eos else self.eos_token_ids
        return frozenset((*sampling.stop_token_ids, *eos))


class GrammarSource(Protocol):
    """Where programs get their grammars."""

    def ask(
        self, spec: GrammarSpec, namespace: Hashable = "", tenant: Hashable = ""
    ) -> PendingGrammar:
        """The grammar of this spec, perhaps still on its way; remembered within the namespace.
        `tenant`: whose turn it takes."""

    def validate(
        self,
        schema: str,
        text: str,
        on_done: Callable[[tuple[str, ...]], None],
        tenant: Hashable = "",
    ) -> None:
        """Call `on_done` later with what makes `text` invalid under `schema`."""


class AssistantTurnCache:
    """The ids of chats up to the end of a turn that was generated, by the text of the prompt and of
    that turn, so that a client that sends it back as text meets the very ids in the cache. Each
    namespace has its own. Bounded, least recently used prompts go first; thread-safe."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, bytes], dict[str, array[int]]] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def remember(self, namespace: str, prompt: bytes, text: str, ids: array[int]) -> None:
        """`prompt`: digest of its text; `ids`: of prompt and turn, not to be changed."""
        with self._lock:
            answers = self._answers.setdefault((namespace, prompt), {})
            self._answers.move_to_end((namespace, prompt))
            if text not in answers and len(answers) < MAX_ANSWERS:
                answers[text] = ids
                self._num_tokens += len(ids)
            while len(self._answers) > MAX_TURNS or self._num_tokens > MAX_TURN_TOKENS:
                _, dropped = self._answers.popitem(last=False)
                self._num_tokens -= sum(map(len, dropped.values()))

    def find(
        self, namespace: str, prompt: bytes, written: str, behind: Sequence[str]
    ) -> tuple[str, array[int]] | None:
        """The longest turn generated after a prompt with which `written` begins, followed by one of
        `behind`, and its ids with the prompt's."""
        with self._lock:
            answers = self._answers.get((namespace, prompt))
            if answers is None:
                return None
            self._answers.move_to_end((namespace, prompt))
            fitting = [
                text
                for text in answers
                if written.startswith(text)
                and any(written.startswith(end, len(text)) for end in behind)
            ]
            text = max(fitting, key=len, default=None)
            return None if text is None else (text, answers[text])


@dataclass(frozen=True, slots=True)
class ProgramContext:
    """What all programs of an engine share."""

    tokenizer: Tokenizer
    vocab_size: int
    template: ChatTemplate
    defaults: Defaults
    queue: RequestQueue
    next_request_id: Callable[[], int]
    assistant_turns: AssistantTurnCache
    grammars: GrammarSource | None = None
    jump_forward: bool = True  # unless a gen says otherwise
    kv: KVLeases | None = None  # None: nothing is leased
    adapters: AdapterRegistry | None = None  # None: none are served
    think_times: ThinkTimes = field(default_factory=ThinkTimes)
    responses: Responses = field(default_factory=Responses)
    max_prompt_tokens: int = sys.maxsize
    max_text_chars: int = 1 << 24  # a longer text fits no prompt, however it is tokenized
    encoder: Encoder | None = None  # set: the model generates nothing
    texts: TextThreads | None = None  # for long ones; None: each is tokenized at once
    images: ImageRegistry | None = None  # None: the model reads only text
    compressed: CompressedPrefixes = field(default_factory=CompressedPrefixes)
    kv_policy: KVPolicy | None = None  # of gens and selects that name none
    foreteller: Foreteller | None = None  # None: what outputs will be is not told
    likely_texts: LikelyTexts = field(default_factory=LikelyTexts)
    prefills: Prefills | None = None  # of likely texts; None: nothing is computed ahead

    def policy_of(self, shown: Shown) -> KVPolicy | None:
        """The engine's, for a text of which it can keep a part: no call fails for what it has not
        asked for."""
        policy, prefix = self.kv_policy, shown.compressed
        num_slots = 0 if prefix is None else prefix.num_slots
        if policy is None or min(shown.ids[num_slots:], default=0) < 0:  # an image's
            return None
        if policy.is_stream and prefix is not None and prefix.policy.kind != policy.kind:
            return None
        return policy

    def lasting(self, kv: BranchKV, ids: array[int]) -> Shown:
        """A branch's tokens, or their beginning, as the KV of its next calls begins."""
        shown = kv.shown(ids)
        policy = self.policy_of(shown)
        if policy is None or not policy.is_stream or not ids:
            return shown
        return kv.with_policy(ids, policy, self.compressed)

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of this name; None: the model as it is. Raises InvalidRequest or
        ModelNotFound."""
        if not name:
            return None
        if self.adapters is None:
            allowed = "none: this engine serves no adapters (enable_lora, lora_paths)"
            raise InvalidRequest.of("lora_path", name[:MAX_MODEL_NAME_CHARS], allowed)
        return self.adapters.find(name)
