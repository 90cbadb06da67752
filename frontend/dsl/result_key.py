"""What a run is a run of, as a key that is the same in every process.

A value is told apart by its type and by all that it has: `1` from `True` and `"1"`, a tuple from a
list, a function from another by its source, its defaults and what it closes over. What there is no
rule for here is taken apart as `pickle` would do it, but without what differs between processes:
the order of sets, and which parts are one object. Cost: linear in the size of the value.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ...errors import InvalidProgram

_VERSION = 2  # of how values are told apart
_SCALARS = frozenset((type(None), bool, int, float, str))  # JSON tells these from one another


def program_key(fn: Callable[..., Any]) -> str:
    """What names a function: its name, its source, its defaults, and what it closes over by now.
    Of a lock and the like only the type counts."""
    named = f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    return f"{named}:{_Told(is_lenient=True).digest(fn)}"


def run_key(program: str, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0) -> bytes:
    """`number`: which of the runs of a batch with these very arguments. Raises InvalidProgram for
    arguments that cannot be told from others in another process."""
    told = _Told()
    named = [_VERSION, program, [told.of(each) for each in args], told.of(dict(kwargs)), number]
    return hashlib.blake2b(json.dumps(named).encode(), digest_size=20).digest()


class _Told:
    """Values as plain JSON. Of a part that occurs again it is only a digest."""

    def __init__(self, *, is_lenient: bool = False) -> None:
        """`is_lenient`: what cannot be told apart, such as a lock that a function closes over, is
        told by its type."""
        self._is_lenient = is_lenient
        self._known: dict[int, tuple[object, str]] = {}  # the object is kept, so its id stays its
        self._open: dict[int, int] = {}  # values under way, by id: how deep they are

    def digest(self, value: object) -> str:
        """Hexadecimal, of 16 bytes."""
        return hashlib.blake2b(json.dumps(self.of(value)).encode(), digest_size=16).hexdigest()

    def of(self, value: object) -> Any:
        """A scalar as it is, of all else a digest. Raises InvalidProgram."""
        if type(value) in _SCALARS:
            return value
        if id(value) in self._known:
            return [self._known[id(value)][1]]
        if id(value) in self._open:
            return ["cycle", len(self._open) - self._open[id(value)]]
        self._open[id(value)] = len(self._open)
        try:
            parts = json.dumps([_kind(value), *self._parts(value)])
        except InvalidProgram:  # of a part
            raise
        except (TypeError, ValueError, RecursionError, AttributeError) as error:
            if not self._is_lenient:
                message = f"store: arguments that cannot be compared: {_kind(value)}: {error}"
                raise InvalidProgram(message) from error
            parts = json.dumps([_kind(value)])
        finally:
            del self._open[id(value)]
        digest = hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
        self._known[id(value)] = value, digest
        return [digest]

    def _parts(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return self.of(value.__self__), self.of(value.__func__)
        if isinstance(value, types.ModuleType):
            return (value.__name__,)
        if isinstance(value, type):
            return _of_class(value)
        if isinstance(value, enum.Enum):
            return value.name, self.of(value.value)
        if kind in (list, tuple):
            return map(self.of, value)
        if kind is dict:
            return self._of_mapping(value)
        if kind in (set, frozenset):
            return sorted(json.dumps(self.of(each)) for each in value)
        if kind in (bytes, bytearray):
            return (value.hex(),)
        if isinstance(value, PurePath):
            return (str(value),)
        return self._of_object(value)

    def _of_object(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if (names := getattr(kind, "TOLD_BY", None)) is not None:  # this package's own
            return (self.of([getattr(value, name) for name in names]),)
        if isinstance(fields := getattr(kind, "model_fields", None), dict):  # pydantic's
            own = {name: value.__dict__.get(name) for name in fields}
            more = value.__pydantic_extra__, value.__pydantic_private__
            return self.of(own), self.of(more)
        if dataclasses.is_dataclass(value):
            own = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return (self.of(own),)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            return value.dtype.str, str(value.dtype), value.shape, value.tobytes().hex()
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            return reduced, getattr(value, "__module__", "")
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        return map(self.of, (make, args, state, list(items or ()), list(pairs or ())))

    def _of_mapping(self, value: Mapping[Any, Any]) -> list[str]:
        return sorted(json.dumps([self.of(key), self.of(each)]) for key, each in value.items())

    def _of_function(self, fn: types.FunctionType) -> Iterable[Any]:
        cells = [_content(cell) for cell in fn.__closure__ or ()]
        given = fn.__defaults__, fn.__kwdefaults__, cells
        source = "" if _is_of_python(fn.__module__) else _source_of(fn.__code__)
        return fn.__module__, fn.__qualname__, source, *map(self.of, given)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


@functools.lru_cache(1024)
def _source_of(code: types.CodeType) -> str:
    """A function's source; of one that has none, or shares its line with others, what it does."""
    if code.co_name != "<lambda>":
        try:
            return inspect.getsource(code)
        except (OSError, TypeError):
            pass
    consts = [
        _source_of(each) if isinstance(each, types.CodeType) else _constant(each)
        for each in code.co_consts
    ]
    return json.dumps([code.co_code.hex(), consts, code.co_names, code.co_varnames])


def _constant(value: object) -> str:
    """`in {...}` has a frozenset, whose order differs between processes."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _is_of_python(module: str | None) -> bool:
    """Whether its source is another one with each version of Python."""
    return (module or "").partition(".")[0] in sys.stdlib_module_names


@functools.lru_cache(1024)
def _of_class(kind: type) -> tuple[str, ...]:
    """Raises ValueError for a class that only its own process knows."""
    schema, source = "", ""
    if callable(make := getattr(kind, "model_json_schema", None)):  # pydantic's
        schema = json.dumps(make(), sort_keys=True, default=repr)
    elif "<locals>" in kind.__qualname__:
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            raise ValueError("a class that is local, and has no source") from None
    return kind.__module__, kind.__qualname__, schema, source
