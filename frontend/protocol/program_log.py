"""What a program has said and what it has become: enough to have it go on anywhere.

Its ops as they came, what its calls appended (ids), and how much of all that its reader has seen.
Opened on another engine with these, it makes only the calls that had not ended; what the reader has
seen never changes, and does not come twice. A router keeps one for each program of its clients, and
a client one for each of its own, so that programs outlive engines and routers.

A branch that failed fails there, too. One that failed and went on (`resume`) goes on as if what was
undone had never been: empty texts stand in its place, as later ops keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ...errors import EngineError, InvalidProgram
from . import ir, wire

Place = tuple[int, int]  # branch and seq

_PART_BYTES = 4 * 1024 * 1024  # of what is given in one item of a message
CALLS = frozenset(op.kind for op in ir.CALL_OPS)
MAX_LOST = 5  # engines in a row that end with a program until it counts as the cause
_SILENT = frozenset(op.kind for op in ir.SILENT_OPS)  # they have no place among others
# What models have in common where a program goes on: it brings its tokens along.
_SAME = (
    "revisions", "dtype", "quantization", "kv_cache_dtype", "deterministic", "max_model_len",
    "vocab_size", "has_lora",
)  # fmt: skip


def require_same_model(info: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises EngineError where programs cannot go on under `info` that began under `other`, both of
    welcomes."""
    for name in _SAME:
        if info.get(name) != other.get(name):
            its = f"its {name} is {info.get(name)!r:.200}, not {other.get(name)!r:.200}"
            raise EngineError(its)


