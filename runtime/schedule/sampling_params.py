"""How one request is sampled and when it ends. Plain data, validated, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

from ...constrained.stop_patterns import MAX_STOP_PATTERNS, stop_automaton
from ...errors import InvalidRequest
from ...frontend.protocol.numbers import RANGES, Range

MAX_STOP_STRINGS = 64
MAX_LOGIT_BIASES = 1024
# A logit divided by less may not be finite; a lower temperature is taken as 0.
MIN_TEMPERATURE = 1e-100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and ending of one request.

    The draw is `argmax(logits / temperature + Gumbel(Philox(seed, position, token_id)))` over the
    exact top-k/top-p/min-p set (docs/how-it-works/sampling.md), so it depends on nothing but these
    values, the request's own tokens and the logits. `temperature == 0` is greedy. Penalties and
    bias change the logits before that; `repetition_penalty` counts prompt and output, the others
    the output.
    """

    max_tokens: int = 128  # >= 0; 0: the prompt is computed and nothing sampled
    temperature: float = 1.0  # [0, 1e4]; 0 is greedy, and so is less than MIN_TEMPERATURE
    top_p: float = 1.0  # (0, 1]
    top_k: int | None = None  # >= 1; None: whole vocabulary
    min_p: float = 0.0  # [0, 1], of the likeliest token's probability
    frequency_penalty: float = 0.0  # [-2, 2], off the logit for each time that a token was sampled
    presence_penalty: float = 0.0  # [-2, 2], off the logit of a token that was sampled
    repetition_penalty: float = 1.0  # (0, 10], divides positive and multiplies negative logits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, [-100, 100]), each id once
    min_tokens: int = 0  # [0, max_tokens]; no stop token before these, no stop string within
    seed: int = 0  # [0, 2**63)
    stop: tuple[str, ...] = ()  # the output is cut before the first of these
    stop_regex: tuple[str, ...] = ()  # and before the first match of these
    stop_token_ids: tuple[int, ...] = ()  # end the output, not part of it
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    logprobs: int | None = None  # None: off; n: the chosen token's and the n best tokens'

    def __post_init__(self) -> None:
        for name, value in zip(_NUMBERS, _NUMBER_VALUES(self)):
            if value is not None or name not in ("top_k", "logprobs"):
                RANGES[name].require(name, value)
        _require_bias(self.logit_bias)
        Range(0, self.max_tokens, is_whole=True).require("min_tokens", self.min_tokens)
        _require_stop(self.stop)
        _require_stop_regex(self.stop_regex)
        _require_stop_ids(self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest.of("ignore_eos", self.ignore_eos, "true or false")

    @property
    def is_greedy(self) -> bool:
        """Whether the best logit is taken and nothing is drawn."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def has_output_penalty(self) -> bool:
        """Whether logits depend on how often a token was sampled."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def has_repetition_penalty(self) -> bool:
        """Whether logits depend on which tokens the prompt and the output have."""
        return self.repetition_penalty != 1.0

    @property
    def changes_logits(self) -> bool:
        """Whether there is a penalty or a bias."""
        return self.has_output_penalty or self.has_repetition_penalty or bool(self.logit_bias)


_NUMBERS = tuple(f.name for f in fields(SamplingParams) if f.name in RANGES.keys() - {"logit_bias"})
_NUMBER_VALUES = attrgetter(*_NUMBERS)


def _require_bias(bias: object) -> None:
    if not isinstance(bias, tuple) or len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest.of("logit_bias", bias, f"at most {MAX_LOGIT_BIASES} token ids")
    for pair in bias:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidRequest.of("logit_bias", pair, "pairs of a token id and its bias")
        RANGES["token_ids"].require("logit_bias", pair[0])
        RANGES["logit_bias"].require("logit_bias", pair[1])
    if len({token_id for token_id, _ in bias}) < len(bias):
        raise InvalidRequest.of("logit_bias", bias, "each token id once")


def _require_stop_ids(token_ids: object) -> None:
    if not isinstance(token_ids, tuple):
        raise InvalidRequest.of("stop_token_ids", token_ids, "a list of integers")
    for token_id in token_ids:
        RANGES["token_ids"].require("stop_token_ids", token_id)


def _require_stop(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest.of("stop", stop, f"at most {MAX_STOP_STRINGS} strings")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequest.of("stop", text, "non-empty strings")


def _require_stop_regex(patterns: tuple[str, ...]) -> None:
    if not isinstance(patterns, tuple) or len(patterns) > MAX_STOP_PATTERNS:
        allowed = f"at most {MAX_STOP_PATTERNS} regular expressions"
        raise InvalidRequest.of("stop_regex", patterns, allowed)
    for pattern in patterns:
        stop_automaton(pattern)
