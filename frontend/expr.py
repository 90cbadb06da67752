"""What can be appended to a program's state: text, generations, choices, roles and their sums.

Expressions are inert values; `ProgramState.__iadd__` turns them into ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import InvalidProgram
from .constraint import Formats, PropertyOrder, Whitespace, constraint_of
from .ir import (
    CHOICES_METHODS,
    MAX_CHOICES,
    MAX_NAME_CHARS,
    ChoicesMethod,
    GenParams,
    logit_bias_pairs,
)

ROLES = ("system", "user", "assistant")


class Expr:
    """Base of all expressions; they add up with each other and with strings."""

    __slots__ = ()

    def __add__(self, other: Expr | str | None) -> Sum:
        return Sum((*_parts(self), *_parts(other)))

    def __radd__(self, other: Expr | str | None) -> Sum:
        return Sum((*_parts(other), *_parts(self)))


Appendable: TypeAlias = Expr | str | None


@dataclass(frozen=True, slots=True)
class Sum(Expr):
    """Several expressions, one after the other."""

    items: tuple[Expr | str, ...]


@dataclass(frozen=True, slots=True)
class TokensExpr(Expr):
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenExpr(Expr):
    """A generation; `name` None keeps the value unnamed."""

    name: str | None
    params: GenParams


@dataclass(frozen=True, slots=True)
class SelectExpr(Expr):
    """A choice among texts."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class RoleBeginExpr(Expr):
    """Opens a chat message."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEndExpr(Expr):
    """Closes a chat message."""

    role: str


@dataclass(frozen=True, slots=True)
class VarExpr(Expr):
    """The value of an op of the same program, resolved by the runtime."""

    program: object
    branch: int
    seq: int


def tokens(token_ids: Sequence[int]) -> Expr:
    """Append token ids as they are, without BOS; for programs that tokenize by themselves."""
    ids = tuple(token_ids)
    if not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise InvalidProgram.of("token_ids", token_ids, "at least one integer >= 0")
    return TokensExpr(ids)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    priority: int | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: object = None,
    ebnf: str | None = None,
    dtype: type | None = None,
    structural_tag: object = None,
    whitespace: Whitespace | None = None,
    property_order: PropertyOrder | None = None,
    formats: Formats | None = None,
    lenient: bool | None = None,
    jump_forward: bool | None = None,
) -> Expr:
    """Generate text and call it `name`.

    Args:
        name: `state[name]` is the generated text; None: unnamed.
        max_tokens: at most this many tokens, >= 1 (default 128).
        temperature: >= 0, 0 is greedy (default: the model's, else 1).
        top_p: in (0, 1]; draw from the smallest set of tokens with this probability.
        top_k: >= 1; draw from the k likeliest tokens.
        min_p: in [0, 1]; draw from tokens with this share of the likeliest one's probability.
        frequency_penalty: in [-2, 2]; off a token's logit for each time that it was generated.
        presence_penalty: in [-2, 2]; off the logit of a token that was generated.
        repetition_penalty: in (0, 10]; divides (where negative, multiplies) the logit of a token
            that the prompt or the output has.
        logit_bias: [-100, 100] by token id, added to the logits; at most 1,024.
        min_tokens: no end-of-sequence or stop token before so many, and no stop string in them.
        n: so many samples of one prompt, 1 to 64, each with draws of its own; with n > 1
            `state[name]` is a list, and the program goes on with its first item.
        stop: end before the first of these strings; they are not part of the output.
        stop_token_ids: end before the first of these tokens.
        ignore_eos: go on past the model's end-of-sequence token.
        seed: makes this op's draws reproducible whatever the program's seed is.
        logprobs: n >= 0: `get_meta_info(name)["logprobs"]` has the log probability of each token
            and of the n likeliest at its place.
        priority: in [-1000, 1000], default 0; where the engine schedules by priority, the highest
            runs first.
        choices: the same as `select(name, choices)`.
        choices_method: see `select`.
        regex: the whole output matches it.
        json_schema: the output is JSON of this schema: a dict, JSON text, or a pydantic model
            class, whose objects take no further properties unless it says `extra="allow"`.
        ebnf: the output is in the language of this grammar, in Lark's or GBNF's syntax.
        dtype: int, float, bool ("True" or "False") or str (in double quotes); the value is text.
        structural_tag: free text with tags that hold JSON, see docs/constrained-decoding.md.
        whitespace: between JSON's tokens, "compact" (none, the default) or "flexible".
        property_order: of JSON objects, that of the "schema" (default) or "any".
        formats: "enforce" those of a schema's strings (default), or "ignore" them.
        lenient: enforce what can be of the schema, check the rest afterwards and name it in
            `get_meta_info(name)["warnings"]`; default: a schema that cannot be enforced fails.
        jump_forward: False: compute tokens one by one also where only one can follow.
    """
    constraint = constraint_of(
        regex=regex,
        json_schema=json_schema,
        ebnf=ebnf,
        choices=choices,
        dtype=dtype,
        structural_tag=structural_tag,
        whitespace=whitespace,
        property_order=property_order,
        formats=formats,
        lenient=lenient,
    )
    if choices is not None:
        return select(name, choices, choices_method or CHOICES_METHODS[0])  # type: ignore[arg-type]
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
        logit_bias=None if logit_bias is None else logit_bias_pairs(logit_bias),
        min_tokens=min_tokens,
        n=n,
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else None if stop is None else tuple(stop),
        stop_token_ids=None if stop_token_ids is None else tuple(stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        priority=priority,
        constraint=constraint,
        jump_forward=jump_forward,
    )
    return GenExpr(_checked_name(name), params)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expr:
    """`gen(..., dtype=int)`."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expr:
    """`gen(..., dtype=str)`."""
    return gen(name, max_tokens, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    choices_method: ChoicesMethod = "token_length_normalized",
) -> Expr:
    """Append the likeliest of `choices` and call it `name`.

    `choices_method` is "token_length_normalized" (highest mean log probability a token),
    "greedy_token_selection" (token by token, the likeliest among the choices still possible) or
    "unconditional_likelihood_normalized" (log probability with this context less that without).
    """
    texts = tuple(choices)
    if not texts or len(texts) > MAX_CHOICES or not all(isinstance(c, str) and c for c in texts):
        raise InvalidProgram.of("choices", choices, f"1 to {MAX_CHOICES} non-empty strings")
    if choices_method not in CHOICES_METHODS:
        raise InvalidProgram.of("choices_method", choices_method, f"one of {CHOICES_METHODS}")
    return SelectExpr(_checked_name(name), texts, choices_method)


def role(name: str, content: Appendable = None) -> Sum:
    """A whole chat message of role `name`."""
    return Sum((RoleBeginExpr(name), *_parts(content), RoleEndExpr(name)))


def system(content: Appendable = None) -> Sum:
    """A system message."""
    return role("system", content)


def user(content: Appendable = None) -> Sum:
    """A user's message."""
    return role("user", content)


def assistant(content: Appendable = None) -> Sum:
    """An assistant's message, usually `assistant(gen("answer"))`."""
    return role("assistant", content)


def system_begin() -> Expr:
    """Open a system message."""
    return RoleBeginExpr("system")


def system_end() -> Expr:
    """Close the open system message."""
    return RoleEndExpr("system")


def user_begin() -> Expr:
    """Open a user's message."""
    return RoleBeginExpr("user")


def user_end() -> Expr:
    """Close the open user's message."""
    return RoleEndExpr("user")


def assistant_begin() -> Expr:
    """Open an assistant's message."""
    return RoleBeginExpr("assistant")


def assistant_end() -> Expr:
    """Close the open assistant's message."""
    return RoleEndExpr("assistant")


def _parts(value: Appendable) -> tuple[Expr | str, ...]:
    if value is None:
        return ()
    if isinstance(value, Sum):
        return value.items
    if isinstance(value, Expr | str):
        return (value,)
    raise InvalidProgram.of("expression", value, "a string or an expression such as gen(...)")


def _checked_name(name: str | None) -> str | None:
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS):
        allowed = f"a string of 1 to {MAX_NAME_CHARS} characters, or None"
        raise InvalidProgram.of("name", name, allowed)
    return name
