"""What can be appended to a program's state: text, token ids, roles, and the sums of expressions.

Expressions are inert values; `ProgramState.__iadd__` turns them into ops. What calls the model is
in `generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from ...errors import InvalidProgram
from ..client.early_calls import ReadCalls
from ..protocol.ir import MAX_FIELDS_CHARS, GenParams
from ..protocol.json_text import json_text
from ..protocol.numbers import token_ids_of

ROLES = ("system", "user", "assistant")


class Expr:
    """Base of all expressions; they add up with each other and with strings. None has a text: what
    an f-string would write into a prompt is its repr, so it refuses."""

    __slots__ = ()

    def __str__(self) -> str:
        raise InvalidProgram(
            "an expression such as gen(...) or s.var(...) cannot be put into a string (an "
            'f-string, str(), "%s", print): its text may not be there yet. Append it, as in '
            's += "You said: " + s.var("a"), or use the value, as in "You said: " + s["a"]; '
            "repr() shows what it is"
        )

    def __format__(self, spec: str) -> str:
        return str(self)

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
class BackgroundExpr(Expr):
    """What may be dropped where KV is compressed."""

    item: Expr


@dataclass(frozen=True, slots=True)
class TokensExpr(Expr):
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """When a value will do: `accepts` returns, and does not raise ValueError or return False; else
    it is generated again, `retries` times."""

    accepts: Callable[[Any], Any] | None
    retries: int


@dataclass(frozen=True, slots=True)
class GenExpr(Expr):
    """A generation; an empty name keeps the value unnamed. `read`: its text as the value."""

    name: str
    params: GenParams
    read: Callable[[str], Any] | None = None
    check: Check | None = None
    ahead: ReadCalls | None = None  # the calls that follow if this is its text


@dataclass(frozen=True, slots=True)
class SelectExpr(Expr):
    """A choice among texts; an empty name keeps the value unnamed. `decide`: who chooses in place
    of `method`, see `choices_method`."""

    name: str
    choices: tuple[str, ...]
    method: str
    lora_path: str | None = None
    decide: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class RoleBeginExpr(Expr):
    """Opens a chat message; `fields`: see `ir.RoleBegin`."""

    role: str
    fields: str | None = None


@dataclass(frozen=True, slots=True)
class RoleEndExpr(Expr):
    """Closes a chat message; `fields`: see `ir.RoleEnd`."""

    role: str
    fields: str | None = None


@dataclass(frozen=True, slots=True)
class ToolsExpr(Expr):
    """Tells the chat template of tools, as JSON."""

    tools: str


@dataclass(frozen=True, slots=True)
class VarExpr(Expr):
    """The value of an op of the same program, resolved by the runtime."""

    program: object
    branch: int
    seq: int
    owner: object  # the state it was taken from: while this lives, the branch is not dropped


@dataclass(frozen=True, slots=True)
class ImageExpr(Expr):
    """An image of a prompt, by path, URL or data."""

    source: Any


def text(text: Appendable, kv: Literal["background"] | None = None) -> Expr:
    """A text, or an expression, as it is. With `kv="background"` tokens of it may be dropped where
    KV is compressed (`gen(kv_policy=...)`, `s.compress`), and then only of what is background: so
    retrieved documents shrink, and instructions and tool schemas stay whole."""
    if kv not in (None, "background"):
        raise InvalidProgram.of("kv", kv, '"background" or None')
    item = Sum(_parts(text))
    return item if kv is None else BackgroundExpr(item)


def tokens(token_ids: Sequence[int]) -> Expr:
    """Append token ids as they are, without BOS; for programs that tokenize by themselves."""
    ids = token_ids_of("token_ids", token_ids)
    if not ids:
        raise InvalidProgram.of("token_ids", token_ids, "at least one integer >= 0")
    return TokensExpr(ids)


def image(source: Any) -> Expr:
    """An image within a message: a path, an http(s) or data URL, bytes, an open file, or an image
    of Pillow's. Models behind `st.OpenAI` read it; where the model reads only text it is refused
    where it is appended."""
    return ImageExpr(source)


def video(path: str, num_frames: int) -> NoReturn:
    """Refused: no model of Stemma's reads videos. Raises InvalidProgram."""
    raise InvalidProgram("video: no model here reads videos; describe it in text", "video")


def separate_reasoning(expr: Appendable = None, model_type: str | None = None) -> NoReturn:
    """Refused: SGLang's way takes text back that was appended already. Raises InvalidProgram.

    Generate the reasoning under a name of its own instead: `gen("thought", stop="</think>")`.
    """
    raise InvalidProgram(
        "separate_reasoning: text that was appended cannot be taken back; give the reasoning a "
        'name of its own, as in gen("thought", stop="</think>") + "</think>" + gen("answer")',
        "separate_reasoning",
    )


def role(name: str, content: Appendable = None, /, **fields: Any) -> Sum:
    """A whole chat message of role `name`; `fields`: what else the chat template or the endpoint
    sees of it, as in `role("tool", "22 C", tool_call_id="call_1")`. Raises InvalidProgram."""
    text = _fields_text(fields) if fields else None
    return Sum((RoleBeginExpr(name, text), *_parts(content), RoleEndExpr(name)))


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


def _fields_text(fields: dict[str, Any]) -> str:
    allowed = f"JSON values besides role and content, at most {MAX_FIELDS_CHARS} characters of it"
    try:
        text = json_text(fields, MAX_FIELDS_CHARS)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidProgram.of("fields", fields, allowed) from error
    if text is None or not {"role", "content"}.isdisjoint(fields):
        raise InvalidProgram.of("fields", sorted(fields), allowed)
    return text


def _parts(value: Appendable) -> tuple[Expr | str, ...]:
    if value is None:
        return ()
    if isinstance(value, Sum):
        return value.items
    if isinstance(value, Expr | str):
        return (value,)
    raise InvalidProgram.of("expression", value, "a string or an expression such as gen(...)")
