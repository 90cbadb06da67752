"""Options of a run: the backend, the seed, and what its gens do that do not say themselves."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidProgram
from ..backend import get_default_backend
from ..client.backend import Backend
from ..client.program import Defaults, Program
from ..protocol.ir import NOTHING_GIVEN, GenParams
from ..protocol.numbers import RANGES, Range
from ..trace import observer
from .expr import GenExpr
from .generation import checked_lora_path, gen
from .state import ProgramState

_OF_GENS = (
    "frequency_penalty", "ignore_eos", "logprob_start_len", "min_p", "min_tokens", "n",
    "presence_penalty", "priority", "repetition_penalty", "return_logprob",
    "return_text_in_logprobs", "stop", "stop_regex", "stop_token_ids", "temperature", "top_k",
    "top_logprobs_num", "top_p",
)  # fmt: skip
RUN_OPTIONS = frozenset(
    (
        "backend",
        "lora_path",
        "max_new_tokens",
        "max_tokens",
        "seed",
        "timeout",
        "use_thread",
        *_OF_GENS,
    )
)


_TIMEOUTS = Range(0, threading.TIMEOUT_MAX, is_above=True)


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
        timeout = given.get("timeout")
        self.timeout_s = None if timeout is None else float(_TIMEOUTS.checked("timeout", timeout))
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
    number: int = RANGES["seed"].checked("seed", seed)
    return number


def _gen_defaults(given: Mapping[str, Any]) -> GenParams:
    """Those of a gen with these options; a list of none is nothing."""
    asked = {name: given[name] for name in _OF_GENS if not _is_nothing(given.get(name))}
    if "return_logprob" not in asked:
        num_top, start = asked.pop("top_logprobs_num", 0), asked.pop("logprob_start_len", -1)
        if num_top or start != -1:
            raise InvalidProgram("top_logprobs_num and logprob_start_len need return_logprob=True")
    made = gen(None, given.get("max_tokens", given.get("max_new_tokens")), **asked)
    assert isinstance(made, GenExpr)
    return made.params


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, list | tuple) and not value)
