"""The program IR: a program is a tree of branches, a branch is an append-only log of ops.

An op carries its branch, its sequence number on that branch and the source line that made it. The
IR knows nothing of models or KV; it is what the DSL writes and what travels to the runtime. On the
wire an op is a list: `[kind, branch, seq, source, *fields]`.

    branch 0:  Text  RoleBegin  Text  Fork(1, 2) ......... Join(1, 2)  Gen
    branch 1:                         Text  Gen  End ------^
    branch 2:                         Text  Gen  End ------^

Three ops say what a program knows of its KV and change no text: `Pause` (it works elsewhere now),
`Hint` (an action on the KV of what the branch has so far) and `Drop` (nobody reads this branch).
`Compress` and `Background` say which KV may be dropped, and change what is said behind it. A branch
stops at an op that fails, until `Resume`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, get_args

from ...errors import InvalidProgram
from .chat_message import Message
from .constraint import Constraint
from .kv_policy import WHOLE, KVPolicy
from .numbers import FLAGS, RANGES, finite

ChoicesMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
JoinMode = Literal["gather_variable", "concate_and_append"]
HintAction = Literal["pin", "retain", "demote", "prefetch", "share"]
Tier = Literal["device", "host", "disk"]
Pooling = Literal["last", "mean", "cls", "max", "mean_sqrt", "weighted_mean"]

CHOICES_METHODS: tuple[str, ...] = get_args(ChoicesMethod)
JOIN_MODES: tuple[str, ...] = get_args(JoinMode)
HINT_ACTIONS: tuple[str, ...] = get_args(HintAction)
TIERS: tuple[str, ...] = get_args(Tier)
POOLINGS: tuple[str, ...] = get_args(Pooling)
MAX_CHOICES = 1024
MAX_OP_NAME_CHARS = 1024
MAX_SOURCE_CHARS = 4096
MAX_FIELDS_CHARS = 1024 * 1024
MAX_TOOLS_CHARS = 512 * 1024  # of JSON given to a template; guess
MAX_PARTS = 65_536  # of one message
MAX_MESSAGES = 8192  # of a chat; the context mostly allows fewer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn and where an output ends; `None` means the model's or the runtime's
    default. The runtime's `SamplingParams` has the same fields, checked."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None  # (token id, bias)
    min_tokens: int | None = None
    stop_regex: tuple[str, ...] | None = None  # end before the first match of one of them

    def sampling(self) -> dict[str, Any]:
        """The fields of `Sampling` that are not None."""
        return _given(SAMPLING_FIELDS, _SAMPLING_VALUES(self))


@dataclass(frozen=True, slots=True)
class GenParams(Sampling):
    """All that a `gen` asks for: how it is sampled, and the rest. With `n` > 1 the value is a list,
    and the branch goes on with its first item. With `beam` nothing is drawn: `n` are the best."""

    n: int | None = None  # samples
    priority: int | None = None
    constraint: Constraint | None = None  # what the output must be
    jump_forward: bool | None = None  # False: sample what is forced anyhow, token by token
    deadline_s: float | None = None  # seconds from now; an error where it cannot be met
    logprob_start: int | None = None  # with logprobs: also those of the prompt's tokens from here
    lora_path: str | None = None  # name of an adapter; "": none, whatever the program has
    prediction: str | None = None  # the text that the author expects; it never changes the output
    beam: int | None = None  # search for the likeliest output, with so many hypotheses at a time
    length_penalty: float | None = None  # with beam: a score is logprob / length ** this
    early_stopping: bool | str | None = None  # with beam: True, False or "never"
    kv_policy: KVPolicy | None = None  # which of the prompt's KV is kept; None: all
    foretell: bool | None = None  # True: tell the client what the output probably will be
    _wire: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Scalars of numpy and torch become numbers. Raises InvalidProgram as `finite` does."""
        for name, given in zip(_NUMBERS, _NUMBER_VALUES(self)):
            if given is not None and type(given) is not int:
                number = finite(name, given)
                if number is not given:
                    object.__setattr__(self, name, number)

    def with_defaults(self, defaults: GenParams) -> GenParams:
        """This, with what it leaves open taken from `defaults`."""
        return self if defaults == NOTHING_GIVEN else replace(defaults, **self.given())

    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return _given(_GEN_FIELDS, _GEN_VALUES(self))

    def to_wire(self) -> dict[str, Any]:
        """Only what was given. Made once, as many programs send the same params; not to change."""
        if self._wire is None:
            given = self.given()
            if self.constraint is not None:
                given["constraint"] = asdict(self.constraint)
            if self.kv_policy is not None:
                given["kv_policy"] = self.kv_policy.to_wire()
            object.__setattr__(self, "_wire", given)
            return given
        return self._wire

    @classmethod
    def from_wire(cls, given: object) -> GenParams:
        """Raises InvalidProgram on a name that is not a field."""
        if not isinstance(given, dict):
            raise InvalidProgram.of("gen params", given, "an object")
        unknown = sorted(set(given).difference(_GEN_FIELDS))
        if unknown:
            raise InvalidProgram.of(unknown[0], given[unknown[0]], f"one of {sorted(_GEN_FIELDS)}")
        values = {name: _frozen(value) for name, value in given.items()}
        if "constraint" in values:
            values["constraint"] = Constraint.from_wire(values["constraint"])
        if "kv_policy" in values:
            values["kv_policy"] = KVPolicy.from_wire(values["kv_policy"])
        if "prediction" in values:
            _checked_str("prediction", values["prediction"])
        for name, value in values.items():
            if value is None:  # JSON's for a number that is none
                raise InvalidProgram.of(name, value, "a finite number, or left out")
        return cls(**values)


