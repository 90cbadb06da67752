"""What calls the model: `gen`, its short forms, and `select`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, Literal, ParamSpec, TypeVar

from ...errors import InvalidProgram
from ..client.early_calls import ReadCalls
from ..protocol.constraint import Constraint, Formats, PropertyOrder, Whitespace, constraint_of
from ..protocol.ir import (
    CHOICES_METHODS,
    MAX_CHOICES,
    MAX_OP_NAME_CHARS,
    ChoicesMethod,
    GenParams,
    logit_bias_of,
    texts_of,
)
from ..protocol.kv_policy import KVPolicy
from ..protocol.numbers import Range, plain, token_ids_of
from .early import Ahead, read_calls
from .expr import Check, Expr, GenExpr, SelectExpr
from .scalars import SCALARS_BY_NAME, TypedOutput, scalar_output

token_length_normalized: ChoicesMethod = "token_length_normalized"
greedy_token_selection: ChoicesMethod = "greedy_token_selection"
unconditional_likelihood_normalized: ChoicesMethod = "unconditional_likelihood_normalized"

_GREEDY = Range(0, 1e-5)  # temperatures of a select; SGLang's bound
_RETRIES = Range(0, 1000, is_whole=True)
MAX_REGEX_CHARS = 4096
MAX_REMEMBERED = 256

P = ParamSpec("P")
E = TypeVar("E", bound=Expr)

# What may change while it stays the same key, such as a tensor, is not remembered either.
_REMEMBERED_TYPES = frozenset((int, float, bool, str, tuple, type, type(None)))
# Unhashable, too large to keep, or numbers within a tuple: 1, 1.0 and True are one key there.
_NOT_REMEMBERED = frozenset(
    (
        "regex",
        "json_schema",
        "ebnf",
        "structural_tag",
        "choices",
        "logit_bias",
        "stop_token_ids",
        "prediction",
        "type",
        "validate",
        "ahead",
    )
)


def _remembered(make: Callable[P, E]) -> Callable[P, E]:
    """The same params for the same arguments, whatever the name: thousands of programs of a batch
    ask for them again and again, and what is derived from them is then also made once."""
    remembered = functools.lru_cache(MAX_REMEMBERED, typed=True)(make)

    @functools.wraps(make)
    def made(name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_known = _REMEMBERED_TYPES.issuperset(map(type, given))
        if len(args) > 1 or not is_known or not _NOT_REMEMBERED.isdisjoint(kwargs):
            return make(name, *args, **kwargs)  # type: ignore[arg-type]
        try:
            unnamed: Any = remembered(None, *args, **kwargs)
        except TypeError:  # an argument that there is not
            return make(name, *args, **kwargs)  # type: ignore[arg-type]
        return unnamed if name is None else replace(unnamed, name=_checked_name(name))

    return made  # type: ignore[return-value]


@_remembered
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | Callable[..., Any] | None = None,
    regex: str | None = None,
    json_schema: object = None,
    *,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    logprob_start: int | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    ebnf: str | None = None,
    structural_tag: object = None,
    whitespace: Whitespace | None = None,
    property_order: PropertyOrder | None = None,
    formats: Formats | None = None,
    lenient: bool | None = None,
    jump_forward: bool | None = None,
    lora_path: str | None = None,
    prediction: str | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] | None = None,
    kv_policy: KVPolicy | None = None,
    type: Any = None,
    validate: Callable[[Any], Any] | None = None,
    retries: int = 0,
    ahead: Ahead | None = None,
) -> Expr:
    """Generate text and call it `name`.

    Args:
        name: `state[name]` is the generated text; None: unnamed.
        max_tokens: at most this many tokens (default 128); 0: the prompt is computed, and cached,
            and nothing generated: the value is "".
        min_tokens: no end-of-sequence or stop token before so many, and no stop string in them.
        n: so many samples of one prompt, 1 to 64, each with draws of its own; with n > 1
            `state[name]` is a list, and the program goes on with its first item.
        stop: end before the first of these strings; they are not part of the output.
        stop_token_ids: end before the first of these tokens.
        stop_regex: end before the first match of one of these, in the syntax of Python's `re`.
        temperature: >= 0, 0 is greedy (default: the model's, else 1).
        top_p: in (0, 1]; draw from the smallest set of tokens with this probability.
        top_k: >= 1; draw from the k likeliest tokens; -1: from all.
        min_p: in [0, 1]; draw from tokens with this share of the likeliest one's probability.
        frequency_penalty: in [-2, 2]; off a token's logit for each time that it was generated.
        presence_penalty: in [-2, 2]; off the logit of a token that was generated.
        ignore_eos: go on past the model's end-of-sequence token.
        return_logprob: SGLang's way to say `logprobs=top_logprobs_num`; False: none at all.
        logprob_start_len: the same as `logprob_start`; -1: none of the prompt's.
        top_logprobs_num: the same as `logprobs`.
        return_text_in_logprobs: of no effect, the text of a token is always there.
        dtype: int, float, bool ("True" or "False") or str (in double quotes); the value is one.
        choices: the same as `select(name, choices)`.
        choices_method: see `select`.
        regex: the whole output matches it.
        json_schema: the output is JSON of this schema: a dict, JSON text, or a pydantic model
            class, whose objects take no further properties unless it says `extra="allow"`.
        repetition_penalty: in (0, 10]; divides (where negative, multiplies) the logit of a token
            that the prompt or the output has.
        logit_bias: [-100, 100] by token id, added to the logits; at most 1,024.
        seed: makes this op's draws reproducible whatever the program's seed is.
        logprobs: n >= 0: `get_meta_info(name)["logprobs"]` has the log probability of each token
            and of the n likeliest at its place.
        logprob_start: with `logprobs`: `get_meta_info(name)["prompt_logprobs"]` has those of the
            prompt's tokens from this position on, and of the n likeliest beside each.
        priority: in [-1000, 1000], default 0; where the engine schedules by priority, the highest
            runs first.
        deadline: seconds from when the runtime has it; fails where it cannot be met.
        ebnf: the output is in the language of this grammar, in Lark's or GBNF's syntax.
        structural_tag: free text with tags that hold JSON, see
            docs/how-it-works/constrained-decoding.md.
        whitespace: between JSON's tokens, "compact" (none, the default) or "flexible".
        property_order: of JSON objects, that of the "schema" (default) or "any".
        formats: "enforce" those of a schema's strings (default), or "ignore" them.
        lenient: enforce what can be of the schema, check the rest afterwards and name it in
            `get_meta_info(name)["warnings"]`; default: a schema that cannot be enforced fails.
        jump_forward: False: compute tokens one by one also where only one can follow.
        lora_path: the name of a LoRA adapter that the engine serves; "": none, also where the run
            has one.
        prediction: the text that you expect, such as a file before an edit. Where the output is
            the same it comes sooner; the output never depends on it.
        beam: 1 to 64; beam search with so many hypotheses in place of drawing tokens: the value is
            the likeliest output found, with `n` a list of the n likeliest, see docs/use/beam.md.
        length_penalty: with `beam`: outputs are ranked by their log probability divided by their
            number of tokens to this power (default 1).
        early_stopping: with `beam`: True ends the search with `beam` outputs, False (default) once
            no better one is likely, "never" once none is possible.
        kv_policy: `st.snapkv(0.25)` or another one: the KV of the prompt of which only a part is
            kept, see docs/use/kv-policies.md; the output then differs from that with all of it.
        type: the output is text that stands for a value of this type, which `state[name]` is: a
            pydantic model, dataclass, TypedDict, `list[int]`, Literal, Enum, int, ...;
            `state.text(name)` is the text. Reading one that was cut off raises ProgramError of kind
            "InvalidOutput".
        validate: called with the value; it will not do where that raises ValueError or returns
            False. With it, or with `retries`, appending waits for the value (in an async function
            `await s.aappend(...)`). After the last one ProgramError of kind "InvalidOutput" is
            raised, and the branch goes on as if the gen had not been appended.
        retries: >= 0; so often a value that will not do is generated again, with other draws; at
            temperature 0 with one of 0.7.
        ahead: from the output's text to the calls of tools that the program makes if that is what
            it says, as `functools.partial(tool, ...)`: one, a list, or None. Called, on another
            thread, with outputs that are likely but not yet there, so that tools of
            `st.tool(pure=True)` begin early; a true call with the same arguments takes the value.
            The output never depends on it.
    """
    typed = _typed(type, dtype)
    given = {"regex": regex, "json_schema": json_schema, "ebnf": ebnf, "choices": choices}
    if typed is not None:
        for field in typed.constraint:
            if given.get(field) is not None:
                raise InvalidProgram.of(field, given[field], f"not together with type={type!r}")
        given = {**given, **typed.constraint}
    constraint = _constraint(
        **given,
        structural_tag=structural_tag,
        whitespace=whitespace,
        property_order=property_order,
        formats=formats,
        lenient=lenient,
    )
    wanted = _logprobs(logprobs, return_logprob, top_logprobs_num, logprob_start_len, logprob_start)
    if choices is not None:
        useless = {
            "n": n, "logprobs": wanted[0], "priority": priority, "deadline": deadline,
            "prediction": prediction, "beam": beam, "type": type, "validate": validate,
            "kv_policy": kv_policy, "ahead": ahead,
        }  # fmt: skip
        return _select_of_gen(name, choices, temperature, choices_method, lora_path, useless)
    if choices_method is not None:
        raise InvalidProgram.of("choices_method", choices_method, "only together with choices")
    params = GenParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k == -1 else top_k,  # -1: SGLang's way to say "all"
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias_of(logit_bias),
        min_tokens=min_tokens,
        n=n,
        seed=seed,
        stop=texts_of(stop),
        stop_token_ids=None
        if stop_token_ids is None
        else token_ids_of("stop_token_ids", stop_token_ids),
        stop_regex=_regexes(stop_regex),
        ignore_eos=ignore_eos,
        logprobs=wanted[0],
        logprob_start=wanted[1],
        priority=priority,
        deadline_s=deadline,
        constraint=constraint,
        jump_forward=jump_forward,
        lora_path=checked_lora_path(lora_path),
        prediction=_checked_prediction(prediction),
        beam=beam,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        kv_policy=_checked_policy(kv_policy),
        foretell=None if ahead is None else True,
    )
    read = None if typed is None else typed.read
    watched = None if ahead is None else _read_calls(ahead, n)
    return GenExpr(_checked_name(name), params, read, _check(validate, retries), watched)


def _read_calls(ahead: Ahead, n: int | None) -> ReadCalls:
    """Raises InvalidProgram."""
    if not callable(ahead):
        raise InvalidProgram.of("ahead", ahead, "a function of the output's text")
    if n is not None and n != 1:
        raise InvalidProgram.of("ahead", ahead, "only with n=1")
    return read_calls(ahead)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Any,
) -> Expr:
    """`gen(..., dtype=int)`."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=int, **options)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Any,
) -> Expr:
    """`gen(..., dtype=str)`."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    temperature: float | None = 0.0,
    choices_method: ChoicesMethod | Callable[..., Any] | None = "token_length_normalized",
    lora_path: str | None = None,
) -> Expr:
    """Append the likeliest of `choices` and call it `name`.

    `choices_method` is "token_length_normalized" (highest mean log probability a token),
    "greedy_token_selection" (token by token, the likeliest among the choices still possible) or
    "unconditional_likelihood_normalized" (log probability with this context less that without), or
    an object that is called with the log probabilities of all and decides itself, see
    `ChoicesSamplingMethod`; appending it waits (in an async function `await s.aappend(...)`).
    Nothing is drawn, so `temperature` can only be 0, as in SGLang. `lora_path`: see `gen`.
    """
    if isinstance(choices, str):
        raise InvalidProgram.of("choices", choices, "a list of texts")
    texts = tuple(choices)
    if not texts or len(texts) > MAX_CHOICES or not all(isinstance(c, str) and c for c in texts):
        raise InvalidProgram.of("choices", choices, f"1 to {MAX_CHOICES} non-empty strings")
    if temperature is not None and not _GREEDY.holds(plain(temperature)):
        raise InvalidProgram.of("temperature", temperature, "0: the likeliest choice is taken")
    method = CHOICES_METHODS[0] if choices_method is None else choices_method
    decide = method if callable(method) and not iscoroutinefunction(method) else None
    if decide is None and method not in CHOICES_METHODS:
        allowed = f"one of {CHOICES_METHODS}, or a plain callable"
        raise InvalidProgram.of("choices_method", choices_method, allowed)
    by_name = CHOICES_METHODS[0] if decide is not None else str(method)
    adapter = checked_lora_path(lora_path)
    return SelectExpr(_checked_name(name), texts, by_name, adapter, decide)


def _select_of_gen(
    name: str | None,
    choices: Sequence[str],
    temperature: float | None,
    method: ChoicesMethod | Callable[..., Any] | None,
    lora_path: str | None,
    useless: Mapping[str, object],
) -> Expr:
    for field, value in useless.items():
        if value is not None and not (field == "n" and value == 1):
            raise InvalidProgram.of(field, value, "not together with choices")
    return select(name, choices, temperature, method, lora_path)


def _checked_policy(policy: object) -> KVPolicy | None:
    if policy is None or isinstance(policy, KVPolicy):
        return policy
    raise InvalidProgram.of("kv_policy", policy, "a policy such as st.snapkv(0.25), or None")


def checked_lora_path(name: object) -> str | None:
    """An adapter's name, "" or None. Raises InvalidProgram."""
    if name is None or (isinstance(name, str) and len(name) <= MAX_OP_NAME_CHARS):
        return name
    allowed = f"an adapter's name of at most {MAX_OP_NAME_CHARS} characters, or None"
    raise InvalidProgram.of("lora_path", name, allowed)


