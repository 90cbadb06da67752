"""Own ways to choose: what `select(choices_method=)` may be beside the three by name.

As in SGLang: an object that is called with the log probabilities of all choices and says which one
it is to be. A class of one's own needs no base; `ChoicesSamplingMethod` says what is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

TokenLogprobs: TypeAlias = Sequence[Sequence[Any]]
"""Of each token: (log probability, token id, None); over HTTP the id is None, too."""


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The choice to append, one of those given; `meta_info` becomes part of the value's."""

    decision: str
    meta_info: Mapping[str, Any] | None = None


class ChoicesSamplingMethod(ABC):
    """Decides among choices; on the thread that appends the select, which waits for the scores."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the choices are to be scored without the prompt, too."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[TokenLogprobs],
        output_token_logprobs: Sequence[TokenLogprobs],
        unconditional_token_logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> ChoicesDecision:
        """The decision. For each choice the mean log probability of its tokens in this context,
        those of each token, nothing (`output_token_logprobs`: no token is generated), and where
        they are required those without the context."""
