"""Options of a run: the backend, the seed, and what its gens do that do not say themselves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidProgram
from ..backend import get_default_backend
from ..client.backend import Backend
from ..client.program import Defaults, Program
from ..protocol.ir import NOTHING_GIVEN, GenParams
from ..trace import observer
from .generation import checked_lora_path, regexes_of, texts_of
from .state import ProgramState

MAX_SEED = 2**63 - 1

_AS_THEY_ARE = (
    "frequency_penalty",
    "ignore_eos",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
_OF_GENS = (
    "logprob_start_len",
    "max_new_tokens",
    "max_tokens",
    "return_logprob",
    "return_text_in_logprobs",
    "stop",
    "stop_regex",
    "stop_token_ids",
    "top_logprobs_num",
    *_AS_THEY_ARE,
)
RUN_OPTIONS = frozenset(("backend", "lora_path", "seed", "use_thread", *_OF_GENS))


class RunOptions:
    """What all programs of one run or batch have in common. Raises InvalidProgram."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        name: str = "program",
        num_api_spec_tokens: int | None = None,
    ) -> None:
        backend = given.get("backend")
        if backend is not None and not isinstance(backend, Backend):
            raise InvalidProgram.of("backend", backend, "an Engine, a Runtime or an OpenAI")
        self.backend: Backend = backend if backend is not None else get_default_backend()
        seed = given.get("seed")
        self.seed = secrets.randbits(62) if seed is None else checked_seed(seed)
        params = _gen_defaults(given)
        self.defaults = None if params == NOTHING_GIVEN else Defaults(params)
        self._lora_path = checked_lora_path(given.get("lora_path")) or None
        self._name = name
        self._num_api_spec_tokens = num_api_spec_tokens

    def start(self, instance: int = 0, stream: bool = False) -> ProgramState:
        """A program of its own. Raises EngineError."""
        program = Program(
            self.backend.channel,
            seed=self.seed,
            instance=instance,
            stream=stream,
            defaults=self.defaults,
            name=self._name,
            num_api_spec_tokens=self._num_api_spec_tokens,
            lora_path=self._lora_path,
        )
        observer.program_started(program)
        return ProgramState(program)


def checked_seed(seed: object) -> int:
    """Raises InvalidProgram."""
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise InvalidProgram.of("seed", seed, f"an integer in [0, {MAX_SEED}]")
    return seed


def _gen_defaults(given: Mapping[str, Any]) -> GenParams:
    """SGLang's names and ours; a top_k of -1 is all tokens, a list of none is nothing."""
    values = {name: given.get(name) for name in _AS_THEY_ARE}
    if values["top_k"] == -1:
        values["top_k"] = None
    num_top, start = given.get("top_logprobs_num"), given.get("logprob_start_len")
    if given.get("return_logprob"):
        values["logprobs"] = num_top or 0
        values["logprob_start"] = None if start == -1 else start
    elif given.get("return_logprob") is None and (num_top or start not in (None, -1)):
        raise InvalidProgram("top_logprobs_num and logprob_start_len need return_logprob=True")
    stop_ids = given.get("stop_token_ids")
    return GenParams(
        max_tokens=given.get("max_tokens", given.get("max_new_tokens")),
        stop=texts_of("stop", given.get("stop")) or None,
        stop_regex=regexes_of(given.get("stop_regex")) or None,
        stop_token_ids=tuple(stop_ids) if stop_ids else None,
        **values,
    )