def _given(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return {name: value for name, value in zip(names, values) if value is not None}


def texts_of(given: str | Sequence[str] | None, field: str = "stop") -> tuple[str, ...] | None:
    """One text or several, as GenParams has them. Raises InvalidProgram."""
    if given is None:
        return None
    try:
        return (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        raise InvalidProgram.of(field, given, "a text or a list of texts") from None


def logit_bias_of(bias: Mapping[Any, float] | None) -> tuple[tuple[int, float], ...] | None:
    """A bias by token id as GenParams has it; ids may be strings of digits, as in OpenAI's JSON.

    Raises InvalidProgram for a key that is no token id, and for a bias that is nan or infinite.
    """
    if bias is None:
        return None
    try:
        pairs = [(int(token_id), value) for token_id, value in bias.items()]
    except (AttributeError, TypeError, ValueError):
        raise InvalidProgram.of("logit_bias", bias, "a bias for each token id") from None
    return tuple((token_id, finite("logit_bias", value)) for token_id, value in pairs)


def _frozen(value: Any) -> Any:
    """JSON's lists, and lists within these, as tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


SAMPLING_FIELDS = tuple(f.name for f in fields(Sampling))
_SAMPLING_VALUES = attrgetter(*SAMPLING_FIELDS)
_GEN_FIELDS = tuple(f.name for f in fields(GenParams) if f.init)
_GEN_VALUES = attrgetter(*_GEN_FIELDS)
_NUMBERS = (*FLAGS, *(name for name in _GEN_FIELDS if name in RANGES))
_NUMBERS = tuple(name for name in _NUMBERS if name != "logit_bias")  # pairs
_NUMBER_VALUES = attrgetter(*_NUMBERS)
NOTHING_GIVEN = GenParams()


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all ops: the `seq`-th op of `branch`, written at `source` ("file:line")."""

    kind: ClassVar[str] = ""

    branch: int
    seq: int
    source: str | None

    def to_wire(self) -> list[object]:
        """`[kind, branch, seq, source, *fields]`, ready for JSON."""
        return [self.kind, *_VALUES_OF[self.kind](self)]


@dataclass(frozen=True, slots=True)
class Text(Op):
    """Append literal text."""

    kind: ClassVar[str] = "text"
    text: str = ""


@dataclass(frozen=True, slots=True)
class Tokens(Op):
    """Append token ids as they are, without BOS; for clients that tokenize themselves."""

    kind: ClassVar[str] = "tokens"
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chat(Op):
    """Begin the branch with a whole chat as the chat template writes it, and with the generation
    prompt behind it. A last message of the assistant's that says something is left open instead.
    Turns that this runtime has generated, and that come back in it, keep their token ids."""

    kind: ClassVar[str] = "chat"
    messages: tuple[Message, ...] = ()

    @property
    def num_chars(self) -> int:
        """Of contents and fields; images are not counted."""
        return sum(len(m.content) + len(m.fields or "") for m in self.messages)

    def to_wire(self) -> list[object]:
        written = [message_to_wire(message) for message in self.messages]
        return [self.kind, self.branch, self.seq, self.source, written]


def message_to_wire(message: Message, slot: int | None = None) -> list[object]:
    """`[role, content, fields?, parts?, images?]`; `slot`: in place of the content."""
    items: list[object] = [message.role, message.content if slot is None else slot]
    if message.fields is not None or message.parts or message.images:
        items.append(message.fields)
    if message.parts or message.images:
        items.append(message.parts)
    return [*items, message.images] if message.images else items


@dataclass(frozen=True, slots=True)
class Gen(Op):
    """Generate, append what was generated and call it `name`."""

    kind: ClassVar[str] = "gen"
    name: str = ""
    params: GenParams = field(default_factory=GenParams)

    def to_wire(self) -> list[object]:
        return [self.kind, self.branch, self.seq, self.source, self.name, self.params.to_wire()]


@dataclass(frozen=True, slots=True)
class Select(Op):
    """Append the likeliest of `choices` under `method` and call it `name`. With `choice_ids` the
    choices are token ids, and no texts are given."""

    kind: ClassVar[str] = "select"
    name: str = ""
    choices: tuple[str, ...] = ()
    method: str = CHOICES_METHODS[0]
    choice_ids: tuple[tuple[int, ...], ...] = ()
    lora_path: str | None = None  # as in GenParams

    def to_wire(self) -> list[object]:
        head = [self.kind, self.branch, self.seq, self.source, self.name]
        if self.lora_path is not None:
            texts, ids = self.choices or None, self.choice_ids or None
            return [*head, texts, self.method, ids, self.lora_path]
        if self.choice_ids:
            return [*head, self.choices or None, self.method, self.choice_ids]
        return [*head, self.choices, self.method]


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Make an embedding of all that the branch has so far and call it `name`; appends nothing. The
    value is a list of floats, as long as the model's hidden states are wide: the last token's final
    one or the mean of all, with `normalize` scaled to length 1. An encoder has other poolings too;
    a model that classifies texts gives its labels' logits, with `has_scores`.

    `is_text`: the marks that the model has behind a text follow. `pair`: a second text, to be seen
    together with the first. `cut_to`: a longer text is cut to so many tokens; without, it is an
    error."""

    kind: ClassVar[str] = "embed"
    name: str = ""
    pooling: str = POOLINGS[0]
    normalize: bool = True
    is_text: bool = False
    pair: str | None = None
    cut_to: int | None = None
    has_scores: bool = False


@dataclass(frozen=True, slots=True)
class RoleBegin(Op):
    """Open a chat message of `role`; the chat template says what that appends.

    `fields`: JSON text of an object whose items the template sees beside role and content, such as
    `tool_calls` and `tool_call_id`. With `"content": null` in it an assistant's message has no
    content, and no text follows in it.
    """

    kind: ClassVar[str] = "role_begin"
    role: str = ""
    fields: str | None = None

    def to_wire(self) -> list[object]:
        extra = () if self.fields is None else (self.fields,)
        return [self.kind, self.branch, self.seq, self.source, self.role, *extra]


@dataclass(frozen=True, slots=True)
class RoleEnd(Op):
    """Close the open chat message.

    `fields`: of an assistant's message, JSON text of what it was read as: `content` and
    `tool_calls`. The template then sees these; its tokens stay as they were generated.
    """

    kind: ClassVar[str] = "role_end"
    fields: str | None = None

    def to_wire(self) -> list[object]:
        extra = () if self.fields is None else (self.fields,)
        return [self.kind, self.branch, self.seq, self.source, *extra]


@dataclass(frozen=True, slots=True)
class Tools(Op):
    """Tell the chat template of these tools, from the first message on: JSON text of a list, each
    as in OpenAI's API. They replace those that it was told of before."""

    kind: ClassVar[str] = "tools"
    tools: str = "[]"


@dataclass(frozen=True, slots=True)
class Image(Op):
    """An image, within a message or outside of any, by URL: `data:` for engines whose model reads
    images, also `https:` for endpoints over HTTP that read them."""

    kind: ClassVar[str] = "image"
    url: str = ""


@dataclass(frozen=True, slots=True)
class Fork(Op):
    """Start `children`, each from this branch's state here."""

    kind: ClassVar[str] = "fork"
    children: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Join(Op):
    """Wait for the `End` of each child; fails if one failed. `concate_and_append` also appends what
    each child appended since its fork, in order.

    With `num_needed` the first that many to end well are enough: the others stop at once, and it
    fails only when too few are left. The value is the list of the indices that counted, ascending;
    only those are appended.
    """

    kind: ClassVar[str] = "join"
    children: tuple[int, ...] = ()
    mode: str = JOIN_MODES[0]
    num_needed: int | None = None


@dataclass(frozen=True, slots=True)
class Var(Op):
    """Append the value of the op `(of_branch, of_seq)`: the one symbolic value."""

    kind: ClassVar[str] = "var"
    of_branch: int = 0
    of_seq: int = 0


@dataclass(frozen=True, slots=True)
class Pause(Op):
    """The branch now works outside (a tool call); the next op that appends something ends that.
    `expected_s`: how long it is expected to take, None where that is not known."""

    kind: ClassVar[str] = "pause"
    expected_s: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Hint(Op):
    """One action on the KV of all that the branch has so far; the value is its outcome:
    {"action_id", "outcome", "reason", "num_tokens"}. It never fails the branch."""

    kind: ClassVar[str] = "hint"
    action: str = HINT_ACTIONS[0]
    ttl_ms: int | None = None  # pin, retain
    priority: int | None = None  # retain: in [0, 100], higher is kept longer
    tier: str | None = None  # demote: to it; prefetch: to it


@dataclass(frozen=True, slots=True)
class Compress(Op):
    """From here on keep of the KV of all that the branch has so far, but for the last token, what
    the policy chooses. What has been compressed before is chosen from again."""

    kind: ClassVar[str] = "compress"
    policy: KVPolicy = WHOLE

    def to_wire(self) -> list[object]:
        return [self.kind, self.branch, self.seq, self.source, self.policy.to_wire()]


@dataclass(frozen=True, slots=True)
class Background(Op):
    """What follows, up to the next of these that does not begin any, is background: where KV is
    compressed, tokens are dropped of background alone, if the branch has any."""

    kind: ClassVar[str] = "background"
    begins: bool = True


@dataclass(frozen=True, slots=True)
class Drop(Op):
    """Nobody will read this branch: the last op of its log, but it acts on arrival. The branch
    stops at once, unless others still wait for what it makes."""

    kind: ClassVar[str] = "drop"


@dataclass(frozen=True, slots=True)
class Resume(Op):
    """The client knows of this branch's failure and goes on from just before the op that failed;
    that op and those between it and this one count as never appended. With `drops_message` the
    message that is open there is undone, too."""

    kind: ClassVar[str] = "resume"
    drops_message: bool = False


@dataclass(frozen=True, slots=True)
class End(Op):
    """No op follows on this branch."""

    kind: ClassVar[str] = "end"


CALL_OPS = (Gen, Select, Embed)  # what is asked of the model
# What changes no output. Draws depend on an op's place among the others only (`Places`).
SILENT_OPS = (Pause, Hint, Drop, Resume)


class Places:
    """The places of one branch's ops, counted without those that change nothing: with or without
    hints a program draws the same."""

    __slots__ = ("_num_silent", "_shifts")

    def __init__(self) -> None:
        self._num_silent = 0
        self._shifts: dict[int, int] = {}  # by seq, of ops behind a silent one that have a place

    def note(self, op: Op) -> None:
        """The next op of the branch."""
        if isinstance(op, SILENT_OPS):
            self._num_silent += 1
        elif self._num_silent and isinstance(op, Gen | Fork):
            self._shifts[op.seq] = self._num_silent

    def of(self, op: Gen | Fork) -> int:
        """Where it stands."""
        return op.seq - self._shifts.get(op.seq, 0)


_KINDS: tuple[type[Op], ...] = (
    Text, Tokens, Chat, Gen, Select, Embed, RoleBegin, RoleEnd, Tools, Image, Fork, Join, Var,
    Pause, Hint, Compress, Background, Drop, Resume, End,
)  # fmt: skip
_OPS = {op.kind: op for op in _KINDS}
_VALUES_OF = {kind: attrgetter(*(f.name for f in fields(op))) for kind, op in _OPS.items()}
_OPTIONAL_INT_FIELDS = {"num_needed": (1, 65_536), "ttl_ms": (1, 2**31 - 1), "priority": (0, 100),
    "cut_to": (1, 2**31 - 1),
}  # fmt: skip
_MAX_CHARS = {
    "name": MAX_OP_NAME_CHARS, "label": MAX_OP_NAME_CHARS, "fields": MAX_FIELDS_CHARS,
    "lora_path": MAX_OP_NAME_CHARS, "tools": MAX_TOOLS_CHARS,
}  # fmt: skip
_ALLOWED = {
    "method": CHOICES_METHODS, "mode": JOIN_MODES, "action": HINT_ACTIONS, "tier": TIERS,
    "pooling": POOLINGS,
}  # fmt: skip
_MAX_INT = 2**31 - 1
MAX_PAUSE_S = 86_400.0


def op_from_wire(item: object) -> Op:
    """Decode and check one op. Raises InvalidProgram with the field and what it may be."""
    kind = item[0] if isinstance(item, list) and len(item) >= 4 else None
    if not isinstance(item, list) or not isinstance(kind, str) or kind not in _OPS:
        raise InvalidProgram.of("op", item, f"[kind, branch, seq, source, ...], kind in {[*_OPS]}")
    checks = _CHECKS_OF[kind]
    if len(item) - 1 > len(checks):
        raise InvalidProgram.of("op", item, f"{kind} takes {[name for name, _ in checks]}")
    values = [check(name, value) for (name, check), value in zip(checks, item[1:])]
    return _OPS[kind](*values)


def _require_int(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise InvalidProgram.of(name, value, f"an integer in [0, {_MAX_INT}]")
    return value


def _checked_optional_int(name: str, value: object) -> int | None:
    low, high = _OPTIONAL_INT_FIELDS[name]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_int and low <= value <= high):  # type: ignore[operator]
        raise InvalidProgram.of(name, value, f"an integer in [{low}, {high}], or null")
    return value  # type: ignore[return-value]


def _checked_seconds(name: str, value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value <= MAX_PAUSE_S):  # type: ignore[operator]
        raise InvalidProgram.of(name, value, f"a number in [0, {MAX_PAUSE_S:g}], or null")
    return None if value is None else float(value)  # type: ignore[arg-type]


def _require_list(name: str, value: object, most: int) -> Sequence[object]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise InvalidProgram.of(name, value, f"a list of 1 to {most} items")
    return value


def _checked_ids(name: str, value: object, most: int = 1 << 24) -> tuple[int, ...]:
    return tuple(_require_int(name, item) for item in _require_list(name, value, most))


def _checked_messages(name: str, value: object) -> tuple[Message, ...]:
    return tuple(map(_checked_message, _require_list(name, value, MAX_MESSAGES)))


def _checked_message(value: object) -> Message:
    if not isinstance(value, list) or not 2 <= len(value) <= 5:
        raise InvalidProgram.of("messages", value, "[role, content, fields?, parts?, images?] each")
    role, content, fields, parts, images = [*value, None, None, None][:5]
    told = None if fields is None else _checked_str("fields", fields)
    message = Message(_checked_str("role", role), _checked_str("content", content), told)
    message = message._replace(images=_checked_images(images, len(parts or ())))
    if not parts:
        return message
    lengths = _checked_ids("parts", parts, MAX_PARTS)
    if sum(lengths) != len(message.content):
        raise InvalidProgram.of("parts", sum(lengths), f"{len(message.content)} characters in all")
    return message._replace(parts=lengths)


def _checked_images(value: object, num_parts: int) -> tuple[tuple[int, str], ...]:
    if not value:
        return ()
    placed = tuple(map(_checked_image, _require_list("images", value, MAX_PARTS)))
    places = [at for at, _ in placed]
    if places != sorted(places) or places[0] < 0 or places[-1] > num_parts:
        raise InvalidProgram.of("images", places[:100], f"ascending places in [0, {num_parts}]")
    return placed


def _checked_image(value: object) -> tuple[int, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidProgram.of("images", "...", "[number of parts before it, URL] each")
    at, url = value
    return _require_int("images", at), _checked_str("images", url)


def _checked_choices(name: str, value: object) -> tuple[str, ...]:
    if value is None:  # they are given as ids
        return ()
    choices = _require_list(name, value, MAX_CHOICES)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidProgram.of(name, value, "non-empty strings")
    return tuple(str(choice) for choice in choices)


def _checked_choice_ids(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    return tuple(
        _checked_ids(name, ids, 1 << 20) for ids in _require_list(name, value, MAX_CHOICES)
    )


def _checked_str(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidProgram.of(name, value, "a string")
    if name in _ALLOWED and value not in _ALLOWED[name]:
        raise InvalidProgram.of(name, value, f"one of {_ALLOWED[name]}")
    if len(value) > (most := _MAX_CHARS.get(name, len(value))):
        raise InvalidProgram.of(name, f"{len(value)} characters", f"at most {most} characters")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("branch", "seq", "of_branch", "of_seq"), _require_int),
    **dict.fromkeys(("num_needed", "ttl_ms", "priority", "cut_to"), _checked_optional_int),
    **dict.fromkeys(
        ("text", "name", "role", "method", "mode", "action", "label", "pooling", "tools", "url"),
        _checked_str,
    ),
    **dict.fromkeys(
        ("tier", "fields", "lora_path", "pair"),
        lambda name, value: None if value is None else _checked_str(name, value),
    ),
    **dict.fromkeys(
        ("normalize", "drops_message", "is_text", "has_scores", "begins"),
        lambda _, value: bool(value),
    ),
    "source": lambda _, value: value[:MAX_SOURCE_CHARS] if isinstance(value, str) else None,
    "params": lambda _, value: GenParams.from_wire(value),
    "policy": lambda _, value: KVPolicy.from_wire(value),
    "children": lambda name, value: _checked_ids(name, value, 65_536),
    "token_ids": _checked_ids,
    "messages": _checked_messages,
    "choices": _checked_choices,
    "choice_ids": _checked_choice_ids,
    "expected_s": _checked_seconds,
}
_CHECKS_OF = {kind: [(f.name, _CHECKS[f.name]) for f in fields(op)] for kind, op in _OPS.items()}


def seed_of_sample(seed: int, index: int) -> int:
    """The seed of sample `index` of several that are drawn under `seed`; that of sample 0 is
    `seed` itself, so that the first of n samples is what a single one would be."""
    if index == 0:
        return seed
    return hashed_seed(seed, index)


def hashed_seed(*parts: object) -> int:
    """A seed in [0, 2**63) that follows from these and from nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