def _checked_prediction(given: object) -> str | None:
    if given is None or isinstance(given, str):
        return given
    allowed = "a text, or None; of what the program has generated, s[name] is the text"
    raise InvalidProgram.of("prediction", repr(given), allowed)


def _regexes(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    patterns = texts_of(given, "stop_regex")
    for pattern in patterns or ():
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_REGEX_CHARS:
            allowed = f"patterns of 1 to {MAX_REGEX_CHARS} characters"
            raise InvalidProgram.of("stop_regex", pattern, allowed)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidProgram.of("stop_regex", pattern, f"a pattern of `re`: {error}") from error
    return patterns


def _logprobs(
    logprobs: int | None,
    is_wanted: bool | None,
    num_top: int | None,
    start_len: int | None,
    start: int | None,
) -> tuple[int | None, int | None]:
    """GenParams' (logprobs, logprob_start) of our options and SGLang's."""
    if logprobs is not None and (is_wanted is False or num_top not in (None, logprobs)):
        raise InvalidProgram.of("logprobs", logprobs, "not together with other words for it")
    if is_wanted is False:
        return None, None
    if start is None and start_len != -1:
        start = start_len
    num = logprobs if logprobs is not None else num_top
    if num is None and (is_wanted or start is not None):
        num = 0
    return num, start


def _typed(kind: Any, dtype: type | str | None) -> TypedOutput | None:
    """Of `type=` or `dtype=`."""
    if kind is not None and dtype is not None:
        raise InvalidProgram.of("dtype", dtype, "not together with type")
    if kind is not None:
        from .typed import typed_output  # pydantic takes 0.1 s

        return typed_output(kind)
    if dtype is None:
        return None
    scalar = SCALARS_BY_NAME.get(dtype) if isinstance(dtype, str) else dtype
    return scalar_output(dtype if scalar is None else scalar)


def _check(validate: Callable[[Any], Any] | None, retries: int) -> Check | None:
    if validate is not None and (not callable(validate) or iscoroutinefunction(validate)):
        raise InvalidProgram.of("validate", validate, "a plain function of the value")
    most = _RETRIES.checked("retries", retries)
    return Check(validate, most) if most or validate is not None else None


def _constraint(**given: Any) -> Constraint | None:
    for value in given.values():
        if value is not None:
            return constraint_of(**given)
    return None


def _checked_name(name: str | None) -> str:
    if name is None:
        return ""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_OP_NAME_CHARS:
        allowed = f"a string of 1 to {MAX_OP_NAME_CHARS} characters, or None"
        raise InvalidProgram.of("name", name, allowed)
    return name
