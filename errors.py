"""The one error tree, importable by every floor; it imports nothing of the house.

StemmaError
|-- InvalidRequest        the caller's input: field, value and allowed values are in the message
|   |-- InvalidProgram    an op or an argument of a program that cannot be carried out
|   |-- ModelNotFound     a model or an adapter by a name that is not served
|   |-- PromptTooLong     more tokens than the model or the pool can hold
|   `-- InvalidGrammar    a regex, schema or grammar: malformed, matching nothing, too big
|       `-- UnsupportedSchema   a JSON Schema keyword that cannot be enforced, and where it is
|-- ProtocolError         a frame that breaks the wire protocol
|-- DeadlineExceeded      an output that cannot come, or has not come, by the time it is wanted
|-- MaxTurnsExceeded      a model that calls tools has not answered within the turns that it had
|-- EngineError           the engine is gone, did not start, or failed in a step
|   |-- ModelLoadError    a checkpoint folder that cannot be loaded (file, field, expected, found)
|   `-- RankLost          one of the processes that hold a model together has ended
|-- ProgramError          an op of a program failed; raised where the program waits
|   `-- BatchError        some instances of run_batch failed; names each
|-- MissingDependency     an optional package is not installed; names the extra to install
`-- OutOfPages            no page is free; handled by the scheduler, never seen by users
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BatchError",
    "DeadlineExceeded",
    "EngineError",
    "InvalidGrammar",
    "InvalidProgram",
    "InvalidRequest",
    "MaxTurnsExceeded",
    "MissingDependency",
    "ModelLoadError",
    "ModelNotFound",
    "OutOfPages",
    "ProgramError",
    "PromptTooLong",
    "ProtocolError",
    "RankLost",
    "StemmaError",
    "UnsupportedSchema",
]

LENIENT = "`lenient`, which drops the keyword"  # a remedy of many an UnsupportedSchema
MAX_MODEL_NAME_CHARS = 256  # of what a request names, which may be "model:adapter"


class Picklable:
    """Mixed into an exception before its base: pickled with its text and attributes, whatever its
    constructor takes. By default pickle calls that with `args`, the text; where this does not fit,
    `multiprocessing.Pool` waits for ever for the result that it cannot read."""

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_constructor, (type(self), self.args), self.__dict__


def _without_constructor(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    return kind.__new__(kind, *args)


class StemmaError(Picklable, Exception):
    """Base of everything that Stemma raises on purpose."""


class InvalidRequest(StemmaError, ValueError):
    """A request that cannot be served as asked; `field` names the argument at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> InvalidRequest:
        """The standard wording: which field, what it was, what it may be."""
        try:
            shown = repr(value)
        except RecursionError:  # lists within lists within lists
            shown = f"a deeply nested {type(value).__name__}"
        if len(shown) > 200:
            shown = shown[:200] + "..."
        return cls(f"{field}={shown} is not allowed; allowed: {allowed}", field)


class InvalidProgram(InvalidRequest):
    """A program's op or argument cannot be carried out."""


class ModelNotFound(InvalidRequest):
    """No model and no adapter of this name is served; the message lists what is."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context or the KV pool. Its message has the phrases by
    which clients of OpenAI's and of Anthropic's API recognise this."""

    @classmethod
    def than(
        cls,
        size: str,
        most: int,
        max_model_len: int,
        field: str = "prompt",
        *,
        remedy: str = "",
    ) -> PromptTooLong:
        """`size`: "N tokens", perhaps "at least"; `most`: as many tokens; `remedy`: besides a
        shorter prompt."""
        return cls(
            f"prompt is too long: {size} > {most} maximum. This model's maximum context length is "
            f"{max_model_len} tokens (--max-model-len or the KV pool, whichever is less){remedy}",
            field,
        )


class InvalidGrammar(InvalidRequest):
    """A regex, JSON Schema or grammar cannot be used; the message says what and where."""