class _Stream:
    """A gen whose output is seen as it comes."""

    __slots__ = ("num_chars", "num_passed_chars", "num_passed_ids", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # seen
        self.num_chars = 0
        self.num_passed_ids = 0  # of what comes now: seen before
        self.num_passed_chars = 0


class ProgramLog:
    """One program's. Owned by one thread, or used under one lock."""

    def __init__(self, create: dict[str, Any]) -> None:
        """`create`: as the client sent it."""
        self.ops: list[list[Any]] = []
        self._by_branch: dict[int, list[int]] = {}  # places in `ops`
        self.wanted: set[int] = set()  # branches that others join, or have values of
        self._roles: dict[int, list[int]] = {}  # by branch: where messages begin and end
        self._forked_at: dict[int, Place] = {}  # by branch: the fork that it begins with
        self.has_ended = False  # no op follows
        self.ends_gens = False  # the client has asked for what its gens have
        self.is_cancelled = False
        self.num_lost = 0  # engines in a row that ended amid calls and said nothing of them
        self.open_calls: dict[Place, None] = {}  # sent, without a value
        self._is_streaming = bool(create.get("stream"))
        self._wants_ids = bool(create.get("token_ids"))
        self._is_replayable = create.get("replayable") is True  # its reader has a log, too
        self._given: dict[Place, dict[str, Any]] = {}
        self._seen: dict[int, int] = {}  # by branch: the last op of which the client has heard
        self._streams: dict[Place, _Stream] = {}
        self._begun: dict[Place, list[int]] = {}  # of gens, what was given of them
        self._failed: dict[int, tuple[int, Any]] = {}  # by branch: at which op, and why
        self._used = [0, 0, 0]  # requests, prompt and completion tokens on engines that were lost
        self._used_here = [0, 0, 0]

    # --- what comes from the client -------------------------------------------------------------

    @staticmethod
    def require_ops(ops: Iterable[Any]) -> None:
        """Raises InvalidProgram for what is no op as on the wire, as far as a log reads it."""
        for op in ops:
            if not (isinstance(op, list) and len(op) > 3 and _are_ints(op[1:3])):
                raise InvalidProgram.of("op", op, "[kind, branch, seq, source, ...]")
            if not (isinstance(op[0], str) and (op[3] is None or isinstance(op[3], str))):
                raise InvalidProgram.of("op", op[:4], "[kind, branch, seq, source, ...]")
            if (ints := _NUMBERS.get(op[0])) is not None and not ints(op[4:]):
                raise InvalidProgram.of("op", op, "branches as integers")

    def restore(self, given: object) -> None:
        """What ops that follow have become before, as another log has `given` it. Raises
        InvalidProgram."""
        items: list[Any] = given if isinstance(given, list) else [given]
        for item in items:
            try:
                branch, seq, kept = item
                is_fine = type(branch) is type(seq) is int and isinstance(kept, dict)
            except (TypeError, ValueError):
                is_fine = False
            if not is_fine:
                raise InvalidProgram.of("given", item, "[branch, seq, {...}] each")
            wire.encode_part("given", item)  # it will be passed on
            if "failed" in kept:
                self._failed[branch] = seq, kept["failed"]
            elif "begun" in kept:
                self._begun[branch, seq] = kept["begun"]
            else:
                self._given[branch, seq] = kept

    def take(self, ops: Iterable[list[Any]]) -> None:
        """The next ops. Each has a kind, a branch and a seq."""
        for op in ops:
            kind, branch, seq = op[:3]
            own = self._by_branch.setdefault(branch, [])
            if seq != len(own):
                raise InvalidProgram.of("seq", seq, f"{len(own)} on {branch}")
            own.append(len(self.ops))
            self.ops.append(op)
            if kind in ("join", "var"):
                self.wanted.update(op[4] if kind == "join" else (op[4],))
            elif kind == "fork":
                for child in op[4]:
                    if child not in self._by_branch:
                        self._forked_at.setdefault(child, (branch, seq))
            elif kind in ("role_begin", "role_end"):
                self._roles.setdefault(branch, []).append(seq)
            if branch in self._failed:
                if kind == "resume":
                    self._resume(branch, drops_message=bool(op[4:] and op[4]))
            elif kind in CALLS and (branch, seq) not in self._given:
                self.open_calls[branch, seq] = None

    def _resume(self, branch: int, *, drops_message: bool) -> None:
        """A branch that failed goes on from before the op that did."""
        first, _ = self._failed.pop(branch)
        own = self._by_branch[branch]  # by seq
        self._undo(own[first:])
        roles = self._roles.get(branch, [])
        while roles and roles[-1] >= first:
            roles.pop()
        if drops_message and roles and self.ops[own[roles[-1]]][0] == "role_begin":
            self._undo(own[roles.pop() : first])

    def _fail(self, branch: int, first: int, payload: Any) -> None:
        """A branch has stopped at its op `first`."""
        told = payload if isinstance(payload, dict) else {}
        self._failed[branch] = first, {n: str(told.get(n, "")) for n in ("message", "kind")}
        for seq in range(first, len(self._by_branch.get(branch, ()))):
            self.open_calls.pop((branch, seq), None)

    def _undo(self, indices: Iterable[int]) -> None:
        """These ops append nothing, and make no calls."""
        for index in indices:
            kind, branch, seq = self.ops[index][:3]
            if kind not in _SILENT:
                self.ops[index] = ["text", branch, seq, None, ""]
            elif kind == "resume":
                self.ops[index] = ["pause", branch, seq, None, None, ""]
            self.open_calls.pop((branch, seq), None)
            self._given.pop((branch, seq), None)
            self._streams.pop((branch, seq), None)

    # --- what comes from an engine --------------------------------------------------------------

    def pass_on(
        self, branch: int, seq: int, kind: str, payload: Any, used: list[int] | None = None
    ) -> Any:
        """What the client is to hear of an event; None: nothing, as it has heard of it before. What
        its call has used counts in `used`, by default in the program's sums."""
        if kind == wire.FAILED and isinstance(payload, dict) and payload.get("op") == "program":
            return payload  # all of it
        if branch in self._failed:
            return None
        if kind == wire.DELTA:
            fresh = self._new_of(branch, seq, payload)
            self.num_lost = self.num_lost if fresh is None else 0
            return fresh
        if seq <= self._seen.get(branch, -1):
            return None
        if kind == wire.LIKELY:  # the op itself goes on
            return payload
        self._seen[branch] = seq
        place = (branch, seq)
        if kind == wire.FAILED:
            self._fail(branch, seq, payload)
            return payload
        if kind == wire.VALUE and isinstance(payload, dict):
            kept = payload.get("kept")
            if not self._is_replayable:
                payload.pop("kept", None)
            if place in self.open_calls:
                self.num_lost = 0
                del self.open_calls[place]
                self._streams.pop(place, None)
                self._begun.pop(place, None)
                self._given[place] = kept or {"ids": [], "text": ""}
                _count(payload.get("meta"), self._used_here if used is None else used)
            elif isinstance(payload.get("value"), list) and self._is_join(place):  # who counted
                self._given[place] = {"winners": payload["value"]}
        return payload

    def done(self, used: Any) -> Any:
        """What the program has used, on all engines."""
        if not isinstance(used, dict):
            return used
        names = ("num_requests", "prompt_tokens", "completion_tokens")
        return {n: used.get(n, 0) + before for n, before in zip(names, self._used, strict=True)}

    def add_used(self, used: list[int]) -> None:
        """So much was used elsewhere."""
        self._used = [a + b for a, b in zip(self._used, used, strict=True)]

    def _new_of(self, branch: int, seq: int, delta: Any) -> Any:
        """What of a delta is new to the client."""
        stream = self._streams.setdefault((branch, seq), _Stream())
        told: dict[str, Any] = {"text": delta} if isinstance(delta, str) else delta
        ids, text = told.get("token_ids", []), told["text"]
        old_ids = min(len(ids), len(stream.token_ids) - stream.num_passed_ids)
        old_chars = min(len(text), stream.num_chars - stream.num_passed_chars)
        stream.num_passed_ids += len(ids)
        stream.num_passed_chars += len(text)
        stream.token_ids += ids[old_ids:]
        stream.num_chars += len(text) - old_chars
        if old_ids or old_chars:
            told = {name: told[name] for name in told if name not in _FIRST_FACTS}
        fresh = {**told, "text": text[old_chars:]}
        for name in ("token_ids", "logprobs"):
            if name in fresh:
                fresh[name] = fresh[name][old_ids:]
        if not self._wants_ids:
            for name in ("token_ids", *_FIRST_FACTS):
                fresh.pop(name, None)
            if "logprobs" not in fresh:
                return fresh["text"] or None
        return fresh if fresh["text"] or fresh.get("token_ids") or fresh.get("logprobs") else None

    # --- its branches ---------------------------------------------------------------------------

    def _is_join(self, place: Place) -> bool:
        own = self._by_branch.get(place[0], ())
        return place[1] < len(own) and self.ops[own[place[1]]][0] == "join"

    def _before(self, branch: int, end: int, begin: int = 0) -> Iterator[list[Any]]:
        """A branch's ops from `begin` to `end`, the last one first."""
        own = self._by_branch.get(branch, ())
        return (self.ops[own[seq]] for seq in range(min(end, len(own)) - 1, begin - 1, -1))

    def begins_at(self, child: int, branch: int, seq: int) -> bool:
        """Whether a branch is made by the fork `(branch, seq)`, and had no op before."""
        return self._forked_at.get(child) == (branch, seq)

    def is_known(self, branch: int, end: int) -> bool:
        """Whether it is known what all ops before this one have become, and what is forked from."""
        at: Place | None = (branch, end)
        while at is not None:
            branch, end = at
            for op in self._before(branch, end):
                if op[0] in CALLS or op[0] in ("join", "var"):
                    if (branch, op[2]) in self._given or op[2] <= self._seen.get(branch, -1):
                        break
                    return False
            at = self._forked_at.get(branch)
        return True

    def needed_for(self, branch: int, end: int) -> dict[int, int]:
        """Which ops a branch's ops before this one rest on, its own among them: by branch, all
        before a seq. Of what was joined only what is known, as the rest did not count."""
        needed: dict[int, int] = {}
        unknown: dict[int, int] = {}
        for number, seq in self.open_calls:
            unknown[number] = min(seq, unknown.get(number, seq))
        ahead = [(branch, end)]
        while ahead:
            branch, end = ahead.pop()
            begin = needed.get(branch, -1)
            if end <= begin:
                continue
            if branch not in needed and branch in self._forked_at:
                above, fork = self._forked_at[branch]
                ahead.append((above, fork + 1))
            needed[branch] = end
            for op in self._before(branch, end, max(0, begin)):
                if op[0] == "join":
                    for child in dict.fromkeys(op[4]):
                        whole = len(self._by_branch.get(child, ()))
                        ahead.append((child, unknown.get(child, whole)))
                elif op[0] == "var":
                    ahead.append((op[4], op[5] + 1))
        return needed

    def knows(self, place: Place) -> bool:
        """Whether something is known of what an op has become."""
        branch, seq = place
        stream = self._streams.get(place)
        has_begun = place in self._begun or (stream is not None and bool(stream.token_ids))
        return place in self._given or has_begun or self._failed.get(branch, (None,))[0] == seq

    def has_become(self, op: list[Any]) -> bool:
        """Whether it is known what an op has become, or each engine finds the same by itself."""
        kind, branch, seq = op[:3]
        if branch in self._failed and seq >= self._failed[branch][0]:
            return True
        if kind == "hint":  # its outcome is told once
            return self.is_answered(op)
        is_race = kind == "join" and len(op) > 6 and op[6] is not None
        return (branch, seq) in self._given if kind in CALLS or is_race else True

    def is_answered(self, op: list[Any]) -> bool:
        """Whether the reader has heard of this op, or of a later one of its branch."""
        return bool(op[2] <= self._seen.get(op[1], -1))

    def num_bytes_before(self, branch: int, end: int) -> float:
        """Of the text with which a branch goes on at its op `end`, about."""
        num_bytes, at = 0.0, (branch, end)
        while True:
            branch, end = at
            for op in self._before(branch, end):
                if op[0] == "text" and len(op) > 4 and isinstance(op[4], str):
                    num_bytes += len(op[4])
                elif (kept := self._given.get((branch, op[2]))) is not None:
                    num_bytes += len(str(kept.get("text", "")))
            if branch not in self._forked_at:
                return num_bytes
            at = self._forked_at[branch]

    # --- on another engine ----------------------------------------------------------------------

    def adapted(self, create: dict[str, Any]) -> dict[str, Any]:
        """`create` for an engine that is to say what another one would need."""
        return {**create, "replayable": True, "token_ids": self._is_streaming or self._wants_ids}

    def lose(self, *, is_asked: bool) -> None:
        """The engine is gone (`is_asked`: as it was to): what it had begun is to begin again."""
        self.num_lost += bool(self.open_calls) and not is_asked
        self._used = [a + b for a, b in zip(self._used, self._used_here, strict=True)]
        self._used_here = [0, 0, 0]
        for stream in self._streams.values():
            stream.num_passed_ids = stream.num_passed_chars = 0

    def lose_branches(self, branches: Collection[int]) -> bool:
        """The same for some branches; whether one of them waits for a call."""
        for place, stream in self._streams.items():
            if place[0] in branches:
                stream.num_passed_ids = stream.num_passed_chars = 0
        return any(place[0] in branches for place in self.open_calls)

    def given(self, places: Collection[Place] | None = None) -> list[bytes]:
        """What the ops (at these places; None: all) have become, for `wire.encode_program`, in
        parts that fit a message. Raises InvalidProgram where one does not."""
        given: list[list[Any]] = []
        for place in self._given if places is None else places:
            if (kept := self._given.get(place)) is not None:
                given.append([*place, kept])
        for place in self.open_calls if places is None else places:
            if place not in self.open_calls:
                continue
            stream, begun = self._streams.get(place), self._begun.get(place, [])
            if stream is not None and len(stream.token_ids) > len(begun):
                begun = stream.token_ids
            if begun:
                given.append([*place, {"begun": begun}])
        for branch, (seq, failure) in self._failed.items():
            if places is None or (branch, seq) in places:
                given.append([branch, seq, {"failed": failure}])
        parts: list[list[bytes]] = []
        size = _PART_BYTES
        for each in given:
            encoded = wire.encode_part("given", each)
            size += len(encoded)
            if size > _PART_BYTES:
                parts.append([])
                size = len(encoded)
            parts[-1].append(encoded)
        return [b"[%b]" % b",".join(part) for part in parts]


def _count(meta: Any, used: list[int]) -> None:
    """Add what a call has used: requests, prompt and completion tokens."""
    metas = meta if isinstance(meta, list) else [meta]
    known = [each for each in metas if isinstance(each, dict)]
    used[0] += len(known)
    used[1] += sum(int(each.get("prompt_tokens", 0)) for each in known)
    used[2] += sum(int(each.get("completion_tokens", 0)) for each in known)


def _are_ints(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


# Of ops that speak of other branches, whether they do so by numbers.
_NUMBERS: dict[str, Callable[[list[Any]], bool]] = {
    "fork": lambda fields: bool(fields) and _are_ints(fields[0]),
    "join": lambda fields: bool(fields) and _are_ints(fields[0]),
    "var": lambda fields: len(fields) > 1 and _are_ints(fields[:2]),
}
_FIRST_FACTS = ("id", "prompt_tokens", "cached_tokens")  # of the first delta with ids