class UnsupportedSchema(InvalidGrammar):
    """A JSON Schema asks for what cannot be enforced.

    `pointer` is the JSON pointer of the subschema ("" is the root), `keyword` the one at fault,
    `remedy` what to change.
    """

    def __init__(self, pointer: str, keyword: str, reason: str, remedy: str = "") -> None:
        message = f"{pointer or '/'}: {keyword} cannot be enforced: {reason}"
        super().__init__(f"{message}; remedy: {remedy}" if remedy else message, "json_schema")
        self.pointer = pointer
        self.keyword = keyword
        self.reason = reason
        self.remedy = remedy


class ProtocolError(StemmaError):
    """A frame on the wire does not follow the protocol."""


class DeadlineExceeded(StemmaError):
    """A call's output cannot come by its deadline, or has not come; the message has both times."""


class MaxTurnsExceeded(StemmaError):
    """A model still called tools in the last turn that it had; `called`: their names. These calls
    were not carried out."""

    def __init__(self, max_turns: int, called: Sequence[str]) -> None:
        super().__init__(
            f"no answer within max_turns={max_turns}: the last turn calls {', '.join(called)}; "
            "allow more turns, or say in the prompt when to answer"
        )
        self.max_turns = max_turns
        self.called = tuple(called)


class EngineError(StemmaError):
    """The engine is unreachable, did not start, or failed while executing a step."""


class ModelLoadError(EngineError):
    """A checkpoint cannot be loaded; the message names the file or tensor and what was expected."""


class RankLost(EngineError):
    """One of the processes that hold a model together has ended: no step can be computed any more,
    and the engine ends."""


class ProgramError(StemmaError):
    """An op of a program failed.

    `op` names the op, `source` is "file:line" of the program line that made it and `kind` the
    class name of the runtime's error.
    """

    def __init__(
        self, message: str, *, op: str = "", source: str | None = None, kind: str = "ProgramError"
    ) -> None:
        where = f" (at {source})" if source else ""
        super().__init__(f"{op}: {message}{where}" if op else f"{message}{where}")
        self.message = message
        self.op = op
        self.source = source
        self.kind = kind


class BatchError(ProgramError):
    """Some instances of a batch failed.

    `errors` maps their index to what each raised. `states` has the state of each instance that
    succeeded, in the order of the arguments, and None for each that failed. In another process it
    is empty: a state belongs to the connection of its program.
    """

    def __init__(
        self, errors: Mapping[int, BaseException], total: int, states: Sequence[Any] = ()
    ) -> None:
        """`states`: those of all instances."""
        lines = [f"  [{index}] {error}" for index, error in sorted(errors.items())[:20]]
        if len(errors) > 20:
            lines.append(f"  ... and {len(errors) - 20} more")
        super().__init__(f"{len(errors)} of {total} instances failed:\n" + "\n".join(lines))
        self.errors = dict(errors)
        self.states = [None if i in self.errors else state for i, state in enumerate(states)]

    def __reduce__(self) -> tuple[Any, ...]:
        build, args, attributes = super().__reduce__()
        errors = {index: _portable(error) for index, error in self.errors.items()}
        return build, args, {**attributes, "errors": errors, "states": []}


def _portable(error: BaseException) -> BaseException:
    """The error, or its text where it is the author's own and cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class or its attributes raise
        return ProgramError(f"{type(error).__name__}: {error}", kind=type(error).__name__)
    return error


class MissingDependency(StemmaError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'stemma-lm[{extra}]'")
        self.package = package
        self.extra = extra


class OutOfPages(StemmaError):
    """The pool has no free page left after eviction; the scheduler preempts or waits."""


def model_not_found(name: str, model_name: str, adapters: tuple[str, ...]) -> ModelNotFound:
    """The error for a name that is neither the model's nor an adapter's."""
    known = f"; its adapters are {', '.join(map(repr, adapters))}" if adapters else ""
    return ModelNotFound(
        f"model {name[:MAX_MODEL_NAME_CHARS]!r} does not exist; this is {model_name!r}{known}",
        "model",
    )
